"""Storages of tensors in memory files: memory of this process that other processes can map.

Each storage has its own file. One more page at the end contains a number that names the storage while the storage
exists, and 0 afterwards, so that other processes unmap the file. An existing storage can be moved: all tensors on
the storage follow, but code that has kept the old address reads freed memory.
"""

import ctypes
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_storage_fd

from popdist.errors import BackendError
from popdist.exchange.host_memory.segments import PAGE_BYTES, Segment, as_words, whole_pages
from popdist.ground import torch_private

NUMBER_BITS: Final = 40
"""Number of bits of the random numbers that name storages."""

_READ_AND_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [*_libc.munmap.argtypes, ctypes.c_int]


class MappedFile:
    """A mapping of the memory file of a tensor's storage, in the storage's process or in another process."""

    def __init__(self, descriptor: int) -> None:
        whole = _map(descriptor, os.fstat(descriptor).st_size)
        self.memory = whole[:-PAGE_BYTES]  # the bytes of the storage, rounded up to whole pages
        self._words = as_words(whole[-PAGE_BYTES:])
        self.number: int = self._words[0]

    @property
    def is_in_use(self) -> bool:
        """Whether the storage in this file still exists."""
        return bool(self._words[0])

    def name_storage(self, number: int) -> None:
        """Write into the file the number that names the storage; 0 means that the storage was freed."""
        self._words[0] = number
        self.number = number or self.number


@torch.inference_mode(mode=False)  # a collective within inference mode maps memory for later collectives
def _map(descriptor: int, num_bytes: int) -> Tensor:
    """Map the whole file ``descriptor`` into memory, and return the memory as a flat tensor of bytes."""
    # Python's own mmap would use one more descriptor for each file
    address = _libc.mmap(None, num_bytes, _READ_AND_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    window = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(window, _libc.munmap, address, num_bytes).atexit = False
    return torch.frombuffer(window, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStorage:
    """A tensor's storage in a memory file; torch owns the descriptor of the file while the storage exists."""

    storage: StorageWeakRef
    address: int
    num_bytes: int
    file: MappedFile
    descriptor: int

    @property
    def is_gone(self) -> bool:
        """Whether the storage was freed, or its elements are now at another address."""
        return torch_private.address_of(self.storage) != self.address


_shared: Final[dict[int, SharedStorage]] = {}
"""The storages of this process that are in memory files; the key is the storage's address."""


def make(num_bytes: int) -> UntypedStorage:
    """Make a zeroed storage of at least one byte in a memory file. Raises BackendError if there is no room."""
    storage, file = _make(num_bytes)
    _remember(storage, storage.data_ptr(), file, torch_private.descriptor_of(storage))
    return storage


_POOL_SHARE: Final = 8


class StoragePool:
    """A pool of storages in memory files; a storage is used again when no tensor uses the storage any more."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []

    def storage(self, num_bytes: int) -> UntypedStorage:
        """Return an unused storage of at least ``num_bytes``. Raises BackendError if there is no room."""
        for storage in self._storages:
            is_long_enough = num_bytes <= storage.nbytes() <= num_bytes + num_bytes // _POOL_SHARE
            if is_long_enough and torch_private.is_held_once(storage):
                return storage
        self._storages.append(make(num_bytes))
        return self._storages[-1]


def move(storage: UntypedStorage) -> None:
    """Move a storage that nobody uses now into a memory file. Raises BackendError if there is no room."""
    new_storage, file = _make(storage.nbytes())
    new_storage.copy_(storage, non_blocking=False)
    # the storage is recorded before the swap, so that a fork at any time finds it
    _remember(storage, new_storage.data_ptr(), file, torch_private.descriptor_of(new_storage))
    torch_private.swap_memory(storage, new_storage)


def find(storage: UntypedStorage) -> SharedStorage | None:
    """Return the record of ``storage`` if the storage is in a memory file of this process; otherwise None."""
    shared = _shared.get(storage.data_ptr())
    if shared is not None and shared.storage == StorageWeakRef(storage):
        return shared
    release_gone()
    return None


def release_gone() -> None:
    """Mark the memory files of freed storages, so that all processes of the host unmap these files."""
    for shared in list(_shared.values()):
        if shared.is_gone:
            _shared.pop(shared.address).file.name_storage(0)


def _make(num_bytes: int) -> tuple[UntypedStorage, MappedFile]:
    segment = Segment()
    try:
        segment.grow(whole_pages(num_bytes) + PAGE_BYTES)
        file = MappedFile(segment.descriptor)
        duplicated = SimpleNamespace(detach=partial(os.dup, segment.descriptor))  # torch closes the duplicate
        first_storage: UntypedStorage = rebuild_storage_fd(UntypedStorage, duplicated, num_bytes)
        # before torch 2.9, tensors and the first object that was made are different objects of a storage
        storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(first_storage).untyped_storage()
    except (OSError, ValueError, RuntimeError) as error:
        raise BackendError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
    finally:
        segment.close()
    file.name_storage(secrets.randbelow((1 << NUMBER_BITS) - 1) + 1)
    return storage, file


def _remember(storage: UntypedStorage, address: int, file: MappedFile, descriptor: int) -> None:
    release_gone()
    _shared[address] = SharedStorage(
        storage=StorageWeakRef(storage),
        address=address,
        num_bytes=storage.nbytes(),
        file=file,
        descriptor=descriptor,
    )


def _part_from_parent() -> None:
    """Give storages private pages in a forked child, because the shared pages belong to the parent process."""
    for shared in _shared.values():
        if shared.is_gone:
            continue
        length, how = whole_pages(shared.num_bytes), mmap.MAP_PRIVATE | _MAP_FIXED
        if _libc.mmap(shared.address, length, _READ_AND_WRITE, how, shared.descriptor, 0) == _MAP_FAILED:
            _libc.mprotect(shared.address, length, mmap.PROT_READ)
    _shared.clear()


os.register_at_fork(after_in_child=_part_from_parent)
