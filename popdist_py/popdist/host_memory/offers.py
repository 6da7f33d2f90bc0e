"""All-reduces of tensors whose memory all ranks map: each rank adds a share of the elements, in place.

Before a large all-reduce every rank *offers* a place: a storage that lies in a file (see
`popdist.host_memory.shared_storages`) and where in it the tensor begins, or nothing. The offer stands beside the
words of a meeting that the all-reduce has anyway. If all ranks offer a place, they add there; if one does not, all
go the other way. The places need not be alike, so tensors that come in another order are added all the same.

A storage that is offered for the first time is introduced, at two more meetings: its rank moves it into a file if
it lies in none, and the others map that. They let go of it when its file says that the storage is gone.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from popdist.errors import BackendError
from popdist.host_memory import shared_storages
from popdist.host_memory.addition import KINDS, Op
from popdist.host_memory.flags import operation, purpose
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.shared_storages import NUMBER_BITS, MappedFile

if TYPE_CHECKING:
    from popdist.host_memory.row_reduction import Reduction

LEAST_BYTES: Final = 1 << 18
"""Size of the smallest tensors that are offered."""

_INTRODUCE: Final = operation("introduction of a tensor")

_PLACE_BITS: Final = 40
_MOST_NUMBERS: Final = 1 << 20
_OFFER: Final = 1 << 62
_NEW: Final = 1 << 61

_MOST_SEEN: Final = 1 << 10
_MOST_PREPARED: Final = 1 << 8

_MOST_DESCRIPTORS: Final = 1 << 23
_ANSWER: Final = 1 << 63


MayMove = Callable[[Tensor], bool]
"""Whether the memory of a tensor may be moved now."""


class Offers:
    """The places that the ranks of a group offer each other; every rank makes the same calls in the same order.

    Args:
        group: At least two ranks.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._flags = group.flags
        self._numbers: weakref.WeakKeyDictionary[MappedFile, int] = weakref.WeakKeyDictionary()
        """Of this rank's files that all ranks know."""
        self._files: list[dict[int, MappedFile]] = [{} for _ in range(group.size)]
        """Of each rank, by the number that it has in this group."""
        self._num_introduced = [0] * group.size
        self._are_mapped = True
        """Whether every introduction so far went well."""
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._prepared: dict[tuple[tuple[int, ...], Op, torch.dtype, int], Reduction] = {}

    @property
    def are_made(self) -> bool:
        """Whether this rank has files that all ranks know."""
        return bool(self._numbers)

    def offer(self, tensor: Tensor, may_move: MayMove | None) -> int:
        """What this rank offers for a tensor; 0 for nothing.

        Args:
            tensor: Of :data:`LEAST_BYTES` at least.
            may_move: Asked whether its storage may be moved, when it comes again; None if it may not.
        """
        if not tensor.is_contiguous() or tensor.is_neg():
            return 0
        storage = tensor.untyped_storage()
        shared = shared_storages.find(storage)
        if shared is None:
            is_whole = tensor.nbytes == storage.nbytes()
            is_new = may_move is not None and is_whole and self._comes_again(storage) and may_move(tensor)
            return _OFFER | _NEW if is_new else 0
        place = (tensor.data_ptr() - shared.address) << 20
        number = self._numbers.get(shared.file)
        if number is not None:
            return _OFFER | place | number
        return _OFFER | _NEW | place if self._may_introduce() else 0

    def take(self, tensor: Tensor, op: Op, reason: int) -> bool:
        """Add in the places that all ranks have offered at the last meeting; False if one has offered none.

        Args:
            tensor: The one that this rank's offer was made for.
            op: How the tensors are combined.
            reason: What the meeting was for.
        """
        offers = self._flags.said()
        if not all(offers):
            self.let_go()
            return False
        if any(offer & _NEW for offer in offers) and not self._introduce(tensor, offers):
            return False
        places = tuple(
            offer & ~_NEW | self._num_introduced[rank] if offer & _NEW else offer
            for rank, offer in enumerate(offers)
        )
        key = (places, op, tensor.dtype, tensor.numel())
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            rows = [self._row(rank, place, tensor) for rank, place in enumerate(places)]
            prepared = self._prepared[key] = self._group.reduction(rows, op)
        prepared.finish(reason)
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._prepared.clear()
        for files in self._files:
            files.clear()

    def _may_introduce(self) -> bool:
        return self._are_mapped and self._num_introduced[self._group.rank] < _MOST_NUMBERS - 1

    def _comes_again(self, storage: UntypedStorage) -> bool:
        """Whether torch's allocator owns the storage, and it was there before, with the same length."""
        if (
            not storage.resizable() or not self._may_introduce()
        ):  # numpy and others who know its address clear that
            return False
        key, num_bytes = shared_storages.key_of(storage), storage.nbytes()
        if key in self._seen and self._seen[key][1] == num_bytes:
            return True
        if len(self._seen) >= _MOST_SEEN:
            self._seen = {key: seen for key, seen in self._seen.items() if not seen[0].expired()}
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
        self._seen[key] = (StorageWeakRef(storage), num_bytes)
        return False

    def _row(self, rank: int, place: int, tensor: Tensor) -> Tensor:
        start = (place & ~_OFFER) >> 20
        memory = self._files[rank][place & _MOST_NUMBERS - 1].memory
        return memory[start : start + tensor.nbytes].view(tensor.dtype)

    def _introduce(self, tensor: Tensor, offers: Sequence[int]) -> bool:
        """Have all ranks map the storages that are offered for the first time; whether all of them could."""
        self.let_go()
        rank = self._group.rank
        mine = self._file_of(tensor) if offers[rank] & _NEW else None
        storage = tensor.untyped_storage()
        answer = _ANSWER
        if offers[rank] & _NEW:
            descriptor = shared_storages.descriptor_of(storage) if mine is not None else 0
            answer = 0 if mine is None else _ANSWER | descriptor << NUMBER_BITS | mine.number
        reason = purpose(_INTRODUCE, kind=KINDS[tensor.dtype], count=tensor.numel())
        self._flags.say(answer)
        self._flags.meet(reason)
        answers, found = self._flags.said(), dict[int, MappedFile]()
        if all(answers):
            with suppress(OSError, ValueError):
                for other, said in enumerate(answers):
                    if offers[other] & _NEW:
                        found[other] = mine if mine is not None and other == rank else self._map(other, said)
        is_complete = all(other in found for other, offer in enumerate(offers) if offer & _NEW)
        self._flags.say(1 if is_complete and all(answers) else 0)
        self._flags.meet(reason)
        if not all(self._flags.said()):
            self._are_mapped = False
            return False
        for other, file in found.items():
            self._num_introduced[other] += 1
            self._files[other][self._num_introduced[other]] = file
        if mine is not None:
            self._numbers[mine] = self._num_introduced[rank]
        return True

    def _file_of(self, tensor: Tensor) -> MappedFile | None:
        """The file in which the tensor lies, after it was moved there if need be; None if there is no room."""
        storage = tensor.untyped_storage()
        if shared_storages.find(storage) is None:
            try:
                shared_storages.move(storage)
            except BackendError:
                return None
            self._seen.pop(shared_storages.key_of(storage), None)
        found = shared_storages.find(storage)
        return None if found is None else found.file

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

    def let_go(self) -> None:
        """Let go of storages that are gone."""
        shared_storages.forget_gone()
        for files in self._files:
            for number in [number for number, file in files.items() if not file.is_in_use]:
                del files[number]
                self._prepared.clear()
