"""One connection between poprun and an agent, at either end: its key is proved, then messages go in and out.

A challenge from each side, answered with an HMAC (RFC 2104) of both over SHA-256; the key itself is never sent.
From key and challenges each direction gets a key of its own. Every line then carries an HMAC over its number and
its text: a line that was invented, changed, repeated or left out is known before anything of it is parsed. What is
said is not secret from who can listen on the network. Standard library only: the agents run this in a bare
interpreter.

On one machine it is a unix socket, whose other end the kernel vouches for, and which carries descriptors. Between
hosts it is a TCP socket whose lines are sealed (`poprun.messages.link`).
Standard library only: the agents run this in a bare interpreter.
"""

import errno
import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from poprun.messages.control import (
    RECEIVE_BYTES,
    LineReader,
    Message,
    ProtocolError,
    abstract_address,
    decode,
    encode,
)

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


_TCP = "tcp://"
_LOOPBACK = "127.0.0.1"
_DEAD_MILLISECONDS = 6_000
_IDLE_SECONDS = 1
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_MAX_DESCRIPTORS = 5


class Received(NamedTuple):
    """What came over a link at once.

    Attributes:
        messages: Those that are messages.
        refusals: Why others are none, in words.
        descriptors: Those that came along.
    """

    messages: list[Message]
    refusals: list[str]
    descriptors: list[int]


class Link:
    """A connection whose other end is known.

    Args:
        connection: The socket. The link owns it.
        seal: What seals the lines of a TCP socket; None for a unix socket.

    Attributes:
        is_silent: Whether the other end is gone without a word, with its host or the way to it.
    """

    def __init__(self, connection: socket.socket, seal: "Seal | None" = None) -> None:
        self.connection = connection
        self._seal = seal
        self._lines = LineReader()
        self.is_silent = False

    def fileno(self) -> int:
        """The socket's descriptor, for selectors; negative when it is closed."""
        return self.connection.fileno()

    def own_address(self) -> str:
        """The address of this end, at which others reach this host; a loopback address on a unix socket."""
        return _LOOPBACK if self._seal is None else str(self.connection.getsockname()[0])

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it if the other end is on this machine.

        Raises:
            OSError: If the other end is gone.
        """
        data = encode(message)
        if self._seal is not None:
            data = self._seal.seal(data)
        sent = socket.send_fds(self.connection, [data], descriptors) if descriptors else 0
        self.connection.sendall(data[sent:])

    def receive(self, check: Callable[[Message], None] | None = None) -> Received | None:
        """What has come; None when the other end is gone.

        Args:
            check: Raises :class:`ProtocolError` for a message that is not to be taken.
        """
        try:
            data, descriptors = self._read()
        except OSError as error:
            self.is_silent = error.errno in _SILENT
            return None
        if not data:
            return None
        lines, num_lost = self._lines.feed(data)
        received = Received([], ["a control message is too long"] * num_lost, descriptors)
        for line in lines:
            try:
                message = decode(line if self._seal is None else self._seal.open(line))
                if check is not None:
                    check(message)
            except ProtocolError as error:
                received.refusals.append(str(error))
            else:
                received.messages.append(message)
        return received

    def _read(self) -> tuple[bytes, list[int]]:
        if self._seal is not None:
            return self.connection.recv(RECEIVE_BYTES), []
        data, descriptors, _, _ = socket.recv_fds(self.connection, RECEIVE_BYTES, _MAX_DESCRIPTORS)
        return data, descriptors


def connect(address: str, key: str, timeout_seconds: float) -> Link:
    """Connect an agent with poprun.

    Args:
        address: What ``CONTROL_ADDRESS`` says.
        key: The job's; used for TCP only.
        timeout_seconds: How long connecting and proving may take.

    Raises:
        OSError: If nobody is there.
        ProtocolError: If who is there is not the poprun of this job.
    """
    if not address.startswith(_TCP):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_seconds)
        connection.connect(abstract_address(address))
        connection.settimeout(None)
        return Link(connection)
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout_seconds)
    seal = _prove(connection, key)
    connection.settimeout(None)
    return Link(connection, seal)


def tcp_address(host: str, port: int) -> str:
    """The ``CONTROL_ADDRESS`` of a TCP socket."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def is_remote(address: str) -> bool:
    """Whether ``address`` is one of the network."""
    return address.startswith(_TCP)


def notice_death(connection: socket.socket) -> None:
    """Let the kernel find out when the other host is gone, whether or not there is something to send (tcp(7)).

    Not for a program's output: there, an end that does not read would count as dead, too.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MILLISECONDS)


def _prove(connection: socket.socket, key: str) -> "Seal":
    """An agent's side of the handshake: poprun speaks first."""
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
