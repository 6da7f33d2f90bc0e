"""Where the weights, gradients and optimizer state of a model in phases are kept: a folder, or host memory.

The instances of a host share one store. The first of them makes it and holds its lock; the others open it then. A
store is working memory: what an earlier run has left in it is overwritten, and checkpoints are what lasts.
"""

import fcntl
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Final, Self

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
"""In place of a folder: the store is in the memory of the host."""

_LOCK: Final = "lock"
_FILES: Final = frozenset({"weights", "state", "gradients"})
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensors:
    """Tensors in one file of a store, by name; when they are in memory, they lie together in one place."""

    file: StoreFile
    regions: dict[str, Region]
    forms: Mapping[str, TensorForm]

    def part(self, names: Iterable[str]) -> "StoredTensors":
        """Return the tensors ``names`` of these."""
        return StoredTensors(file=self.file, regions={it: self.regions[it] for it in names}, forms=self.forms)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each tensor begins in the place."""
        ends = accumulate((it.length for it in self.regions.values()), initial=0)
        return dict(zip(self.regions, ends, strict=False))

    @property
    def num_bytes(self) -> int:
        """The bytes of the place."""
        return sum(it.length for it in self.regions.values())

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors by name, in the ``memory`` of their place."""
        return {name: self.forms[name].view(memory[begin:]) for name, begin in self.offsets.items()}

    def mapped(self, name: str) -> Tensor:
        """Return a tensor with the memory that is mapped to the file."""
        return self.file.mapped(self.regions[name], self.forms[name])

    def write(self, name: str, value: Tensor) -> None:
        """Write a tensor, and wait until it is there."""
        self.file.write_tensor(self.regions[name], self.forms[name], local_part(value))


class PhaseStore:
    """The store of one model on one host; made by :meth:`open`.

    Attributes:
        tensors: Those of each file, by its name.
        weights: The weights by name, in a file of theirs.
        host_index: The number of this instance among those that share the store.
        host_size: How many share it.
        device: Where the model computes.
        step: The last step that was begun.
        is_torn: Whether that step has not ended, so that some of the weights are those of the step before.
    """

    weights: StoredTensors

    def __init__(self, folder: "_Folder | None", group: Group, device: torch.device) -> None:
        place = HOST_MEMORY if folder is None else f"{folder.path.resolve()}"
        places = gather_json(group, "phased(), its stores", [machine(), place])
        own = group.instances.index(group.backend.instance_index)
        sharing = [index for index, it in enumerate(places) if it == places[own]]
        self.host_index, self.host_size = sharing.index(own), len(sharing)
        self.step, self.is_torn = 0, False
        self.folder = folder
        self._group, self._first = group, sharing[0]
        self.device = device
        self._threads = StoreThreads(device)
        self._files: list[StoreFile] = []
        self.tensors: dict[str, StoredTensors] = {}
        self._close = weakref.finalize(self, _close_all, self._threads, self._files, folder)

    @classmethod
    def open(
        cls, place: str | os.PathLike[str], forms: Mapping[str, TensorForm], *, group: Group, device: torch.device
    ) -> Self:
        """Make the store in the folder ``place``, or open the one that is there; all instances call it.

        Args:
            place: The folder, or ``"host"`` for the memory of the host.
            forms: Those of the weights by name, in the order in which they are to lie in the file.
            group: The instances that train copies of these weights.
            device: Where the model computes.

        Raises:
            StoreError: If there is no room, the place is in memory and the model on the CPU, another job uses the
                store, or the folder is none of a store; on every instance.
        """
        is_in_memory = os.fspath(place) == HOST_MEMORY
        store = cls(None if is_in_memory else _Folder(Path(place).absolute()), group, device)
        try:
            with fail_together(group, "phased(), its folder", StoreError):
                if store.folder is not None and store.host_index == 0:
                    store.folder.claim(is_on_cpu=device.type == "cpu")
            store.weights = store.add("weights", forms)
        except BaseException:
            store.discard()
            raise
        return store

    def begin_step(self, step: int) -> None:
        """Mark the store as torn: from now on weights of ``step`` stand beside those of the step before."""
        self.step, self.is_torn = step, True

    def end_step(self, write: Callable[[], object] | None = None) -> None:
        """Call ``write``, wait for all instances, and mark the store as whole; all instances call it."""
        with fail_together(self._group, "phased(), the end of a step", StoreError):
            if write is not None:
                write()
        self.is_torn = False

    def check_open(self) -> None:
        """Raise a StoreError after :meth:`close`."""
        if not self._close.alive:
            raise StoreError(
                "this phased model was closed, by close() or since the last name of it is gone, so its weights "
                "are not there any more: keep the model that phased() returns, and make it anew after close()"
            )

    def check_whole(self) -> None:
        """Raise a StoreError if a step was begun and has not ended, or the store was closed."""
        self.check_open()
        if self.is_torn:
            raise StoreError(
                f"step {self.step} is half made: some of the weights are those of the step before. Load the last "
                "checkpoint, with popdist.checkpoint.load_latest()"
            )

    def wait_for_host(self) -> None:
        """Wait until all instances are here: each sees then what the others have written before."""
        self._group.agree("phased(), reading what others wrote")

    def place_of(self, tensor: Tensor) -> tuple[StoreFile, int] | None:
        """Return the file of a tensor that :meth:`StoreFile.mapped` returned, and the place in the file."""
        for file in self._files:
            if (start := file.start_of(tensor)) is not None:
                return file, start
        return None

    def close(self) -> None:
        """End the threads and release the lock; the files stay as they are. May be called again."""
        self._close()

    def discard(self) -> None:
        """Close the store; remove its folder if the store has made the folder."""
        self.close()
        if self.folder is not None and self.host_index == 0:
            self.folder.remove_if_new()

    def add(self, name: str, forms: Mapping[str, TensorForm]) -> StoredTensors:
        """Make the file ``weights``, ``state`` or ``gradients`` with room for tensors; all instances call it."""
        regions = lay_out(forms)
        num_bytes = max([BLOCK_BYTES, *(it.end for it in regions.values())])
        path = None if self.folder is None else self.folder.path / name
        descriptor = -1
        try:
            with fail_together(self._group, f"phased(), its {name} of {num_bytes} bytes", StoreError):
                if self.host_index == 0:
                    if path is not None:  # who has an older file open keeps it
                        path.unlink(missing_ok=True)
                    descriptor = _create(path, num_bytes)
            made = gather_json(self._group, f"phased(), who has its {name}", [os.getpid(), descriptor])
            with fail_together(self._group, f"phased(), opening its {name}", StoreError):
                if self.host_index:
                    descriptor = _open_created(path, *made[self._first])
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        file = StoreFile(descriptor, path, num_bytes, self._threads)
        self._files.append(file)
        self.tensors[name] = StoredTensors(file=file, regions=regions, forms=forms)
        return self.tensors[name]


