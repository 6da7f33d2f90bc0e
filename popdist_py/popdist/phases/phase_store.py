"""The store of a phased model: a folder or host memory with its weights, gradients and optimizer state.

The instances of a host share one store. The first instance makes the store and holds its lock; then the other
instances open the store. A store is working memory: it overwrites files of an earlier run. Only checkpoints last.
"""

import fcntl
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import Tensor

from popdist.errors import StoreError, name_first
from popdist.exchange.groups import Group
from popdist.exchange.host_memory import forks
from popdist.exchange.host_memory.segments import open_through_proc
from popdist.exchange.transport.hosts import machine
from popdist.ground.local_tensors import TensorForm, local_part
from popdist.ground.trusted_paths import opened_own_folder
from popdist.job.collectives import fail_together, gather_json
from popdist.phases.store_file import BLOCK_BYTES, Region, StoreFile, StoreThreads, allocate, lay_out

HOST_MEMORY: Final = "host"
"""The name that a program gives in place of a folder for a store in the memory of the host."""

_LOCK: Final = "lock"
_FILES: Final = frozenset({"weights", "state", "gradients"})
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensors:
    """The named tensors in one file of a store, which keeps the weights of a model that is larger than memory."""

    file: StoreFile
    regions: dict[str, Region]
    forms: Mapping[str, TensorForm]

    def part(self, names: Iterable[str]) -> "StoredTensors":
        """Return a StoredTensors with only the tensors that have the names ``names``, in this order."""
        return StoredTensors(file=self.file, regions={it: self.regions[it] for it in names}, forms=self.forms)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The byte at which each tensor begins, by name, if all tensors lie in memory one behind the other."""
        in_memory = lay_out({name: self.forms[name] for name in self.regions})
        return {name: it.start for name, it in in_memory.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes that all tensors take together, each tensor's size rounded up to whole blocks of 4 KiB."""
        return sum(it.length for it in self.regions.values())

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return all tensors, by name, as views of the byte tensor ``memory``, into which the file was read."""
        return {name: self.forms[name].view(memory[begin:]) for name, begin in self.offsets.items()}

    def mapped(self, name: str) -> Tensor:
        """Return the tensor named ``name``, mapped from the file. Writes to this tensor do not change the file."""
        return self.file.mapped(self.regions[name], self.forms[name])

    def write(self, name: str, value: Tensor) -> None:
        """Write ``value`` to the file, at the place of the tensor named ``name``, and wait until it is written."""
        self.file.write_tensor(self.regions[name], self.forms[name], local_part(value))


class PhaseStore:
    """The store of a phased model (a model larger than memory): a folder, or memory of the host, for its weights.

    On each host the first instance makes the store, and the other instances open it.

    Args:
        place: The folder, or ``"host"`` for the memory of the host.
        forms: The dtype, shape and strides of each weight by name, in the order of the weights in the file.
        group: The instances that train copies of these weights, and which all make this call.
        device: The device on which the model computes.

    Attributes:
        tensors: The tensors of each file, by the name of the file.
        weights: The weights by name, which have a file of their own.
        host_index: The number of this instance among the instances that share the store.
        host_size: The number of instances that share the store.
        device: The device on which the model computes.
        step: The number of the last step that was begun.
        is_torn: Whether the last step has not ended: then the weights of two steps are mixed.

    Raises:
        StoreError: On every instance, if there is no room, another job uses the store, the folder has other
            files, or the folder is in memory although the model computes on the CPU.
    """

    def __init__(
        self, place: str | os.PathLike[str], forms: Mapping[str, TensorForm], *, group: Group, device: torch.device
    ) -> None:
        self._folder = None if os.fspath(place) == HOST_MEMORY else _Folder(Path(place).absolute())
        shared = HOST_MEMORY if self._folder is None else f"{self._folder.path.resolve()}"
        places = gather_json(group, "phased(), its stores", [machine(), shared])
        own_index = group.instances.index(group.backend.instance_index)
        sharing = [index for index, it in enumerate(places) if it == places[own_index]]
        self.host_index, self.host_size = sharing.index(own_index), len(sharing)
        self.step, self.is_torn = 0, False
        self._group, self._first = group, sharing[0]
        self.device = device
        self._threads = StoreThreads(device)
        self.tensors: dict[str, StoredTensors] = {}
        self._close = weakref.finalize(self, _close_all, self._threads, self.tensors, self._folder)
        try:
            with fail_together(group, "phased(), its folder", StoreError):
                if self._folder is not None and self.host_index == 0:
                    self._folder.claim(is_on_cpu=device.type == "cpu")
            self.weights = self.add("weights", forms)
        except BaseException:
            self.discard()
            raise

    def begin_step(self, step: int) -> None:
        """Mark the store as torn: until step number ``step`` ends, some weights are from before the step."""
        self.step, self.is_torn = step, True

    def end_step(self, write: Callable[[], object] | None = None) -> None:
        """Call the function ``write``, if given. If the calls of all instances succeed, mark the step as ended."""
        with fail_together(self._group, "phased(), the end of a step", StoreError):
            if write is not None:
                write()
        self.is_torn = False

    def check_open(self) -> None:
        """Raise StoreError if the store, which keeps the model's weights, was closed."""
        if not self._close.alive:
            raise StoreError(
                "this phased model was closed, by close() or since the last name of it is gone, so its weights "
                "are not there any more: keep the model that phased() returns, and make it anew after close()"
            )

    def check_whole(self) -> None:
        """Raise StoreError if the store was closed, or mixes weights of two steps because a step has not ended."""
        self.check_open()
        if self.is_torn:
            raise StoreError(
                f"step {self.step} is half made: some of the weights are those of the step before. Load the last "
                "checkpoint, with popdist.checkpoint.load_latest()"
            )

    def wait_for_host(self) -> None:
        """Wait until all instances make this call. Then this instance can read all their earlier writes."""
        self._group.agree("phased(), reading what others wrote")

    def place_of(self, tensor: Tensor) -> tuple[StoreFile, int] | None:
        """Return the store's file from which ``tensor`` is mapped, with its first byte; None for other tensors."""
        for stored in self.tensors.values():
            if (start := stored.file.start_of(tensor)) is not None:
                return stored.file, start
        return None

    def close(self) -> None:
        """End the store's threads and release its lock; its files stay unchanged. May be called again."""
        self._close()

    def discard(self) -> None:
        """Close the store, and remove its folder if this store has made the folder."""
        self.close()
        if self._folder is not None and self.host_index == 0:
            self._folder.remove_if_new()

    def add(self, name: str, forms: Mapping[str, TensorForm]) -> StoredTensors:
        """Make the store's file ``name``, such as ``weights``, with room for tensors of the forms ``forms``
        (dtype and shape); return the tensors' places in the file. All instances make this call.

        A file of this name from before is closed, so that its disk space is free. Its writes must have ended.
        """
        if (before := self.tensors.pop(name, None)) is not None:
            before.file.close()
        regions = lay_out(forms)
        num_bytes = max([BLOCK_BYTES, *(it.end for it in regions.values())])
        path = None if self._folder is None else self._folder.path / name
        descriptor = -1
        try:
            with fail_together(self._group, f"phased(), its {name} of {num_bytes} bytes", StoreError):
                if self.host_index == 0:
                    if path is not None:  # a process that has an older file open keeps that file
                        path.unlink(missing_ok=True)
                    descriptor = _create(path, num_bytes)
            descriptors = gather_json(self._group, f"phased(), who has its {name}", [os.getpid(), descriptor])
            with fail_together(self._group, f"phased(), opening its {name}", StoreError):
                if self.host_index:
                    descriptor = _open_created(path, *descriptors[self._first])
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        file = StoreFile(descriptor, path, num_bytes, self._threads)
        self.tensors[name] = StoredTensors(file=file, regions=regions, forms=forms)
        return self.tensors[name]


