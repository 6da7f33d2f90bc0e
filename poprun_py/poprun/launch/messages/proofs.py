"""The proof that both ends of a connection between hosts know the job's key, and the seals of later messages.

Each side sends a challenge, and the other side answers with an HMAC (RFC 2104) of both challenges; the key is
never sent. Then every line has an HMAC over its number and its text. So a line that was invented, changed,
repeated or left out is found before it is parsed. The messages are not encrypted. Standard library only.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import TYPE_CHECKING

from poprun.launch.messages import ProtocolError

if TYPE_CHECKING:
    import socket

NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES = 32
_NUMBER = struct.Struct("!Q")
_SEPARATOR = b" "


def new_key() -> str:
    """Return a new random key for a job, as text for an environment variable."""
    return os.urandom(KEY_BYTES).hex()


class Handshake:
    """One side of a connection (poprun or an agent), which proves to the other side that it has the job's key."""

    def __init__(self, key: str, *, is_agent: bool) -> None:
        self._key = bytes.fromhex(key)
        self._is_agent = is_agent
        self.nonce = os.urandom(NONCE_BYTES)

    def proof(self, other_nonce: bytes) -> bytes:
        """Return this side's proof of the job's key: an HMAC of the random bytes that both sides have sent."""
        return self._digest(b"agent" if self._is_agent else b"poprun", other_nonce)

    def check(self, other_nonce: bytes, proof: bytes) -> Seal:
        """Check the other side's ``proof``; return the maker of later HMACs. Raise ProtocolError if wrong."""
        expected = self._digest(b"poprun" if self._is_agent else b"agent", other_nonce)
        if not hmac.compare_digest(expected, proof):
            raise ProtocolError("the other side does not know the key of this job")
        to_poprun, to_agent = (self._digest(name, other_nonce) for name in (b"to poprun", b"to agent"))
        return Seal(to_poprun, to_agent) if self._is_agent else Seal(to_agent, to_poprun)

    def _digest(self, purpose: bytes, other_nonce: bytes) -> bytes:
        nonces = (self.nonce, other_nonce) if self._is_agent else (other_nonce, self.nonce)
        return hmac.digest(self._key, purpose + b"\0" + b"".join(nonces), "sha256")


class Seal:
    """The seals, HMACs of the lines of one connection, which prove that no line was changed or left out."""

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._num_sent = 0
        self._num_received = 0

    def seal(self, line: bytes) -> bytes:
        """Return ``line`` with its seal, an HMAC, before it; ``line`` may have a line break only at its end."""
        mark = self._mark(self._sending_key, self._num_sent, line.removesuffix(b"\n"))
        self._num_sent += 1
        return mark + _SEPARATOR + line

    def open(self, line: bytes) -> bytes:
        """Return ``line`` without its HMAC. Raise ProtocolError if the HMAC is wrong or a line is missing."""
        mark, _, text = line.partition(_SEPARATOR)
        if not hmac.compare_digest(mark, self._mark(self._receiving_key, self._num_received, text)):
            raise ProtocolError("a control message does not bear the seal of this job")
        self._num_received += 1
        return text

    @staticmethod
    def _mark(key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, _NUMBER.pack(number) + text, "sha256").hex().encode()


def prove(connection: socket.socket, key: str) -> Seal:
    """Send the proof that this agent knows the job's key, and return the seal, which adds HMACs to later lines.
    Raises ProtocolError if poprun does not know the key.
    """
    handshake = Handshake(key, is_agent=True)
    nonce = _read_exactly(connection, NONCE_BYTES)
    connection.sendall(handshake.nonce + handshake.proof(nonce))
    return handshake.check(nonce, _read_exactly(connection, PROOF_BYTES))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise OSError(f"poprun hung up on process {os.getpid()}")
        data += chunk
    return data
