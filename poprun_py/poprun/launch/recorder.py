"""An agent's requests to torch's flight recorders in its program: the collectives, and which have not ended.

The program's start-up hook has started torch's worker server, whose threads answer while Python is stuck
(`popdist.startup.recorder_server`). Standard library only: a bare interpreter loads this at poprun's request.
"""

from __future__ import annotations

import time

from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import decode

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from typing import Any, Final

    from poprun.launch.messages.control import Message
else:
    import _socket as socket  # the module socket would load enum and more

MAX_CALLS: Final = 6
"""The number of a group's last calls that an agent sends to poprun, and of earlier calls that have not ended."""

ANSWER_SECONDS: Final = 0.3
MOMENTS_SECONDS: Final = 2.0
_HANDLERS: Final = (b"fr_trace_json", b"dump_nccl_trace_json")
"""The names of torch's flight recorders at its server: for gloo, and for NCCL, which only some builds have."""

_REQUEST: Final = b"POST /handler/%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_OWN_GROUPS: Final = ("nccl",)
"""The backends that number their calls separately, because a group may have such a backend beside gloo."""
_READ_BYTES: Final = 1024 * 1024
_MOST_BYTES: Final = 64 * 1024 * 1024


class RecorderQuestion:
    """A request to torch's flight recorders in the process ``pid``; no method of the request waits."""

    def __init__(self, pid: int, descriptor: int, *, is_about_moments: bool = False) -> None:
        self._cut = list_calls if is_about_moments else cut_record
        self._deadline_seconds = time.monotonic() + (MOMENTS_SECONDS if is_about_moments else ANSWER_SECONDS)
        self._links = [_Link(f"/proc/{pid}/fd/{descriptor}", handler) for handler in _HANDLERS]

    def answer(self) -> Message | None:
        """Return the collectives in the flight recorders; {} if none answers, None while an answer can come."""
        is_late = time.monotonic() >= self._deadline_seconds
        if not all(link.receive(is_late=is_late) for link in self._links):
            return None
        return self._cut(b"\n".join(link.text for link in self._links))


class _Link:
    """A connection to torch's worker server in a program, for a request to one flight recorder."""

    def __init__(self, path: str, handler: bytes) -> None:
        self._received = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(0.0)
        self._is_over = False
        try:
            self._socket.connect(path)
            self._socket.send(_REQUEST % handler)
        except OSError:
            self._end()

    @property
    def text(self) -> bytes:
        """The received answer of the flight recorder, without the HTTP header, in one line."""
        return self._received.partition(b"\r\n\r\n")[2].replace(b"\n", b" ")

    def receive(self, *, is_late: bool) -> bool:
        """Receive the arrived bytes; return True if the answer is complete, has failed, or comes too late."""
        while not self._is_over:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                if not is_late:
                    return False
                data = b""
            except OSError:
                data = b""
            self._received += data
            if not data or len(self._received) > _MOST_BYTES:
                self._end()
        return True

    def _end(self) -> None:
        self._is_over = True
        self._socket.close()


def cut_record(text: bytes) -> Message:
    """Return each process group's progress and last collectives from flight recorders' JSON; {} if malformed."""
    try:
        groups = [_cut_group(*group) for group in groups_in(text)]
    except MALFORMED:
        return {}
    return {"groups": groups} if groups else {}


def list_calls(text: bytes) -> Message:
    """Return when each process group made its collectives, from the flight recorders' JSON; {} if malformed."""
    groups: dict[str, dict[str, Any]] = {}
    try:
        for name, calls, record in groups_in(text):
            if entries := [entry for entry in calls if not entry.get("is_p2p")]:
                numbers = [int(entry["collective_seq_id"]) for entry in entries]
                microseconds = [int(entry["time_created_ns"]) // 1000 for entry in entries]
                groups[name] = {"ranks": _ranks(name, record), "numbers": numbers, "microseconds": microseconds}
    except MALFORMED:
        return {}
    return {**groups}


MALFORMED: Final = (AttributeError, KeyError, IndexError, TypeError, ValueError)


def groups_in(text: bytes) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """Yield each process group in JSON lines of torch's flight recorders: its name, its calls, the whole record.

    Lines that are not JSON are left out. Malformed entries raise one of ``MALFORMED``, here or when they are read.
    """
    for line in text.split(b"\n"):
        try:
            record: dict[str, Any] = decode(line)
        except ProtocolError:
            continue
        by_group: dict[str, list[dict[str, Any]]] = {}
        for entry in record.get("entries") or []:
            backend = str(entry.get("profiling_name")).partition(":")[0]
            suffix = f":{backend}" if backend in _OWN_GROUPS else ""
            by_group.setdefault(f"{entry['process_group'][0]}{suffix}", []).append(entry)
        yield from ((name, entries, record) for name, entries in by_group.items())


def _ranks(name: str, record: dict[str, Any]) -> object:
    """Return the ranks of the process group ``name`` in a recorder's ``record``; [] if the record has none."""
    config = (record.get("pg_config") or {}).get(name.partition(":")[0]) or {}
    return decode(f'{{"ranks":{config.get("ranks") or "[]"}}}'.encode())["ranks"]


def _cut_group(name: str, entries: Sequence[dict[str, Any]], record: dict[str, Any]) -> dict[str, Any]:
    last = list(entries[-MAX_CALLS:])
    open_calls = [entry for entry in entries[:-MAX_CALLS] if not entry.get("retired")][:MAX_CALLS]
    status = (record.get("pg_status") or {}).get(str(entries[-1].get("pg_id"))) or {}
    return {
        "name": name,
        "ranks": _ranks(name, record),
        "num_called": int(status.get("last_enqueued_collective", 0)),
        "num_done": int(status.get("last_completed_collective", 0)),
        "calls": [_cut_call(entry) for entry in (*open_calls, *last)],
    }


def _cut_call(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": int(entry.get("collective_seq_id", 0)),
        "name": str(entry.get("profiling_name", "")),
        "sizes": entry.get("input_sizes") or [],
        "types": entry.get("input_dtypes") or [],
        "is_done": bool(entry.get("retired")),
        "begin_ns": int(entry.get("time_created_ns", 0)),
    }