class _Folder:
    """The folder of a phased model's store, with a lock that only one process can hold at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._is_new = False
        forks.call_in_children(self.close)  # so that the lock is this process's alone

    def claim(self, *, is_on_cpu: bool) -> None:
        """Make the store's folder if necessary, lock it, and remove old files. Raise StoreError if that fails."""
        try:
            is_new = not self.path.exists()
            with opened_own_folder(str(self.path), makes=True):
                self._is_new = is_new
            if is_on_cpu and (kind := _file_system_of(self.path.resolve())) in _IN_MEMORY:
                raise StoreError(
                    f"{self.path} is on a {kind}, which is the memory that the store is to save: name a folder on "
                    "a disk"
                )
            if strange := sorted({it.name for it in self.path.iterdir()} - _FILES - {_LOCK}):
                raise StoreError(
                    f"{self.path} is no store, and not empty: it has {name_first(strange)}. Name an empty folder, "
                    "or one that is not there"
                )
            self._acquire_lock()
            self._remove_files()
        except OSError as error:
            raise StoreError(f"{self.path} cannot be a store: {error.strerror} ({error.filename})") from error

    def close(self) -> None:
        """Release the lock of the folder, if this process holds it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove_if_new(self) -> None:
        """Remove the store's folder with its files, if this process has made the folder."""
        if self._is_new:
            self._remove_files()
            (self.path / _LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()

    def _remove_files(self) -> None:
        """Remove the store's files of an earlier run; processes that have the files open can still use them."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)

    def _acquire_lock(self) -> None:
        self._lock = _opened(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 1000, 0).decode(errors="replace")
            self.close()
            self._is_new = False
            if holder == _own_name():
                raise StoreError(
                    f"{self.path} is the store of another phased model of this program: call its close() before, "
                    "or name another folder. In a notebook: model.close() in the line before phased()"
                ) from None
            raise StoreError(
                f"{self.path} is in use by {holder or 'another process'}: wait for its end, or name another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, _own_name().encode(), 0)


def _own_name() -> str:
    """Return the process ID and the host of this process as the text that a lock file contains."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _create(path: Path | None, num_bytes: int) -> int:
    """Make the file ``path`` of ``num_bytes`` bytes, or host memory if ``path`` is None; return its descriptor."""
    if path is None:
        if num_bytes > psutil.virtual_memory().available:
            raise StoreError(
                f"the store needs {num_bytes} bytes of host memory, and {psutil.virtual_memory().available} are "
                "available: name a folder in place of it"
            )
        descriptor, name = os.memfd_create("popdist-store", os.MFD_CLOEXEC), "the store in host memory"
    else:
        descriptor, name = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), str(path)
    try:
        allocate(descriptor, num_bytes, name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_created(path: Path | None, pid: int, descriptor: int) -> int:
    """Open the file ``path``, or the host memory, that another instance has made; return its file descriptor."""
    if path is not None:
        return _opened(path, os.O_RDWR)
    try:
        return open_through_proc(pid, descriptor)
    except OSError as error:
        raise StoreError(f"the host memory of process {pid} cannot be opened: {error.strerror}") from error


def _opened(path: Path, flags: int) -> int:
    """Open a file of the store, return its descriptor. Raise StoreError for links and files of other users."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}") from error
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise StoreError(f"{path} belongs to another user: name a folder of your own")
    return descriptor


def _file_system_of(path: Path) -> str:
    """Return the type of the file system that contains ``path``, such as ``tmpfs``; empty if unknown."""
    mounts = [it for it in psutil.disk_partitions(all=True) if path.is_relative_to(it.mountpoint)]
    return max(reversed(mounts), key=lambda it: len(it.mountpoint)).fstype if mounts else ""


def _close_all(threads: StoreThreads, tensors: Mapping[str, StoredTensors], folder: _Folder | None) -> None:
    threads.close()
    for stored in tensors.values():
        stored.file.close()
    if folder is not None:
        folder.close()
