"""The control channel: the messages between poprun, its agents and its monitors, and their connections.

An agent sends *events*, poprun sends *orders*. On one machine the connection is a unix socket, and the kernel says
which user is at the other end. Between hosts it is a TCP socket, on which both ends prove that they know the job's
key (`proofs`). Messages are JSON objects, one on each line. Each shim of an MPI job loads this module in a bare
interpreter, so it imports little of the standard library: not the package `json`, but its part in C.
"""

from __future__ import annotations

from _json import encode_basestring_ascii, make_encoder, make_scanner
from _struct import Struct

from poprun.launch.messages import ProtocolError

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from poprun.launch.messages.proofs import Seal
else:
    import _socket as socket  # the module socket would load enum, selectors and more

MAX_MESSAGE_BYTES = 8 * 1024 * 1024  # enough for the largest environment that Linux allows
Message = dict[str, object]

_BLANKS = " \t\r"

VIEW_EVENT = "view"  # a monitor's first event, instead of hello; the monitor then gets views of the job
LOST = "lost"  # the event that poprun makes itself when an agent's connection closes
RECEIVE_BYTES = 64 * 1024

EVENT_FIELDS: dict[str, dict[str, type]] = {
    "hello": {"instance": int, "pid": int, "shim": int, "runtime": int, "address": str, "ports": list},
    "stream": {"instance": int, "stream": int},  # the socket is a standard stream of a program on another host
    "agent_lost": {"instance": int, "errno": int},  # a shim's agent ended or cannot continue; errno or 0
    "runtime_lost": {"instance": int},  # the process that started the shim was killed, but the shim lives
    VIEW_EVENT: {},
    "started": {"pid": int},
    "failed_to_hold": {"errno": int},  # no process keeps the job's lease on the host any more
    "failed_to_bind": {"errno": int, "cores": list},
    "failed_to_start": {"errno": int, "place": str},
    "stats": {"progress": str},  # the resources and the progress of the program's tree
    "signal_unhandled": {"signal": int},  # no process of the program handles a signal
    "stacks": {"text": str, "processes": list},  # the stacks of the program's processes
    "clock": {"sent_ns": int, "answered_ns": int},  # the time of poprun's question, and the agent's time
    "calls": {"groups": dict, "page": str},  # the program's last collectives, and its whole progress page
    "exited": {"code": int, "at_seconds": float, "was_stopped": bool},  # a negative code is a signal
    "machine": {"killed": list, "limits": dict},  # on another host: processes that the kernel killed, and limits
    "left": {"processes": list, "is_ended": bool},  # processes that still run after a program's good end
    "shim_lost": {},  # the MPI runtime killed the shim
    "ended": {},  # no process of the program's tree is left
}
"""The fields that each event must have, with their types; an event may have more fields."""

_TCP = "tcp://"
_LOOPBACK = "127.0.0.1"
_DEAD_MILLISECONDS = 6_000
_IDLE_SECONDS = 1
_MAX_DESCRIPTORS = 6  # three streams, and leases on virtual IPUs, on GPUs and on cores
_DESCRIPTOR = Struct("i")
_CREDENTIALS = Struct("iII")


class _Grammar:
    """The settings that Python's JSON scanner in C reads: numbers as Python's types, objects without hooks."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} has no JSON")


_scan = make_scanner(_Grammar)  # type: ignore[arg-type]  # the scanner reads only these attributes
_encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)  # noqa: FBT003 - the encoder in C takes flags by position only


def encode(message: Message) -> bytes:
    """Return ``message`` as a JSON object in one line of bytes, with the line's end."""
    return "".join(_encode(message, 0)).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in ``line``. Raises ProtocolError if ``line`` is not a JSON object."""
    try:
        text = line.decode().strip(_BLANKS)
        message, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        message = None
    if not isinstance(message, dict) or end != len(text):
        raise ProtocolError(f"a control message is no JSON object: {line[:80]!r}")
    return message


class LineReader:
    """A reader that divides a byte stream into lines and drops lines that are too long."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_too_long = False

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Return the lines that ``data`` completes, without line ends, and the number of dropped long lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_lost = 0
        if self._is_too_long and lines:
            lines.pop(0)
            self._is_too_long = False
            num_lost = 1
        short_lines = [line for line in lines if len(line) <= MAX_MESSAGE_BYTES]
        if len(self._rest) > MAX_MESSAGE_BYTES:
            self._rest, self._is_too_long = b"", True
        elif self._is_too_long:
            self._rest = b""
        return short_lines, num_lost + len(lines) - len(short_lines)


