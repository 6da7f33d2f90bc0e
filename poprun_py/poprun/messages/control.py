"""The control channel: what poprun, its agents and its monitors say to each other, and the connection they use.

Messages are JSON objects, one a line. An agent sends *events*, poprun sends *orders*:

| event             | says                                                | further keys                     |
|-------------------|-----------------------------------------------------|----------------------------------|
| `hello`           | the agent lives                                     | instance, pid, shim, runtime, …  |
| `started`         | the program runs                                    | pid, memory_not_bound if it is not|
| `failed_to_hold`  | nobody keeps the job's lease on its host any more   | errno                            |
| `failed_to_bind`  | its cores are not to be had                         | errno, cores                     |
| `failed_to_start` | the program could not be executed                   | errno, place                     |
| `stats`           | what the program's tree uses and how far it is      | memory_bytes, progress, …        |
| `signal_unhandled`| no process of the program handles a signal          | signal                           |
| `stacks`          | where the program stands                            | text, processes                  |
| `stream`          | this socket is one of the program's streams         | instance, stream                 |
| `agent_lost`      | a shim's agent ended, or cannot go on; errno or 0   | instance, errno                  |
| `view`            | a monitor wants to look at the job                  |                                  |
| `exited`          | the program ended; negative codes are signals       | code, at_seconds, was_stopped, … |
| `shim_lost`       | the MPI runtime killed the shim                     |                                  |
| `ended`           | nothing of the program's tree is left               |                                  |

| order    | means                                                        | further keys                      |
|----------|--------------------------------------------------------------|-----------------------------------|
| `start`  | run the program; three descriptors come along                | words, working_directory, …       |
| `signal` | pass a signal on to the program's process group              | signal                            |
| `offer_signal` | pass a signal on to the processes that handle it         | signal                       |
| `stacks` | say where the program stands                                 |                                   |
| `stop`   | SIGTERM, then SIGKILL when the grace is over                 | grace_seconds                     |
| `kill`   | SIGKILL now                                                  |                                   |

The program's words and environment travel in the `start` order, so that no secret stands in a command line; its
standard streams travel as descriptors (unix(7), SCM_RIGHTS), so that no output passes through the MPI runtime. An
agent on another host connects one socket for each stream instead, and says `stream` on it first.

On one machine the connection is a unix socket, whose other end the kernel vouches for. Between hosts it is a TCP
socket on which both ends prove that they know the job's key: a challenge from each side, answered with an HMAC
(RFC 2104) of both over SHA-256; the key itself is never sent. From key and challenges each direction gets a key of
its own. Every line then carries an HMAC over its number and its text: a line that was invented, changed, repeated
or left out is known before anything of it is parsed. Whoever can listen on the network can read what is said.

Standard library only: the agents run this in a bare interpreter.
"""

import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

CONTROL_ADDRESS = "POPRUN_CONTROL"
"""Variable that tells a shim where the control socket is: ``tcp://HOST:PORT``, or a name in the abstract namespace
of this machine, which leaves no file behind."""

CONTROL_KEY_FILE = "POPRUN_CONTROL_KEY_FILE"
"""Variable that tells a shim which file of its host holds the job's key, where the control socket is one of the
network: an MPI runtime sends the variable over it as it is, and the file came through ssh."""

RANK_VARIABLE = "POPRUN_RANK_VARIABLE"
"""Variable that tells a shim the name of the variable in which its launcher tells it its rank."""

INSTANCE = "POPRUN_INSTANCE"
"""The rank variable of shims that poprun starts itself."""

VIEW_EVENT = "view"
"""What a monitor says in place of an agent's hello; it is sent views of the job until it hangs up."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Longest message; room for the largest environment that Linux lets a program have."""

RECEIVE_BYTES = 64 * 1024

Message = dict[str, object]

EVENT_FIELDS: dict[str, dict[str, type]] = {
    "hello": {"instance": int, "pid": int, "shim": int, "runtime": int, "address": str, "ports": list},
    "stream": {"instance": int, "stream": int},
    "agent_lost": {"instance": int, "errno": int},
    VIEW_EVENT: {},
    "started": {"pid": int},
    "failed_to_hold": {"errno": int},
    "failed_to_bind": {"errno": int, "cores": list},
    "failed_to_start": {"errno": int, "place": str},
    "stats": {"progress": str},
    "signal_unhandled": {"signal": int},
    "stacks": {"text": str, "processes": list},
    "exited": {"code": int, "at_seconds": float, "was_stopped": bool},
    "shim_lost": {},
    "ended": {},
}
"""What each event must hold; more may come with it."""

NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES = 32
_NUMBER = struct.Struct("!Q")
_SEPARATOR = b" "
_TCP = "tcp://"
_LOOPBACK = "127.0.0.1"
_DEAD_MILLISECONDS = 6_000
_IDLE_SECONDS = 1
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_MAX_DESCRIPTORS = 5


class ProtocolError(Exception):
    """The error when the other side sent something that is no message."""


