"""Segments: memory that several processes map, one for each process and group, and the rows in it.

A segment is a file in memory without a name, which the kernel frees when the last process that has it open has
ended. The processes of a group ask each other for theirs at sockets, and prove that they share a host by the
random tokens that they find there.
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
"""``FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`` of fallocate(2)."""

_libc = ctypes.CDLL(None, use_errno=True)


def whole_pages(num_bytes: int) -> int:
    """``num_bytes``, rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def map_window(descriptor: int, offset: int, num_bytes: int) -> mmap.mmap:
    """The bytes ``[offset, offset + num_bytes)`` of a segment; both are whole pages."""
    return mmap.mmap(descriptor, num_bytes, offset=offset)


def as_tensor(window: mmap.mmap) -> Tensor:
    """The window as a flat tensor of bytes; any view of the tensor keeps the window mapped."""
    return torch.frombuffer(window, dtype=torch.uint8)


def as_words(row: Tensor) -> memoryview:
    """The memory of a flat tensor of bytes as 64-bit numbers without sign."""
    array: Any = row.numpy()
    return memoryview(array).cast("Q")


class Segment:
    """The memory of this process that others map, and that only grows; BackendError where there is none."""

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
        """How much of the machine's memory is reserved for the segment and was not given back."""
        return os.fstat(self.descriptor).st_blocks * 512

    def grow(self, num_bytes: int) -> int:
        """Reserve whole pages for ``num_bytes`` more, all zero; the offset where they begin."""
        more = whole_pages(num_bytes)
        with self._growing:  # a thread may send a message while another one makes room for a collective
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
        """Give the pages back to the machine, if they are this process's own; what still maps them reads zeros."""
        if os.getpid() != self._owner:  # a forked child, whose parent may use the pages still
            return
        _libc.fallocate(
            self.descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(offset), ctypes.c_longlong(num_bytes)
        )

    def close(self) -> None:
        """Close the descriptor, once; what is mapped stays until the last view of it has gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedBlock:
    """A row of memory of each rank, mapped as long as a view of it is used; made by :meth:`HostGroup.allocate`."""

    def __init__(self, segment: Segment, offset: int, rows: Sequence[Tensor], rank: int) -> None:
        self.rows = tuple(rows)
        self.mine = rows[rank]
        self.release: Callable[[], None] = partial(segment.release, offset, whole_pages(len(self.mine)))
        """Give this rank's memory back, when no rank reads it any more; this does not keep the block mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory of one rank, at an offset in its segment: a flat uint8 tensor; made by :meth:`HostGroup.reserve`."""

    offset: int
    row: Tensor


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


def values_of_all(
    store: Store,
    rank: int,
    names: Sequence[str],
    value: Any,
    timeout_seconds: float,
    deadline: float | None = None,
) -> list[Any]:
    """The values that all ranks put into a store of their own; BackendError if one is not there in time."""
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
        self._values_of_all("tokens", secrets.token_hex(TOKEN_BYTES))
        self._values_of_all("connections", [])
        self._values_of_all("found", mine=False)

    def run(self, segment: Segment, page: memoryview) -> dict[int, PeerSegment] | None:
        """Every other rank's segment; None, on every rank, if one could not open another's, or has none itself."""
        token = secrets.token_bytes(TOKEN_BYTES)
        page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
        found: dict[int, PeerSegment] = {}
        with ExitStack() as stack:
            listener = stack.enter_context(_listen(token.hex()))
            tokens = self._values_of_all("tokens", token.hex())
            connections = {
                rank: stack.enter_context(made)
                for rank, theirs in enumerate(tokens)
                if rank != self._rank and (made := _connect(theirs, self._rank)) is not None
            }
            asked = self._values_of_all("connections", sorted(connections))
            self._serve(listener, segment, sum(self._rank in them for them in asked))
            for rank, connection in connections.items():
                if (received := self._receive(connection, tokens[rank])) is not None:
                    found[rank] = received
        has_all = len(found) == len(tokens) - 1
        if all(self._values_of_all("found", has_all)):
            return found
        for peer in found.values():
            os.close(peer.descriptor)
        return None

    def _values_of_all(self, what: str, mine: Any) -> list[Any]:
        store = PrefixStore(what, self._store)
        return values_of_all(store, self._rank, self._names, mine, self._timeout_seconds, self._deadline)

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

    def _receive(self, connection: socket.socket, token: str) -> PeerSegment | None:
        """The segment that comes over ``connection``, if it holds the token."""
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
    """A descriptor of this process for a file in memory of popdist's that another one has open, or OSError."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not str(Path(path).readlink()).startswith(_WHERE_SEGMENTS_ARE):
        raise FileNotFoundError(path)  # in another namespace this may be any file of any process: it is not opened
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _connect(token: str, rank: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ACCEPT_SECONDS)  # where strangers fill the queue this fails at once, and never waits
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
    return f"\0popdist-{token[:32]}"  # without a place in the file system


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _checked(descriptor: int, pid: int, token: str) -> PeerSegment | None:
    """The segment behind ``descriptor``, if it is this user's and holds the token."""
    try:  # what was announced came through a store of torch's, which every user of the machine may have written
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError
        with map_window(descriptor, 0, PAGE_BYTES) as page:
            if page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES].hex() == token:
                return PeerSegment(descriptor=descriptor, pid=pid)
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    return None
