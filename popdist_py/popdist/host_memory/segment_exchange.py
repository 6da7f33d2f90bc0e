"""The exchange of segments: the processes of a group open each other's, which proves that they share a host.

Each process puts the number of its segment's descriptor into the group's store, and the others open that through
``/proc``. Where that is another process's number, or not allowed, as between containers, they ask for the
descriptor at an abstract unix socket of its owner, which serves processes of the same user only. Names prove
nothing: what counts is to find in the memory the random token that its owner announced.
"""

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.errors import BackendError
from popdist.host_memory.segments import PAGE_BYTES, Segment, map_window

TOKEN_BYTES: Final = 32
TOKEN_OFFSET: Final = PAGE_BYTES - TOKEN_BYTES
"""The token stands at the end of the first page."""

_ACCEPT_SECONDS: Final = 5.0
"""How long to wait for a connection at the socket: the ranks that are served have connected before."""

_WHERE_SEGMENTS_ARE: Final = "/memfd:popdist"

_CREDENTIALS: Final = struct.Struct("3i")
_RANK: Final = struct.Struct("=i")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSegment:
    """The segment of another rank, opened by this process, and that rank's process, as this one numbers it."""

    descriptor: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announcement:
    pid: int
    descriptor: int
    token: str

    @property
    def socket_name(self) -> str:
        return f"\0popdist-{self.token[:32]}"


def values_of_all(
    store: Store,
    rank: int,
    names: Sequence[str],
    value: Any,  # noqa: ANN401 - anything that JSON holds
    timeout_seconds: float,
    deadline: float | None = None,
) -> list[Any]:
    """The values that all ranks put into a store, which nobody else uses under its prefix.

    ``names`` are what the ranks are called in errors. Raises BackendError if one does not come until the deadline,
    or for so long.
    """
    deadline = time.monotonic() + timeout_seconds if deadline is None else deadline
    store.set(str(rank), json.dumps(value))
    values = []
    for other, name in enumerate(names):
        try:
            store.wait([str(other)], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise BackendError(f"{name} did not come within the timeout of {timeout_seconds:g} seconds") from error
        values.append(json.loads(store.get(str(other))))
    return values


class SegmentExchange:
    """One exchange of segments between the ranks of a group; every rank makes one at the same time."""

    def __init__(self, store: Store, rank: int, names: Sequence[str], timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._deadline = time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds

    def refuse(self) -> None:
        """Take part without a segment; no rank has any other's then."""
        mine = _Announcement(pid=os.getpid(), descriptor=-1, token=secrets.token_hex(TOKEN_BYTES))
        self._values_of_all("segments", asdict(mine))
        self._values_of_all("connections", [])
        self._values_of_all("found", mine=False)

    def run(self, segment: Segment, page: memoryview) -> dict[int, PeerSegment] | None:
        """Every other rank's segment; None, on every rank, if one could not open another's, or has none itself."""
        token = secrets.token_bytes(TOKEN_BYTES)
        page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
        mine = _Announcement(pid=os.getpid(), descriptor=segment.descriptor, token=token.hex())
        with ExitStack() as stack:
            listener = stack.enter_context(_listen(mine))
            announced = [_Announcement(**values) for values in self._values_of_all("segments", asdict(mine))]
            others = {rank: announcement for rank, announcement in enumerate(announced) if rank != self._rank}
            found = {
                rank: seen
                for rank, announcement in others.items()
                if (seen := _open_through_proc(announcement)) is not None
            }
            connections = {
                rank: stack.enter_context(made)
                for rank, announcement in others.items()
                if rank not in found and (made := _connect(announcement, self._rank)) is not None
            }
            asked = self._values_of_all("connections", sorted(connections))
            self._serve(listener, segment, sum(self._rank in them for them in asked))
            for rank, connection in connections.items():
                if (received := self._receive(connection, announced[rank])) is not None:
                    found[rank] = received
        has_all = len(found) == len(others)
        if all(self._values_of_all("found", has_all)):
            return found
        for theirs in found.values():
            os.close(theirs.descriptor)
        return None

    def _values_of_all(self, what: str, mine: Any) -> list[Any]:  # noqa: ANN401 - anything that JSON holds
        store = PrefixStore(what, self._store)
        return values_of_all(store, self._rank, self._names, mine, self._timeout_seconds, self._deadline)

    def _seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _serve(self, listener: socket.socket, segment: Segment, num_connections: int) -> None:
        """Hand the segment's descriptor to as many ranks as have connected; others get nothing."""
        served: set[int] = set()
        with suppress(OSError):
            while len(served) < num_connections:
                listener.settimeout(_ACCEPT_SECONDS)
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_ACCEPT_SECONDS)
                    is_ours = _peer_of(connection)[1] == os.geteuid()
                    if is_ours and len(said := connection.recv(_RANK.size)) == _RANK.size:
                        socket.send_fds(connection, [b"."], [segment.descriptor])
                        served.add(_RANK.unpack(said)[0])

    def _receive(self, connection: socket.socket, announcement: _Announcement) -> PeerSegment | None:
        """The segment that comes over ``connection``, if it is the announced one."""
        try:
            connection.settimeout(self._seconds_left())
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return None
        return _checked(descriptors[0], _peer_of(connection)[0], announcement) if descriptors else None


def _listen(mine: _Announcement) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(mine.socket_name)
    listener.listen(socket.SOMAXCONN)
    return listener


def _open_through_proc(announcement: _Announcement) -> PeerSegment | None:
    try:
        descriptor = open_through_proc(announcement.pid, announcement.descriptor)
    except OSError:
        return None
    return _checked(descriptor, announcement.pid, announcement)


def open_through_proc(pid: int, descriptor: int) -> int:
    """A descriptor of this process for a file in memory of popdist's that another one has open.

    Raises OSError if ``/proc`` does not lead to it, or to another file.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if not str(Path(path).readlink()).startswith(_WHERE_SEGMENTS_ARE):
        raise FileNotFoundError(path)  # in another namespace this may be any file of any process: it is not opened
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _connect(announcement: _Announcement, rank: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(announcement.socket_name)
        if _peer_of(connection)[1] == os.geteuid():
            connection.sendall(_RANK.pack(rank))
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _checked(descriptor: int, pid: int, announcement: _Announcement) -> PeerSegment | None:
    """The segment behind ``descriptor``, if it is this user's and holds the token.

    What was announced came through a store of torch's, which every user of the machine may have written.
    """
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError
        with map_window(descriptor, 0, PAGE_BYTES) as page:
            if page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES].hex() == announcement.token:
                return PeerSegment(descriptor=descriptor, pid=pid)
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    return None