def encode(message: Message) -> bytes:
    """One message as a line of bytes."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def check_event(message: Message) -> None:
    """Check that a message is an event with all its fields.

    Raises:
        ProtocolError: If not.
    """
    kind = message.get("event")
    fields = EVENT_FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"a control message is no event that poprun knows: {kind!r:.80}")
    for name, wanted in fields.items():
        if type(message.get(name)) is not wanted:
            raise ProtocolError(f"the {name} of a control message is {message.get(name)!r:.80}, in event {kind}")


class LineReader:
    """Cuts a byte stream into lines, and drops those that grow too long."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_too_long = False

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Every line that ``data`` completes, without its ending, and how many were too long and are lost."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_lost = 0
        if self._is_too_long and lines:
            lines.pop(0)
            self._is_too_long = False
            num_lost = 1
        kept = [line for line in lines if len(line) <= MAX_MESSAGE_BYTES]
        if len(self._rest) > MAX_MESSAGE_BYTES:
            self._rest, self._is_too_long = b"", True
        elif self._is_too_long:
            self._rest = b""
        return kept, num_lost + len(lines) - len(kept)


def decode(line: bytes) -> Message:
    """The message in a line.

    Raises:
        ProtocolError: If it is no JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"a control message is no JSON: {line[:80]!r}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a control message is no object: {line[:80]!r}")
    return message


def abstract_address(name: str) -> str:
    """The socket address for a control socket's name (Linux's abstract namespace starts with a zero byte)."""
    return "\0" + name


def peer_user(connection: socket.socket) -> int:
    """User id of the process at the other end, as the kernel tells it (unix(7), SO_PEERCRED)."""
    credentials = struct.Struct("iII")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, user, _ = credentials.unpack(raw)
    return int(user)


def new_key() -> str:
    """A key for one job, as text for an environment variable."""
    return os.urandom(KEY_BYTES).hex()


class Handshake:
    """One side of the proof that both know the key."""

    def __init__(self, key: str, *, is_agent: bool) -> None:
        self._key = bytes.fromhex(key)
        self._is_agent = is_agent
        self.nonce = os.urandom(NONCE_BYTES)

    def proof(self, other_nonce: bytes) -> bytes:
        """The proof for the other side that this one knows the key."""
        return self._digest(b"agent" if self._is_agent else b"poprun", other_nonce)

    def check(self, other_nonce: bytes, proof: bytes) -> "Seal":
        """Check that the other side knows the key, else raise ProtocolError; the seal for all further messages."""
        expected = self._digest(b"poprun" if self._is_agent else b"agent", other_nonce)
        if not _is_same(expected, proof):
            raise ProtocolError("the other side does not know the key of this job")
        to_poprun, to_agent = (self._digest(name, other_nonce) for name in (b"to poprun", b"to agent"))
        return Seal(to_poprun, to_agent) if self._is_agent else Seal(to_agent, to_poprun)

    def _digest(self, purpose: bytes, other_nonce: bytes) -> bytes:
        nonces = (self.nonce, other_nonce) if self._is_agent else (other_nonce, self.nonce)
        return _hmac(self._key, purpose + b"\0" + b"".join(nonces))


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
        """The text of a sealed line, which must be the other side's and the next of its lines."""
        mark, _, text = line.partition(_SEPARATOR)
        if not _is_same(mark, self._mark(self._receiving_key, self._num_received, text)):
            raise ProtocolError("a control message does not bear the seal of this job")
        self._num_received += 1
        return text

    @staticmethod
    def _mark(key: bytes, number: int, text: bytes) -> bytes:
        return _hmac(key, _NUMBER.pack(number) + text).hex().encode()


def _hmac(key: bytes, text: bytes) -> bytes:
    import hmac  # noqa: PLC0415 - loading it takes longer than a shim of one machine, which needs none, to start

    return hmac.digest(key, text, "sha256")


def _is_same(expected: bytes, found: bytes) -> bool:
    """Whether a proof is the expected one, found out in a time that tells nothing of it."""
    import hmac  # noqa: PLC0415 - as above

    return hmac.compare_digest(expected, found)


class Received(NamedTuple):
    """The messages and descriptors that came over a link at once.

    Attributes:
        messages: Those that are messages.
        refusals: Why others are none, in words.
        descriptors: Those that came along.
    """

    messages: list[Message]
    refusals: list[str]
    descriptors: list[int]


class Link:
    """The connection between poprun and one agent or monitor.

    Args:
        connection: The socket. The link owns it.
        seal: What seals the lines of a TCP socket; None for a unix socket.

    Attributes:
        is_sealed: Whether its lines are sealed: the other end may be on another host.
        is_silent: Whether the other end is gone without a word, with its host or the way to it.
    """

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        self.connection = connection
        self._seal = seal
        self._lines = LineReader()
        self.is_sealed = seal is not None
        self.is_silent = False

    def fileno(self) -> int:
        """The socket's descriptor, for selectors; negative when it is closed."""
        return self.connection.fileno()

    def own_address(self) -> str:
        """The address of this end, at which others reach this host; a loopback address on a unix socket."""
        return _LOOPBACK if self._seal is None else str(self.connection.getsockname()[0])

    def close(self) -> None:
        """Close the connection."""
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
        """The messages that have come; None when the other end is gone.

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


def _prove(connection: socket.socket, key: str) -> Seal:
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