def check_event(message: Message) -> None:
    """Check that ``message`` to poprun is of a known kind and has all fields. Raise ProtocolError if not."""
    kind = message.get("event")
    fields = EVENT_FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"a control message is no event that poprun knows: {kind!r:.80}")
    for name, field_type in fields.items():
        if type(message.get(name)) is not field_type:
            raise ProtocolError(f"the {name} of a control message is {message.get(name)!r:.80}, in event {kind}")


def abstract_address(name: str) -> str:
    """Return the address of the unix socket called ``name`` in Linux's abstract namespace (unix(7))."""
    return "\0" + name


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of ``connection``, as the kernel says (SO_PEERCRED)."""
    return _peer(connection)[1]


def peer_process(connection: socket.socket) -> int:
    """Return the id of the process at the other end of ``connection``, as the kernel says (SO_PEERCRED)."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


class Received:
    """The result of one read from a connection: messages, errors of refused messages, and file descriptors."""

    def __init__(self, descriptors: list[int]) -> None:
        self.messages: list[Message] = []
        self.refusals: list[str] = []
        self.descriptors = descriptors


def receive_descriptors(
    connection: socket.socket, num_bytes: int, max_descriptors: int
) -> tuple[bytes, list[int]]:
    """Receive at most ``num_bytes``; return the data, and file descriptors sent with the data (SCM_RIGHTS)."""
    data, ancillary, _, _ = connection.recvmsg(num_bytes, socket.CMSG_LEN(max_descriptors * _DESCRIPTOR.size))
    descriptors = [
        descriptor
        for level, kind, block in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(block[: len(block) - len(block) % _DESCRIPTOR.size])
    ]
    return data, descriptors


class Link:
    """A connection by a socket between poprun and an agent (poprun's process on a host that starts instances) or a
    monitor. Over TCP each line has an HMAC (``seal``), which proves that the sender knows the job's key.
    """

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        self.connection = connection
        self._seal = seal
        self._lines = LineReader()
        self.is_sealed = seal is not None  # if True, the other end may be on another host

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors; a negative number if the socket is closed."""
        return self.connection.fileno()

    def own_address(self) -> str:
        """Return the IP address of this end of the connection; the loopback address if it is a unix socket."""
        return _LOOPBACK if self._seal is None else str(self.connection.getsockname()[0])

    def close(self) -> None:
        """Close the socket of the connection."""
        self.connection.close()

    def send(self, *messages: Message, descriptors: Sequence[int] = ()) -> None:
        """Send ``messages`` and, over a unix socket, file descriptors. Raise OSError if the other end is gone."""
        lines = [encode(message) for message in messages]
        if self._seal is not None:
            lines = [self._seal.seal(line) for line in lines]
        data = b"".join(lines)
        sent = 0
        if descriptors:
            block = b"".join(map(_DESCRIPTOR.pack, descriptors))
            sent = self.connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, block)])
        self.connection.sendall(data[sent:])

    def receive(self, check: Callable[[Message], None] | None = None) -> Received | None:
        """Return received messages that ``check`` accepts, and others' errors; None if the other end is gone."""
        try:
            data, descriptors = receive_descriptors(self.connection, RECEIVE_BYTES, _MAX_DESCRIPTORS)
        except OSError:
            return None
        if not data:
            return None
        lines, num_lost = self._lines.feed(data)
        received = Received(descriptors)
        received.refusals += ["a control message is too long"] * num_lost
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


def connect(address: str, key: str, timeout_seconds: float) -> Link:
    """Connect to poprun at ``address``. Raise OSError if nobody listens, ProtocolError if ``key`` is wrong."""
    if not address.startswith(_TCP):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_seconds)
        connection.connect(abstract_address(address))
        connection.settimeout(None)
        return Link(connection)
    return _connect_over_network(address, key, timeout_seconds)


def _connect_over_network(address: str, key: str, timeout_seconds: float) -> Link:
    from socket import create_connection

    from poprun.launch.messages.proofs import prove

    host, _, port = address.removeprefix(_TCP).rpartition(":")
    connection = create_connection((host.strip("[]"), int(port)), timeout_seconds)
    seal = prove(connection, key)
    connection.settimeout(None)
    return Link(connection, seal)


def tcp_address(host: str, port: int) -> str:
    """Return the address of poprun's TCP socket as a text: ``tcp://HOST:PORT``."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def is_remote(address: str) -> bool:
    """Whether ``address`` is a TCP address, so that poprun may be on another host; False for a unix socket."""
    return address.startswith(_TCP)


def notice_death(connection: socket.socket) -> None:
    """Make the kernel notice if the other host of ``connection`` is lost, also without traffic (tcp(7))."""
    # Not used for a program's output, because a reader that only pauses would count as dead.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MILLISECONDS)
