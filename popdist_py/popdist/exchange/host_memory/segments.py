"""Segments: memory that several processes map, one segment for each process and group, and rows in segments.

A segment is a file in memory without a name, which the kernel frees when the last process that has it open ends.
The processes of a group ask each other for their segments at sockets. Random tokens in the segments prove that the
processes share a host.
"""

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.errors import BackendError

PAGE_BYTES: Final = mmap.PAGESIZE

_PUNCH_HOLE_KEEP_SIZE: Final = 3
"""The flags ``FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`` of fallocate(2)."""

_libc = ctypes.CDLL(None, use_errno=True)


def whole_pages(num_bytes: int) -> int:
    """Return ``num_bytes``, rounded up to whole pages of memory."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def map_window(descriptor: int, offset: int, num_bytes: int) -> mmap.mmap:
    """Map the bytes ``[offset, offset + num_bytes)`` of a memory file; both numbers are multiples of a page."""
    return mmap.mmap(descriptor, num_bytes, offset=offset)


@torch.inference_mode(mode=False)  # a collective within inference mode maps memory for later collectives
def as_tensor(window: mmap.mmap) -> Tensor:
    """Return mapped memory as a flat uint8 tensor; any view of this tensor keeps the memory mapped."""
    return torch.frombuffer(window, dtype=torch.uint8)


def as_words(row: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor as unsigned 64-bit integers."""
    array: Any = row.numpy()
    return memoryview(array).cast("Q")


