"""A file, or host memory, that holds tensors of a phased model: where each tensor lies, and reads and writes.

Each tensor begins at a multiple of ``BLOCK_BYTES``, because direct reads and writes need this alignment.

Reads and writes bypass the page cache (O_DIRECT) if the file system can do that. Otherwise each piece is dropped
from the cache at once, so that the store never takes the memory that it is to save.
"""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from popdist.errors import StoreError
from popdist.ground.accelerators import accelerator
from popdist.ground.local_tensors import TensorForm

BLOCK_BYTES: Final = 4096
"""Bytes of a block: position, length and memory address of a direct read or write are multiples of a block."""

PIECE_BYTES: Final = 8 << 20
"""The bytes that one thread reads or writes at a time; with two threads larger pieces are not faster."""

_LEAST_PIECE_BYTES: Final = 1 << 20

NUM_THREADS: Final = 2

_IN_PIECES: Final = f"blake2b of each {PIECE_BYTES} bytes: "

_WAIT_SECONDS: Final = 600.0
"""The seconds to wait for one piece; a file system that needs longer counts as failed."""

_CLONE: Final = 0x40049409
"""``FICLONE`` of ioctl(2): make a file share the blocks of another file until one of the files is written."""


def whole_blocks(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole blocks of ``BLOCK_BYTES`` bytes, for direct reads and writes."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of bytes of a file that holds one tensor; it begins with a block and shares no block with others."""

    start: int
    num_bytes: int

    @property
    def length(self) -> int:
        """The number of bytes of the tensor's range: the tensor's ``num_bytes``, rounded up to whole blocks."""
        return whole_blocks(self.num_bytes)

    @property
    def end(self) -> int:
        """The first byte after the range, at which the range of the next tensor begins."""
        return self.start + self.length


def lay_out(forms: Mapping[str, TensorForm]) -> dict[str, Region]:
    """Return, by name, the range of bytes that each tensor in ``forms`` gets in a file, one behind the other."""
    regions: dict[str, Region] = {}
    start = 0
    for name, form in forms.items():
        regions[name] = Region(start=start, num_bytes=form.num_bytes)
        start = regions[name].end
    return regions


Direction: TypeAlias = Literal["read", "write"]

Ready: TypeAlias = torch.Event | None
"""The event on a device after which its memory may be read or written; None for memory of the CPU."""


def recorded(device: torch.device) -> Ready:
    """Return an event that occurs when ``device`` has finished its queued work; None if ``device`` is the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def make_buffer(num_bytes: int, device: torch.device | str = "cpu", *, is_pinned: bool = False) -> Tensor:
    """Make a flat tensor of bytes for reads and writes; on the CPU it begins at a multiple of ``BLOCK_BYTES``."""
    if torch.device(device).type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if is_pinned:
        memory = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return memory[-memory.data_ptr() % BLOCK_BYTES :][:num_bytes]
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    window = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may lack huge pages, into which disks may read three times as fast
        window.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(window, dtype=torch.uint8)


def allocate(descriptor: int, num_bytes: int, name: str) -> None:
    """Reserve ``num_bytes`` for the new file ``name``. Raise StoreError if the file system has too little room."""
    system = os.fstatvfs(descriptor)
    free = system.f_bavail * system.f_frsize
    fault = os.strerror(errno.ENOSPC) if num_bytes > free > 0 else ""
    try:
        if not fault:
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        fault = os.strerror(error.errno or errno.EIO)
        os.ftruncate(descriptor, 0)
    if fault:
        raise StoreError(
            f"{name} needs {num_bytes} bytes, and {free} are free there ({fault}): make room, or name "
            "another place"
        )


def digest_of_pieces(path: Path) -> str:
    """Return a digest of the file ``path``: the digest of its parts' digests, which several threads compute."""

    def digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            piece_digest = blake2b(file.read(PIECE_BYTES)).digest()
            os.posix_fadvise(file.fileno(), start, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        return piece_digest

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return _digest_of([*threads.map(digest, range(0, path.stat().st_size, PIECE_BYTES))])


def _digest_of(digests: Sequence[bytes]) -> str:
    return f"{_IN_PIECES}{blake2b(b''.join(digests)).hexdigest()}"


def is_in_pieces(digest: str) -> bool:
    """Whether ``digest`` is a digest that :func:`digest_of_pieces` has made."""
    return digest.startswith(_IN_PIECES)


class StoreThreads:
    """The threads that read and write the files of one store. In a forked child, ``run()`` raises StoreError."""

    def __init__(self, device: torch.device) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="popdist-store")
        self._device = device
        self._own = threading.local()
        self._owner = os.getpid()
        self._is_closed = False

    def run(self, pieces: Iterable[Callable[[], None]]) -> None:
        """Run the functions ``pieces`` in the threads, and wait until all have ended. Raise the first's error."""
        if os.getpid() != self._owner:
            raise StoreError("this process was forked from one that trains in phases: only that one has the store")
        if self._is_closed:
            raise StoreError("the store is closed")
        moving = [self._threads.submit(piece) for piece in pieces]
        try:
            failures = [it.exception(_WAIT_SECONDS) for it in moving]
        except TimeoutError:
            raise StoreError(f"the store has read and written nothing in {_WAIT_SECONDS:g} seconds") from None
        for failure in filter(None, failures):
            raise failure

    def staging(self, num_bytes: int) -> Tensor:
        """Return the calling thread's pinned memory, of ``num_bytes`` bytes, for copies to and from the device."""
        if not hasattr(self._own, "memory"):
            self._own.memory = make_buffer(PIECE_BYTES, is_pinned=True)
            self._own.stream = torch.Stream(self._device)
        memory: Tensor = self._own.memory[:num_bytes]
        return memory

    def copy(self, into: Tensor, data: Tensor, ready: torch.Event) -> None:
        """Copy ``data`` to ``into``, to or from a device, after the event ``ready``; wait for the copy's end."""
        stream = self._own.stream
        with accelerator.in_stream(stream):
            stream.wait_event(ready)
            into.copy_(data, non_blocking=True)
        stream.synchronize()

    def close(self) -> None:
        """Wait for the reads and writes that have begun, and end the threads."""
        self._is_closed = True
        if os.getpid() == self._owner:
            self._threads.shutdown()


class StoreFile:
    """One file of a store, which holds the weights of a phased model. ``descriptor`` is open for reading and
    writing; ``path`` is None if the store is in host memory.
    """

    def __init__(self, descriptor: int, path: Path | None, num_bytes: int, threads: StoreThreads) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self.path = path
        self.threads = threads
        self._mapped: dict[int, int] = {}
        self._direct = None if path is None else _open_direct(descriptor)

    @property
    def name(self) -> str:
        """The name of the file in error messages: its path, or a text that says that it is host memory."""
        return "the store in host memory" if self.path is None else str(self.path)

    def read(self, start: int, into: Tensor) -> None:
        """Read the file, from byte ``start``, into ``into``, a tensor as in :meth:`pieces`, and wait."""
        self.threads.run(self.pieces("read", start, into))

    def write(self, start: int, data: Tensor) -> None:
        """Write ``data``, a tensor as in :meth:`pieces`, at byte ``start`` of the file, and wait."""
        self.threads.run(self.pieces("write", start, data))

    def pieces(
        self, direction: Direction, start: int, memory: Tensor, ready: Ready = None
    ) -> list[Callable[[], None]]:
        """Return functions for threads, each of which reads or writes a piece of the file, from byte ``start``.

        ``memory`` is a flat tensor of bytes, which on a device is used after the event ``ready``. ``start``, the
        length and, on the CPU, the address are multiples of ``BLOCK_BYTES``.
        """
        length = len(memory)
        if (start | length | (memory.data_ptr() if ready is None else 0)) % BLOCK_BYTES:
            raise StoreError(f"bytes {start} to {start + length} of {self.name} are not whole blocks")
        if not 0 <= start <= start + length <= self.num_bytes:
            raise StoreError(
                f"bytes {start} to {start + length} are not in {self.name}, of {self.num_bytes} bytes"
            )
        share = whole_blocks(-(-length // NUM_THREADS))  # so that no thread is idle
        size = min(PIECE_BYTES, max(share, _LEAST_PIECE_BYTES))
        run = self._read_piece if direction == "read" else self._write_piece
        return [partial(run, start + at, memory[at : at + size], ready) for at in range(0, length, size)]

    def write_tensor(self, region: Region, form: TensorForm, tensor: Tensor) -> None:
        """Write ``tensor`` to the bytes ``region`` of the file, in the dtype and strides of ``form``, and wait."""
        if not form.num_bytes:
            return
        values = tensor.detach().to("cpu", form.dtype)
        if values.stride() != form.stride:
            values = form.empty().copy_(values)
        flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
        buffer = make_buffer(min(PIECE_BYTES, region.length))
        for at in range(0, form.num_bytes, PIECE_BYTES):
            part = flat[at : at + PIECE_BYTES]
            buffer[: len(part)] = part
            self.write(region.start + at, buffer[: whole_blocks(len(part))])

    def mapped(self, region: Region, form: TensorForm) -> Tensor:
        """Return the tensor in the bytes ``region`` of the file, mapped into memory, with the dtype and shape in
        ``form``. Changes of the returned tensor do not change the file.
        """
        if not form.num_bytes:
            return form.empty()
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            window = mmap.mmap(self.descriptor, region.length, mmap.MAP_PRIVATE, access, offset=region.start)
        except (OSError, ValueError) as error:  # the file is shorter
            raise StoreError(
                f"bytes {region.start} to {region.end} of {self.name} cannot be mapped: {error}"
            ) from error
        memory = torch.frombuffer(window, dtype=torch.uint8)
        self._mapped[memory.data_ptr()] = region.start
        weakref.finalize(window, self._mapped.pop, memory.data_ptr(), None).atexit = False
        return form.view(memory)

    def start_of(self, tensor: Tensor) -> int | None:
        """Return the byte of the file at which a tensor from :meth:`mapped` begins; None for other tensors."""
        return self._mapped.get(tensor.data_ptr()) if tensor.device.type == "cpu" and tensor.numel() else None

    def copy_to(self, path: Path) -> str:
        """Copy the file to the new file ``path``, with shared disk blocks if possible; return its digest."""
        with path.open("xb") as copy:
            is_shared = _share_blocks(self.descriptor, copy.fileno())
            if not is_shared:
                allocate(copy.fileno(), self.num_bytes, str(path))
        target = StoreFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), path, self.num_bytes, self.threads)
        try:
            return self._copy_pieces(None if is_shared else target)
        finally:
            target.close()

    def close(self) -> None:
        """Close the file; tensors that :meth:`mapped` has returned stay valid until their last view is gone."""
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self._direct = -1, None

    def _copy_pieces(self, target: "StoreFile | None") -> str:
        """Copy the whole file to the file ``target``, or only read it if ``target`` is None; return its digest."""
        starts = range(0, self.num_bytes, PIECE_BYTES)
        digests = [b"" for _ in starts]

        def copy(index: int) -> None:
            data = make_buffer(min(PIECE_BYTES, self.num_bytes - starts[index]))
            self._read_piece(starts[index], data)
            digests[index] = blake2b(_view(data)).digest()
            if target is not None:
                target._write_piece(starts[index], data)  # noqa: SLF001 - the method belongs to the same class

        self.threads.run(partial(copy, index) for index in range(len(starts)))
        return _digest_of(digests)

    def _read_piece(self, start: int, into: Tensor, ready: Ready = None) -> None:
        memory = into if ready is None else self.threads.staging(len(into))
        view, done = _view(memory), 0
        while done < len(view):
            count = self._called("read", os.preadv, start + done, view[done:])
            if not count:
                raise StoreError(f"{self.name} ends at byte {start + done}: it was cut, so its model is lost")
            done += count
        self._drop(start, len(into))
        if ready is not None:
            self.threads.copy(into, memory, ready)

    def _write_piece(self, start: int, data: Tensor, ready: Ready = None) -> None:
        memory = data if ready is None else self.threads.staging(len(data))
        if ready is not None:
            self.threads.copy(memory, data, ready)
        view, done = _view(memory), 0
        while done < len(view):
            done += self._called("written", os.pwritev, start + done, view[done:])
        if self.path is not None and self._direct is None:
            os.fdatasync(self.descriptor)  # the kernel drops only bytes that are on the disk
        self._drop(start, len(data))

    def _called(
        self, what: str, call: Callable[[int, list[memoryview], int], int], at: int, data: memoryview
    ) -> int:
        descriptor = self.descriptor if self._direct is None else self._direct
        try:
            return call(descriptor, [data], at)
        except OSError as error:
            raise StoreError(
                f"bytes {at} to {at + len(data)} of {self.name} could not be {what}: {error.strerror}"
            ) from error

    def _drop(self, start: int, num_bytes: int) -> None:
        if self.path is not None and self._direct is None:
            os.posix_fadvise(self.descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


def _view(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _open_direct(opened: int) -> int | None:
    """Open the file of descriptor ``opened`` again, for direct I/O; return its descriptor, None if impossible."""
    try:
        descriptor = os.open(f"/proc/self/fd/{opened}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    try:
        os.preadv(descriptor, [_view(make_buffer(BLOCK_BYTES))], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _share_blocks(source: int, target: int) -> bool:
    """Make the file ``target`` share the blocks of ``source``; return whether the file system can do that."""
    try:
        fcntl.ioctl(target, _CLONE, source)
    except OSError:
        return False
    return True
