"""The running jobs of this machine, and the connection to one of them."""

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from poprun.messages.control import RECEIVE_BYTES, VIEW_EVENT, abstract_address, peer_user
from poprun.messages.json_lines import LineReader, decode, encode
from poprun.messages.view import JobView

_NAME: Final = re.compile(r"@(poprun-(\d+)-[0-9a-f]{32})$", re.MULTILINE)
_CONNECT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that can be looked at.

    Attributes:
        pid: Process id of its poprun.
        address: Name of its control socket.
    """

    pid: int
    address: str


def running_jobs() -> list[RunningJob]:
    """The jobs of this user in this network namespace, by process id; the oldest first, as a rule.

    Raises:
        OSError: If there is no /proc to find them in.
    """
    text = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    found = {match[1]: int(match[2]) for match in _NAME.finditer(text)}
    jobs = [RunningJob(pid=pid, address=address) for address, pid in found.items()]
    return sorted((job for job in jobs if _is_ours(job)), key=lambda job: job.pid)


def _is_ours(job: RunningJob) -> bool:
    try:
        return Path("/proc", str(job.pid)).stat().st_uid == os.getuid()
    except OSError:
        return False


def watch(job: RunningJob) -> Iterator[JobView]:
    """Every view that the job sends, until it ends.

    Raises:
        OSError: If it cannot be reached, or says nothing for ten seconds.
        ProtocolError: If it is one of another version of poprun.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(abstract_address(job.address))
        if peer_user(connection) != os.getuid():
            raise PermissionError(f"job {job.pid} is another user's")
        connection.sendall(encode({"event": VIEW_EVENT}))
        connection.settimeout(_SILENCE_SECONDS)
        reader = LineReader()
        while data := _receive(connection):
            for line in reader.feed(data)[0]:
                yield JobView.from_message(decode(line))


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(RECEIVE_BYTES)
    except ConnectionResetError:  # poprun ended before it had read all that was said to it
        return b""
