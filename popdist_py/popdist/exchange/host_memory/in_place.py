"""Collectives in place on storages that every rank has mapped: no tensor is moved or copied.

Before a large collective each rank posts, at a barrier that is needed anyway, in which of its files the tensor is,
and where. If all ranks post such a place, they work in place, otherwise through slots. A storage that is posted
first is shared with two more barriers: its rank moves the storage into a file if necessary, and the other ranks
map the file.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from popdist.exchange.host_memory import shared_storages
from popdist.exchange.host_memory.addition import KINDS, Op
from popdist.exchange.host_memory.barriers import operation, purpose
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.host_memory.shared_storages import NUMBER_BITS, MappedFile, SharedStorage
from popdist.ground import torch_private

if TYPE_CHECKING:
    from popdist.exchange.host_memory.addition import Reduction

LEAST_BYTES: Final = 1 << 18
"""Number of bytes of the smallest tensors that are combined in place."""

_SHARE: Final = operation("mapping of a tensor")

_NUMBER_BITS: Final = 20
_MOST_NUMBERS: Final = 1 << _NUMBER_BITS
_HAS_PLACE: Final = 1 << 62
_NEW: Final = 1 << 61

_MOST_PREPARED: Final = 1 << 8

_MANY_REFUSALS: Final = 16
"""Number of consecutive calls without places after which only every 16th call asks for places."""

_MOST_KINDS: Final = 1 << 10
"""Maximum number of kinds of calls that are counted; then counting restarts, on all ranks at the same call."""

_MOST_DESCRIPTORS: Final = 1 << 23
_ANSWER: Final = 1 << 63


MayMove = Callable[[Tensor], bool]
"""A function that returns whether the memory of a tensor may be moved now."""


Places = tuple[int, ...]
"""For each rank, in which of its files a tensor is, and where in the file."""


class InPlace:
    """The places that the ranks of a group post; all ranks must make the same calls in the same order."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._barriers = group.barriers
        self._numbers: dict[int, int] = {}
        """Number in this group of each file of this rank that all ranks have mapped; the key names the storage."""
        self._files: list[dict[int, MappedFile]] = [{} for _ in range(group.size)]
        """For each rank, its files; the key is the number of the file in this group."""
        self._num_shared = [0] * group.size
        self._can_map = True
        """Whether all ranks could map every storage so far."""
        self._seen: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        """The storages that may be moved at their next use, with their lengths at the last use."""
        self._prepared: dict[tuple[Places, Op, torch.dtype, int], Reduction] = {}
        self._num_refusals: dict[int, int] = {}
        """For each kind of call, how many consecutive calls had no place for a tensor; equal on all ranks."""

    def agree(self, tensor: Tensor | None, reason: int, may_move: MayMove | None = None) -> Places | None:
        """Return the places of all ranks' tensors, exchanged at a barrier; None if a tensor has no place.

        After many calls of one kind without places only some calls ask, because the barrier takes time.
        """
        num_refusals = self._num_refusals.pop(reason, 0)
        if num_refusals > _MANY_REFUSALS and num_refusals % _MANY_REFUSALS:
            posted = [0]
        else:
            place = 0 if tensor is None else self._place_of(tensor, may_move)
            posted = self._barriers.exchange(place, reason)
        if tensor is None or 0 in posted:
            if len(self._num_refusals) == _MOST_KINDS:
                self._num_refusals.clear()
            self._num_refusals[reason] = num_refusals + 1
            self._unmap_gone()
            return None
        if max(posted) < _HAS_PLACE | _NEW:  # no storage is new
            return tuple(posted)
        if not self._share(tensor, posted):
            return None
        return tuple(
            place & ~_NEW | self._num_shared[rank] if place & _NEW else place for rank, place in enumerate(posted)
        )

    def rows(self, places: Places, num_bytes: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the memory at ``places`` as flat tensors."""
        found = []
        for rank, place in enumerate(places):
            start, number = (place & ~_HAS_PLACE) >> _NUMBER_BITS, place & _MOST_NUMBERS - 1
            found.append(self._files[rank][number].memory[start : start + num_bytes].view(dtype))
        return found

    def reduction(self, places: Places, tensor: Tensor, op: Op) -> "Reduction":
        """Return the reduction of tensors like ``tensor`` at ``places``."""
        key = (places, op, tensor.dtype, tensor.numel())
        if key not in self._prepared:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = self._group.reduction(self.rows(places, tensor.nbytes, tensor.dtype), op)
        return self._prepared[key]

    def _place_of(self, tensor: Tensor, may_move: MayMove | None) -> int:
        """Return a number that says where ``tensor`` is in shared memory, for other ranks; 0 if it is not."""
        if not tensor.is_contiguous() or tensor.is_neg():
            return 0
        storage = tensor.untyped_storage()
        shared = shared_storages.find(storage)
        if shared is None:
            is_whole = tensor.nbytes == storage.nbytes()
            is_new = may_move is not None and is_whole and self._comes_again(storage) and may_move(tensor)
            return _HAS_PLACE | _NEW if is_new else 0
        place = (tensor.data_ptr() - shared.address) << _NUMBER_BITS
        number = self._numbers.get(shared.file.number)
        if number is not None:
            return _HAS_PLACE | place | number
        return _HAS_PLACE | _NEW | place if self._may_share() else 0

    def close(self) -> None:
        """Unmap all files."""
        self._prepared.clear()
        for files in self._files:
            files.clear()

    def _may_share(self) -> bool:
        return self._can_map and self._num_shared[self._group.rank] < _MOST_NUMBERS - 1

    def _comes_again(self, storage: UntypedStorage) -> bool:
        """Return whether torch's allocator owns the storage, and it was seen before with the same length."""
        if not torch_private.can_swap_memory or not storage.resizable() or not self._may_share():
            return False  # numpy and other users of the address have made the storage not resizable
        length_before, self._seen[storage] = self._seen.get(storage), storage.nbytes()
        return length_before == storage.nbytes()

    def _share(self, tensor: Tensor, posted: Sequence[int]) -> bool:
        """Make all ranks map newly posted storages; return whether every rank could map them."""
        self._unmap_gone()
        rank = self._group.rank
        new = [other for other, place in enumerate(posted) if place & _NEW]
        mine, answer = None, _ANSWER
        if rank in new:
            mine = self._file_of(tensor)
            answer = 0 if mine is None else _ANSWER | mine.descriptor << NUMBER_BITS | mine.file.number
        reason = purpose(_SHARE, kind=KINDS[tensor.dtype], count=tensor.numel())
        answers, found = self._barriers.exchange(answer, reason), dict[int, MappedFile]()
        if all(answers):
            with suppress(OSError, ValueError):
                for other in new:
                    is_own = mine is not None and other == rank
                    found[other] = mine.file if mine is not None and is_own else self._map(other, answers[other])
        if not all(self._barriers.exchange(1 if all(answers) and len(found) == len(new) else 0, reason)):
            self._can_map = False
            return False
        for other, file in found.items():
            self._num_shared[other] += 1
            self._files[other][self._num_shared[other]] = file
        if mine is not None:
            self._numbers[mine.file.number] = self._num_shared[rank]
        return True

    def _file_of(self, tensor: Tensor) -> SharedStorage | None:
        """Return the file with the tensor, after moving it there if necessary; None if there is no room."""
        storage = tensor.untyped_storage()
        if shared_storages.find(storage) is None:
            self._seen.pop(storage, None)
            try:
                shared_storages.move(storage)
            except Exception:  # noqa: BLE001 - after any error the other ranks wait for an answer
                return None
        return shared_storages.find(storage)

    def _map(self, rank: int, answer: int) -> MappedFile:
        number = answer & (1 << NUMBER_BITS) - 1
        descriptor = self._group.open_file(rank, answer >> NUMBER_BITS & _MOST_DESCRIPTORS - 1)
        try:
            file = MappedFile(descriptor)
        finally:
            os.close(descriptor)
        if file.number != number:
            raise OSError(f"another file is there than that of rank {rank}")
        return file

    def _unmap_gone(self) -> None:
        """Unmap storages that were freed."""
        shared_storages.release_gone()
        for rank, files in enumerate(self._files):
            for number in [number for number, file in files.items() if not file.is_in_use]:
                gone = files.pop(number)
                if rank == self._group.rank:
                    del self._numbers[gone.number]
                self._prepared.clear()