class _Folder:
    """A store's folder, which one process holds at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._is_new = False
        forks.call_in_children(self._close_lock)

    def claim(self, *, is_on_cpu: bool) -> None:
        """Make the folder or take the one that is there, for as long as this process has it."""
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
        """Release the lock."""
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._close_lock()

    def remove_if_new(self) -> None:
        """Remove what was made here, if there was nothing before."""
        if self._is_new:
            self._remove_files()
            (self.path / _LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()

    def _remove_files(self) -> None:
        """Remove what an earlier run has left; who still has it open keeps it."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)

    def _acquire_lock(self) -> None:
        self._lock = _opened(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 1000, 0).decode(errors="replace")
            self._close_lock()
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

    def _close_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _own_name() -> str:
    """Return the name of this process that its locks hold."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _create(path: Path | None, num_bytes: int) -> int:
    """Return the descriptor of a new file of this size, or of host memory of this size."""
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
    """Open the file that another instance of the host has made."""
    if path is not None:
        return _opened(path, os.O_RDWR)
    try:
        return open_through_proc(pid, descriptor)
    except OSError as error:
        raise StoreError(f"the host memory of process {pid} cannot be opened: {error.strerror}") from error


def _opened(path: Path, flags: int) -> int:
    """Open a file of a store, which is this user's own and no link."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}") from error
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise StoreError(f"{path} belongs to another user: name a folder of your own")
    return descriptor


def _file_system_of(path: Path) -> str:
    """Return the kind of the file system on which ``path`` is."""
    mounts = [it for it in psutil.disk_partitions(all=True) if path.is_relative_to(it.mountpoint)]
    return max(reversed(mounts), key=lambda it: len(it.mountpoint)).fstype if mounts else ""


def _close_all(threads: StoreThreads, files: Iterable[StoreFile], folder: _Folder | None) -> None:
    threads.close()
    for file in files:
        file.close()
    if folder is not None:
        folder.close()
