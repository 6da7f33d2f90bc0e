"""How poprun and its agents speak: JSON objects, one a line, over a socket of this machine.

An agent sends *events*, poprun sends *orders*:

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
| `stillborn`       | a shim's agent ended before it had reported         | instance                         |
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
Standard library only: the agents run this in a bare interpreter.
"""

import json
import socket
import struct

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


class ProtocolError(Exception):
    """The other side sent something that is no message."""


def encode(message: Message) -> bytes:
    """One message as a line of bytes."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


EVENT_FIELDS: dict[str, dict[str, type]] = {
    "hello": {"instance": int, "pid": int, "shim": int, "runtime": int, "address": str, "ports": list},
    "stream": {"instance": int, "stream": int},
    "stillborn": {"instance": int},
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


def check_event(message: Message) -> None:
    """See that a message is an event with all that belongs to it.

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
    """Cuts a byte stream into lines, and lets go of those that grow too long."""

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
