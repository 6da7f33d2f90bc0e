"""What an agent asks torch's recorder in its program: which collectives it has called, and which are not done.

The program's start-up hook has started torch's worker server, whose threads answer while Python is stuck
(`popdist.startup.recorder_server`). Standard library only: a bare interpreter loads this when poprun asks.
"""

from __future__ import annotations

import time

from poprun.messages import ProtocolError
from poprun.messages.control import decode

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import Any, Final

    from poprun.messages.control import Message
else:
    import _socket as socket  # socket itself loads enum and more

MAX_CALLS: Final = 6
"""So many of a group's last calls are passed on, and as many of those that are not done."""

ANSWER_SECONDS: Final = 0.3
MOMENTS_SECONDS: Final = 2.0
_REQUEST: Final = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
_READ_BYTES: Final = 1024 * 1024
_MOST_BYTES: Final = 64 * 1024 * 1024


class RecorderQuestion:
    """One question to the recorder in process ``pid``, behind its descriptor; nothing here waits."""

    def __init__(self, pid: int, descriptor: int, *, is_about_moments: bool = False) -> None:
        self._cut = list_calls if is_about_moments else cut_record
        self._deadline_seconds = time.monotonic() + (MOMENTS_SECONDS if is_about_moments else ANSWER_SECONDS)
        self._received = b""
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.settimeout(0.0)
        self._is_over = False
        try:
            self._link.connect(f"/proc/{pid}/fd/{descriptor}")
            self._link.send(_REQUEST)
        except OSError:
            self._end()

    def answer(self) -> Message | None:
        """What the recorder says, cut to what matters, or nothing if it does not answer; None before that."""
        while not self._is_over:
            try:
                data = self._link.recv(_READ_BYTES)
            except BlockingIOError:
                if time.monotonic() < self._deadline_seconds:
                    return None
                data = b""
            except OSError:
                data = b""
            self._received += data
            if not data or len(self._received) > _MOST_BYTES:
                self._end()
        return self._cut(self._received.partition(b"\r\n\r\n")[2])

    def _end(self) -> None:
        self._is_over = True
        self._link.close()


def cut_record(text: bytes) -> Message:
    """Of what torch's recorder holds as JSON: its groups, how far each is, and their last calls; else nothing."""
    try:
        record: dict[str, Any] = decode(text)
        by_group: dict[str, list[dict[str, Any]]] = {}
        for entry in record.get("entries") or []:
            by_group.setdefault(str(entry["process_group"][0]), []).append(entry)
        groups = [_cut_group(name, entries, record) for name, entries in by_group.items()]
    except (ProtocolError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return {}
    return {"groups": groups}


def list_calls(text: bytes) -> Message:
    """Of what torch's recorder holds as JSON: when each collective was called, by group; else nothing."""
    try:
        record: dict[str, Any] = decode(text)
        groups: dict[str, dict[str, Any]] = {}
        for entry in record.get("entries") or []:
            if not entry.get("is_p2p"):
                name = str(entry["process_group"][0])
                group = groups.setdefault(name, {"ranks": _ranks(name, record), "numbers": [], "microseconds": []})
                group["numbers"].append(int(entry["collective_seq_id"]))
                group["microseconds"].append(int(entry["time_created_ns"]) // 1000)
    except (ProtocolError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return {}
    return {**groups}


def _ranks(name: str, record: dict[str, Any]) -> object:
    """The ranks of a group as torch tells them, or none."""
    config = (record.get("pg_config") or {}).get(name) or {}
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
        "at_nanoseconds": int(entry.get("time_created_ns", 0)),
    }
