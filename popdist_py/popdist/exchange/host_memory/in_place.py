"""Collectives in place: all ranks have mapped the memory of all ranks' tensors, and no tensor is copied.

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
"""Number of bytes of the smallest tensors that collectives combine in place."""

_SHARE: Final = operation("mapping of a tensor")

_NUMBER_BITS: Final = 20
_MOST_NUMBERS: Final = 1 << _NUMBER_BITS
_HAS_PLACE: Final = 1 << 62
_NEW: Final = 1 << 61

_MOST_PREPARED: Final = 1 << 8

_MANY_REFUSALS: Final = 16
"""Number of consecutive collectives that were not in place; then only every 16th collective asks again."""

_MOST_KINDS: Final = 1 << 10
"""Maximum number of kinds of collectives that are counted; then all ranks restart counting at the same call."""

_MOST_DESCRIPTORS: Final = 1 << 23
_ANSWER: Final = 1 << 63


MayMove = Callable[[Tensor], bool]
"""A function that returns whether the memory of a tensor may be moved now."""


Places = tuple[int, ...]
"""For each rank one number: the memory file in which the rank's tensor is, and the tensor's offset there."""


class InPlace:
    """The tensors in shared memory that a group's ranks combine in place; all ranks make the same calls."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._barriers = group.barriers
        self._numbers: dict[int, int] = {}
        """The group's number of each memory file that all ranks have mapped; the key names the storage."""
        self._files: list[dict[int, MappedFile]] = [{} for _ in range(group.size)]
        """The mapped memory files of each rank; the key is the number that the group has for the file."""
        self._num_shared = [0] * group.size
        self._can_map = True
        """Whether all ranks could map every storage so far."""
        self._seen: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        """The storages that may be moved at the next use, with the number of bytes at the last use."""
        self._prepared: dict[tuple[Places, Op, torch.dtype, int], Reduction] = {}
        self._num_refusals: dict[int, int] = {}
        """For each kind of collective, how many consecutive calls were not in place; equal on all ranks."""

    def agree(self, tensor: Tensor | None, reason: int, may_move: MayMove | None = None) -> Places | None:
        """Exchange with all ranks where in shared memory each rank's tensor is; return these places, or None if a
        tensor is not there. After many such failures of equal calls, most calls return None without an exchange.
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
        """Return all ranks' tensors, whose places in shared memory are ``places``, as flat ``dtype`` tensors."""
        memories = []
        for rank, place in enumerate(places):
            start, number = (place & ~_HAS_PLACE) >> _NUMBER_BITS, place & _MOST_NUMBERS - 1
            memories.append(self._files[rank][number].memory[start : start + num_bytes].view(dtype))
        return memories

    def reduction(self, places: Places, tensor: Tensor, op: Op) -> "Reduction":
        """Return the reduction by ``op`` of all ranks' tensors, whose places in shared memory are ``places``."""
        key = (places, op, tensor.dtype, tensor.numel())
        if key not in self._prepared:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            with torch.inference_mode(mode=False):  # collectives outside of this mode use the views, too
                self._prepared[key] = self._group.reduction(self.rows(places, tensor.nbytes, tensor.dtype), op)
        return self._prepared[key]

    def _place_of(self, tensor: Tensor, may_move: MayMove | None) -> int:
        """Return where in shared memory ``tensor`` is, as a number for other ranks; 0 if it is not there."""
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
        """Unmap all ranks' memory files in this process."""
        self._prepared.clear()
        for files in self._files:
            files.clear()

    def _may_share(self) -> bool:
        return self._can_map and self._num_shared[self._group.rank] < _MOST_NUMBERS - 1

    def _comes_again(self, storage: UntypedStorage) -> bool:
        """Whether moving ``storage`` into shared memory is possible and worth its time: torch can move
        ``storage``, and an earlier call has used it with the same length.
        """
        if not torch_private.can_swap_memory or not storage.resizable() or not self._may_share():
            return False  # numpy and other users of the address have made the storage not resizable
        length_before, self._seen[storage] = self._seen.get(storage), storage.nbytes()
        return length_before == storage.nbytes()

    def _share(self, tensor: Tensor, posted: Sequence[int]) -> bool:
        """Make each rank map the others' new storages; return False on all ranks if a rank could not do this."""
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
        """Return the memory file of ``tensor``'s storage; first move the storage if needed. None on failure."""
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
        """Unmap the memory files of storages that were freed, in this process."""
        shared_storages.release_gone()
        for rank, files in enumerate(self._files):
            for number in [number for number, file in files.items() if not file.is_in_use]:
                gone = files.pop(number)
                if rank == self._group.rank:
                    del self._numbers[gone.number]
                self._prepared.clear()