class Segment:
    """A memory file of this process that other processes map; it only grows. Raises BackendError on failure."""

    def __init__(self) -> None:
        self.descriptor, self._num_bytes, self._owner = -1, 0, os.getpid()
        self._growing = Lock()
        try:
            self.descriptor = os.memfd_create("popdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError as error:
            self.close()
            raise BackendError(
                f"there is no memory without a name here (memfd_create): {error.strerror}"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the machine's memory that the memory file holds; released pages do not count."""
        return os.fstat(self.descriptor).st_blocks * 512

    def grow(self, num_bytes: int) -> int:
        """Enlarge the memory file by whole pages of zeros for ``num_bytes``; return the new pages' offset."""
        more = whole_pages(num_bytes)
        with self._growing:  # one thread may send a message while another thread makes room for a collective
            offset = self._num_bytes
            try:
                os.posix_fallocate(self.descriptor, offset, more)
            except OSError as error:
                self.release(offset, more)
                text = f"no room for {more >> 10} KiB more of shared memory: {error.strerror}"
                raise BackendError(text) from error
            self._num_bytes += more
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Release pages of the memory file, which then read as zeros; do nothing in a forked child."""
        if os.getpid() != self._owner:  # a forked child, whose parent may still use the pages
            return
        _libc.fallocate(
            self.descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(offset), ctypes.c_longlong(num_bytes)
        )

    def close(self) -> None:
        """Close the memory file's descriptor, once; memory stays mapped until its last view is deleted."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedBlock:
    """A piece of shared memory (a row) for each rank, mapped in all ranks; :meth:`HostGroup.allocate` makes it."""

    def __init__(self, segment: Segment, offset: int, rows: Sequence[Tensor], rank: int) -> None:
        self.rows = tuple(rows)
        self.mine = rows[rank]
        self.release: Callable[[], None] = partial(segment.release, offset, whole_pages(len(self.mine)))
        """The function that releases this rank's row, to be called when no rank reads the row any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Shared memory that one rank has reserved: a flat uint8 tensor, and its offset in the rank's memory file."""

    offset: int
    row: Tensor


TOKEN_BYTES: Final = 32
TOKEN_OFFSET: Final = PAGE_BYTES - TOKEN_BYTES
"""Offset in a segment of the random token, which is at the end of the first page."""

_ACCEPT_SECONDS: Final = 5.0
"""Seconds to wait for a connection at the socket; few, because the ranks have connected before."""

_WHERE_SEGMENTS_ARE: Final = "/memfd:popdist"

_CREDENTIALS: Final = struct.Struct("3i")
_RANK: Final = struct.Struct("=i")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSegment:
    """Another rank's segment (memory file), opened by this process, and the id of the rank's process."""

    descriptor: int
    pid: int


def values_of_all(
    store: Store,
    rank: int,
    names: Sequence[str],
    value: Any,
    timeout_seconds: float,
    deadline: float | None = None,
) -> list[Any]:
    """Put ``value`` into a key-value store; return all ranks' values. Raises BackendError if a rank is late."""
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
    """One exchange of segments (memory files) between a group's ranks, made by all ranks at the same time."""

    def __init__(self, store: Store, rank: int, names: Sequence[str], timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._deadline = time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds

    def refuse(self) -> None:
        """Take part in the exchange without a memory file, so that :meth:`run` returns None on all ranks."""
        self._values_of_all("tokens", secrets.token_hex(TOKEN_BYTES))
        self._values_of_all("connections", [])
        self._values_of_all("found", mine=False)

    def run(self, segment: Segment, page: memoryview) -> dict[int, PeerSegment] | None:
        """Return the memory files of all other ranks; None on all ranks if a rank lacks or cannot open a file."""
        token = secrets.token_bytes(TOKEN_BYTES)
        page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
        peers: dict[int, PeerSegment] = {}
        with ExitStack() as stack:
            listener = stack.enter_context(_listen(token.hex()))
            tokens = self._values_of_all("tokens", token.hex())
            connections = {
                rank: stack.enter_context(opened)
                for rank, their_token in enumerate(tokens)
                if rank != self._rank and (opened := _connect(their_token, self._rank)) is not None
            }
            connected_ranks = self._values_of_all("connections", sorted(connections))
            self._serve(listener, segment, sum(self._rank in ranks for ranks in connected_ranks))
            for rank, connection in connections.items():
                if (received := self._receive(connection, tokens[rank])) is not None:
                    peers[rank] = received
        has_all = len(peers) == len(tokens) - 1
        if all(self._values_of_all("found", has_all)):
            return peers
        for peer in peers.values():
            os.close(peer.descriptor)
        return None

    def _values_of_all(self, what: str, mine: Any) -> list[Any]:
        store = PrefixStore(what, self._store)
        return values_of_all(store, self._rank, self._names, mine, self._timeout_seconds, self._deadline)

    def _serve(self, listener: socket.socket, segment: Segment, num_connections: int) -> None:
        """Send the memory file's descriptor to the ranks that have connected, and to no other process."""
        served: set[int] = set()
        with suppress(OSError):
            while len(served) < num_connections:
                listener.settimeout(_ACCEPT_SECONDS)
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_ACCEPT_SECONDS)
                    is_ours = _peer_of(connection)[1] == os.geteuid()
                    if is_ours and len(rank_bytes := connection.recv(_RANK.size)) == _RANK.size:
                        socket.send_fds(connection, [b"."], [segment.descriptor])
                        served.add(_RANK.unpack(rank_bytes)[0])

    def _receive(self, connection: socket.socket, token: str) -> PeerSegment | None:
        """Return the file that comes over ``connection``; None if the file lacks the sender's random ``token``."""
        try:
            connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return None
        return _checked(descriptors[0], _peer_of(connection)[0], token) if descriptors else None


def _listen(token: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_socket_name(token))
    listener.listen(socket.SOMAXCONN)
    return listener


def open_through_proc(pid: int, descriptor: int) -> int:
    """Open a memory file of popdist that process ``pid`` has open as ``descriptor``. Raises OSError on failure."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not str(Path(path).readlink()).startswith(_WHERE_SEGMENTS_ARE):
        raise FileNotFoundError(path)  # not opened, because in another namespace this may be any file
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _connect(token: str, rank: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ACCEPT_SECONDS)  # if other users fill the queue, connecting fails at once
    try:
        connection.connect(_socket_name(token))
        if _peer_of(connection)[1] == os.geteuid():
            connection.sendall(_RANK.pack(rank))
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _socket_name(token: str) -> str:
    return f"\0popdist-{token[:32]}"  # an abstract name, which needs no file system


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the process at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _checked(descriptor: int, pid: int, token: str) -> PeerSegment | None:
    """Return the open file ``descriptor`` of a rank; None if another user owns the file, or it lacks ``token``."""
    try:  # the token came through torch's store, into which every user of the machine can write
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError
        with map_window(descriptor, 0, PAGE_BYTES) as page:
            if page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES].hex() == token:
                return PeerSegment(descriptor=descriptor, pid=pid)
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    return None
