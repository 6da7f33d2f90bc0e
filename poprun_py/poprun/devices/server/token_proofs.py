"""The proof that a client knows the secret token of a server of virtual IPUs. The token itself is never sent.

The proof is an HMAC (RFC 2104) of the server's challenge and the client's request. The server accepts each
challenge once, so that an eavesdropper cannot use a proof again.
"""

import hmac
import os
from typing import Final

CHALLENGE: Final = "challenge"
"""The command with which a client asks for a challenge, a random text. Only this command needs no proof."""

_LONGEST_SECONDS: Final = 20.0


def authorization(token: str, challenge: str, command: str, body: str) -> str:
    """Return the HTTP header that proves that a client knows ``token``, for one ``command`` and ``body``."""
    return f"Vipu {challenge} {_mark_of(token, challenge, command, body)}"


def _mark_of(key: str, *texts: str) -> str:
    return hmac.digest(key.encode(), "\n".join(texts).encode(), "sha256").hex()


class Challenges:
    """The challenges of a server: random texts; with each, a client can prove once that it knows the token."""

    def __init__(self) -> None:
        self._key = os.urandom(32).hex()
        self._answered: dict[str, float] = {}

    def make(self, now_seconds: float) -> str:
        """Return a new challenge, a random text that this server can recognize because it is signed."""
        text = f"{now_seconds:.3f}-{os.urandom(16).hex()}"
        return f"{text}-{_mark_of(self._key, text)}"

    def is_answered_by(self, header: str, token: str, command: str, body: str, now_seconds: float) -> bool:
        """Return whether ``header`` proves, by a recent unused challenge, that the client knows ``token``."""
        challenge = header.removeprefix("Vipu ").partition(" ")[0]
        text, _, mark = challenge.rpartition("-")
        is_right = hmac.compare_digest(header.encode(), authorization(token, challenge, command, body).encode())
        if not (is_right and hmac.compare_digest(mark.encode(), _mark_of(self._key, text).encode())):
            return False
        self._answered = {it: at for it, at in self._answered.items() if now_seconds - at <= _LONGEST_SECONDS}
        made_seconds = float(text.partition("-")[0])
        is_new = challenge not in self._answered and now_seconds - made_seconds <= _LONGEST_SECONDS
        self._answered[challenge] = made_seconds
        return is_new
