"""Storages of tensors in files of memory: this process's own memory, which other processes can map.

A storage lies alone in its file, from the start of it, as torch has it for tensors that it sends to another
process; so torch can send such a tensor, too. A page more at the end holds a number that names the storage as long
as it lives, and 0 afterwards: then whoever maps the file lets go of it. Pages are reserved, as a segment's are.

A storage that is there already can be moved: all tensors on it follow, and whoever has kept its address reads
memory that is gone. A child that is forked later sees the storage and writes into pages of its own.
"""

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from popdist.errors import BackendError
from popdist.host_memory.segments import PAGE_BYTES, Segment, as_words, whole_pages

NUMBER_BITS: Final = 40
"""Of the numbers that name storages."""

_READ_AND_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [*_libc.munmap.argtypes, ctypes.c_int]


class MappedFile:
    """The file of a storage, mapped a second time: by its own process, or by another one.

    Args:
        descriptor: Of the file; the file stays mapped when it is closed.

    Attributes:
        memory: The bytes of the storage, rounded up to whole pages.
        number: What names the storage.

    Raises:
        OSError, ValueError: If the file cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        whole = _map(descriptor, os.fstat(descriptor).st_size)
        self.memory = whole[:-PAGE_BYTES]
        self._words = as_words(whole[-PAGE_BYTES:])
        self.number: int = self._words[0]

    @property
    def is_in_use(self) -> bool:
        """Whether the storage still lies there."""
        return bool(self._words[0])

    def name(self, number: int) -> None:
        """Name the storage; 0 means that it is gone."""
        self._words[0] = number
        self.number = number or self.number


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """A file as a flat tensor of bytes. Python's own mmap would take a descriptor for each."""
    address = _libc.mmap(None, num_bytes, _READ_AND_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    window = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(window, _libc.munmap, address, num_bytes).atexit = False
    return torch.frombuffer(window, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStorage:
    """A storage of this process that lies in a file.

    Attributes:
        reference: The storage, which is not kept alive by this.
        address: Where it begins.
        num_bytes: Its length.
        file: The file, mapped once more.
    """

    reference: StorageWeakRef
    address: int
    num_bytes: int
    file: MappedFile

    def is_there(self, storage: UntypedStorage) -> bool:
        """Whether the storage, which is the one of :attr:`reference`, is where and what it was."""
        return storage.data_ptr() == self.address and storage.nbytes() == self.num_bytes


_shared: Final[dict[int, SharedStorage]] = {}
"""By :func:`key_of`."""


class Listener(Protocol):
    """Wants to know where storages lie in files."""

    def tell(self, places: list[tuple[int, int]]) -> None:
        """Where they begin and end from now on; some may be gone."""
        ...


_listeners: Final["weakref.WeakSet[Listener]"] = weakref.WeakSet()


def tell(listener: Listener) -> None:
    """Tell a listener, which is not kept alive by this, now and whenever a storage is added."""
    _listeners.add(listener)
    listener.tell(_places())


def _places() -> list[tuple[int, int]]:
    return [(shared.address, shared.address + shared.num_bytes) for shared in _shared.values()]


def make(num_bytes: int) -> UntypedStorage:
    """A storage of at least one byte in a file; all zero.

    Raises:
        BackendError: If there is no room.
    """
    storage, file = _make(num_bytes)
    _remember(storage, storage.data_ptr(), file)
    return storage


_use_count: Final[Callable[[int], int]] = torch._C._storage_Use_Count  # noqa: SLF001 - there is no other way to ask

_POOL_SHARE: Final = 8


class StoragePool:
    """Storages in files that are used again when no tensor lies on them any more."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []

    def take(self, num_bytes: int) -> UntypedStorage:
        """A storage of at least ``num_bytes`` on which no tensor lies; its numbers are any.

        Raises:
            BackendError: If there is no room.
        """
        free = [storage for storage in self._storages if _use_count(key_of(storage)) == 1]
        for storage in free:
            if num_bytes <= storage.nbytes() <= num_bytes + num_bytes // _POOL_SHARE:
                return storage
        self._storages.append(make(num_bytes))
        return self._storages[-1]


def move(storage: UntypedStorage) -> None:
    """Move a storage into a file; all tensors on it follow.

    Args:
        storage: Of torch's own allocator for the CPU. Nobody has its address, or writes into it now.

    Raises:
        BackendError: If there is no room; the storage is where it was.
    """
    made, file = _make(storage.nbytes())
    made.copy_(storage, non_blocking=False)
    swap: Any = storage._swap_data_ptr_  # type: ignore[attr-defined] # torch's stubs lack it
    _remember(storage, made.data_ptr(), file)  # before the swap, so that a fork at any time finds it
    swap(made)


def key_of(storage: UntypedStorage) -> int:
    """The address of torch's object, which is its own as long as there is a reference to it, also a weak one."""
    key: int = storage._cdata  # noqa: SLF001 - torch's name for it
    return key


def find(storage: UntypedStorage) -> SharedStorage | None:
    """What is known of a storage that lies in a file of this process's; None of any other."""
    key = key_of(storage)
    found = _shared.get(key)
    if found is None or found.is_there(storage):
        return found
    _forget(key)
    return None


def forget_gone() -> None:
    """Let go of the files of storages that are gone."""
    for key, shared in list(_shared.items()):
        if shared.reference.expired():
            _forget(key)


def _make(num_bytes: int) -> tuple[UntypedStorage, MappedFile]:
    rebuild: Any = UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined] # noqa: SLF001 - as torch rebuilds them
    segment = Segment()
    try:
        segment.grow(whole_pages(num_bytes) + PAGE_BYTES)
        file = MappedFile(segment.descriptor)
        storage: UntypedStorage = rebuild(segment.descriptor, num_bytes)
    except (OSError, ValueError, RuntimeError) as error:
        raise BackendError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
    finally:
        segment.close()
    file.name(secrets.randbelow((1 << NUMBER_BITS) - 1) + 1)
    return storage, file


def _remember(storage: UntypedStorage, address: int, file: MappedFile) -> None:
    forget_gone()
    _shared[key_of(storage)] = SharedStorage(
        reference=StorageWeakRef(storage), address=address, num_bytes=storage.nbytes(), file=file
    )
    for listener in list(_listeners):
        listener.tell(_places())


def _forget(key: int) -> None:
    _shared.pop(key).file.name(0)


def descriptor_of(storage: UntypedStorage) -> int:
    """The descriptor of the storage's file, which torch holds as long as the storage lies there."""
    descriptor: int = storage._share_fd_cpu_()[0]
    return descriptor


def _part_from_parent() -> None:
    """In a forked child, write into pages of its own from now on: the others are the parent's."""
    for shared in list(_shared.values()):
        if shared.reference.expired():
            continue
        storage = UntypedStorage._new_with_weak_ptr(shared.reference.cdata)  # noqa: SLF001 - there is no other way to ask
        if not shared.is_there(storage):
            continue
        length, how = whole_pages(shared.num_bytes), mmap.MAP_PRIVATE | _MAP_FIXED
        if _libc.mmap(shared.address, length, _READ_AND_WRITE, how, descriptor_of(storage), 0) == _MAP_FAILED:
            _libc.mprotect(shared.address, length, mmap.PROT_READ)
    _shared.clear()


os.register_at_fork(after_in_child=_part_from_parent)
