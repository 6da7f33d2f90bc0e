"""Segments: memory that several processes map, one for each process and group, and the rows in it.

A segment is a file in memory without a name: its owner holds a descriptor, the others open that very file, and the
kernel frees it when the last of them has ended, however it ended. It lies in the kernel's own tmpfs, so the size
of ``/dev/shm`` plays no part. Space is reserved when a segment grows, so that a shortage is an error at once and
not a SIGBUS later, and a seal keeps everybody from making it smaller.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

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
    """The memory of this process that others map; a segment can only grow.

    The descriptor is closed when a program is executed, and a forked child that ends takes nothing with it. Making
    one raises BackendError if the kernel, or the sandbox this process is in, does not offer that.
    """

    def __init__(self) -> None:
        self.descriptor, self._num_bytes, self._owner = -1, 0, os.getpid()
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
        offset, more = self._num_bytes, whole_pages(num_bytes)
        try:
            os.posix_fallocate(self.descriptor, offset, more)
        except OSError as error:
            self.release(offset, more)
            raise BackendError(f"no room for {more >> 10} KiB more of shared memory: {error.strerror}") from error
        self._num_bytes += more
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Give the pages back to the machine; what still maps them reads zeros.

        In a forked child nothing happens: the pages are its parent's, which may use them still.
        """
        if os.getpid() != self._owner:
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
    """A row of memory of each rank, mapped by all of them; made by :meth:`HostGroup.allocate`.

    Attributes:
        rows: Every rank's row, in rank order: flat uint8 tensors that begin at a page. Any view of one keeps it
            mapped. Nothing but :meth:`HostGroup.barrier` and the operations of the group tells a rank when another
            has finished writing.
        mine: This rank's row.
    """

    def __init__(self, segment: Segment, offset: int, rows: Sequence[Tensor], rank: int) -> None:
        self.rows = tuple(rows)
        self.mine = rows[rank]
        self._segment = segment
        self._offset = offset

    def of(self, rank: int) -> Tensor:
        """The row of ``rank``."""
        return self.rows[rank]

    def release(self) -> None:
        """Give this rank's memory back, when no rank reads it any more: it reads as zeros from now on.

        A block that is never released goes when the group is closed and the last view of it is gone.
        """
        self.releaser()

    @property
    def releaser(self) -> Callable[[], None]:
        """A function that does what :meth:`release` does, and does not keep the block mapped."""
        return partial(self._segment.release, self._offset, whole_pages(len(self.mine)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory of one rank, at an offset in its segment: a flat uint8 tensor; made by :meth:`HostGroup.reserve`."""

    offset: int
    row: Tensor
