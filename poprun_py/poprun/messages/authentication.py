"""How poprun and an agent on another host show each other the job's key, and seal what they say.

A challenge from each side, answered with an HMAC (RFC 2104) of both over SHA-256; the key itself is never sent.
From key and challenges each direction gets a key of its own. Every line then carries an HMAC over its number and
its text: a line that was invented, changed, repeated or left out is known before anything of it is parsed. What is
said is not secret from who can listen on the network. Standard library only: the agents run this in a bare
interpreter.
"""

import hmac
import os
import struct

from poprun.messages.control import ProtocolError

NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES = 32

_NUMBER = struct.Struct("!Q")
_SEPARATOR = b" "


def new_key() -> str:
    """A key for one job, as text for an environment variable."""
    return os.urandom(KEY_BYTES).hex()


class Handshake:
    """One side's part of the proof.

    Args:
        key: The job's key, as :func:`new_key` made it.
        is_agent: Which side this is.
    """

    def __init__(self, key: str, *, is_agent: bool) -> None:
        self._key = bytes.fromhex(key)
        self._is_agent = is_agent
        self.nonce = os.urandom(NONCE_BYTES)

    def proof(self, other_nonce: bytes) -> bytes:
        """What shows the other side that this one knows the key."""
        return self._digest(b"agent" if self._is_agent else b"poprun", other_nonce)

    def check(self, other_nonce: bytes, proof: bytes) -> "Seal":
        """See that the other side knows the key; what seals the messages from here on.

        Raises:
            ProtocolError: If it does not.
        """
        expected = self._digest(b"poprun" if self._is_agent else b"agent", other_nonce)
        if not hmac.compare_digest(expected, proof):
            raise ProtocolError("the other side does not know the key of this job")
        to_poprun, to_agent = (self._digest(name, other_nonce) for name in (b"to poprun", b"to agent"))
        return Seal(to_poprun, to_agent) if self._is_agent else Seal(to_agent, to_poprun)

    def _digest(self, purpose: bytes, other_nonce: bytes) -> bytes:
        nonces = (self.nonce, other_nonce) if self._is_agent else (other_nonce, self.nonce)
        return hmac.digest(self._key, purpose + b"\0" + b"".join(nonces), "sha256")


class Seal:
    """Numbers and seals the lines of one direction, and opens those of the other."""

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._num_sent = 0
        self._num_received = 0

    def seal(self, line: bytes) -> bytes:
        """``line`` with its seal in front; it must hold no line break but the one at its end."""
        mark = self._mark(self._sending_key, self._num_sent, line.removesuffix(b"\n"))
        self._num_sent += 1
        return mark + _SEPARATOR + line

    def open(self, line: bytes) -> bytes:
        """What was sealed.

        Raises:
            ProtocolError: If it was not sealed by the other side, or is not the next of its lines.
        """
        mark, _, text = line.partition(_SEPARATOR)
        if not hmac.compare_digest(mark, self._mark(self._receiving_key, self._num_received, text)):
            raise ProtocolError("a control message does not bear the seal of this job")
        self._num_received += 1
        return text

    @staticmethod
    def _mark(key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, _NUMBER.pack(number) + text, "sha256").hex().encode()
