"""Collectives of tensors whose memory all ranks map: they lie where they are, and nothing is laid down.

Before a large collective every rank *offers* a place: a storage that lies in a file (see
`popdist.host_memory.shared_storages`) and where in it the tensor begins, or nothing. The offer stands beside the
words of a meeting that the collective has anyway. If all ranks offer a place, they work there; if one does not,
all go the other way. The places need not be alike, so tensors that come in another order will do.

A storage that is offered for the first time is introduced, at two more meetings: its rank moves it into a file if
it lies in none, and the others map that. They let go of it when its file says that the storage is gone.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

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

_NUMBER_BITS: Final = 20
_MOST_NUMBERS: Final = 1 << _NUMBER_BITS
_OFFER: Final = 1 << 62
_NEW: Final = 1 << 61

_MOST_SEEN: Final = 1 << 10
_MOST_PREPARED: Final = 1 << 8

_MOST_DESCRIPTORS: Final = 1 << 23
_ANSWER: Final = 1 << 63


MayMove = Callable[[Tensor], bool]
"""Whether the memory of a tensor may be moved now."""


Places = tuple[int, ...]
"""Of each rank, in which of its files a tensor lies, and where in it."""


class _OffersMadeError(Exception):
    """Other ranks have offered memory for this tensor, and laid down nothing: all begin again, without offers."""


class Offers:
    """The places that the ranks of a group offer each other; every rank makes the same calls in the same order.

    Args:
        group: At least two ranks.
        forget: Called when what was agreed on before holds no more.
    """

    def __init__(self, group: HostGroup, forget: Callable[[], None]) -> None:
        self._group = group
        self._forget = forget
        self._flags = group.flags
        self._numbers: dict[int, int] = {}
        """Of this rank's files that all ranks know, by what names their storages."""
        self._files: list[dict[int, MappedFile]] = [{} for _ in range(group.size)]
        """Of each rank, by the number that it has in this group."""
        self._num_introduced = [0] * group.size
        self._are_mapped = True
        """Whether every introduction so far went well."""
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._prepared: dict[tuple[Places, Op, torch.dtype, int], Reduction] = {}
        self._looks = False

    def run(
        self,
        tensor: Tensor | None,
        reason: int,
        in_place: Callable[[Places], None],
        otherwise: Callable[[], None],
        may_move: MayMove | None = None,
    ) -> None:
        """Do a collective in place if all ranks offer memory, and else the other way.

        Args:
            tensor: What this rank brings, of at least :data:`LEAST_BYTES`; None where it is not one tensor.
            reason: What its meetings are for; the same on all ranks.
            in_place: Does it where all tensors lie. All ranks have come when it begins.
            otherwise: Does it the other way; its first meeting is :meth:`meet`, and it has changed nothing before.
            may_move: Asked whether the tensor's memory may be moved, when it comes again; None if it may not.
        """
        offer = 0 if tensor is None else self._offer(tensor, may_move)
        if tensor is not None and offer:
            self._flags.say(offer)
            self._flags.meet(reason)
            self.settle(tensor, in_place, otherwise)
            return
        self._let_go()
        self._looks = True
        try:
            otherwise()
        except _OffersMadeError:
            otherwise()
        finally:
            self._looks = False

    def settle(self, tensor: Tensor, in_place: Callable[[Places], None], otherwise: Callable[[], None]) -> None:
        """The rest of :meth:`run`, for a rank that has met and offered a place."""
        places = self._agreed(tensor)
        if places is None:
            otherwise()
        else:
            in_place(places)

    def meet(self, reason: int) -> None:
        """Meet; at the first meeting of a collective for which this rank offers nothing, see what others do."""
        if not self._looks:
            self._flags.meet(reason)
            return
        self._looks = False
        self._flags.say(0)
        self._flags.meet(reason)
        if any(self._flags.said()):
            raise _OffersMadeError

    def rows(self, places: Places, num_bytes: int, dtype: torch.dtype) -> list[Tensor]:
        """What stands in these places, as flat tensors."""
        found = []
        for rank, place in enumerate(places):
            start, number = (place & ~_OFFER) >> _NUMBER_BITS, place & _MOST_NUMBERS - 1
            found.append(self._files[rank][number].memory[start : start + num_bytes].view(dtype))
        return found

    def reduction(self, places: Places, tensor: Tensor, op: Op) -> "Reduction":
        """The reduction of tensors like this one in these places."""
        key = (places, op, tensor.dtype, tensor.numel())
        if key not in self._prepared:
            if len(self._prepared) >= _MOST_PREPARED:
                self._forget_prepared()
            self._prepared[key] = self._group.reduction(self.rows(places, tensor.nbytes, tensor.dtype), op)
        return self._prepared[key]

    def _offer(self, tensor: Tensor, may_move: MayMove | None) -> int:
        """What this rank offers; 0 for nothing."""
        if not tensor.is_contiguous() or tensor.is_neg():
            return 0
        storage = tensor.untyped_storage()
        shared = shared_storages.find(storage)
        if shared is None:
            is_whole = tensor.nbytes == storage.nbytes()
            is_new = may_move is not None and is_whole and self._comes_again(storage) and may_move(tensor)
            return _OFFER | _NEW if is_new else 0
        place = (tensor.data_ptr() - shared.address) << _NUMBER_BITS
        number = self._numbers.get(shared.file.number)
        if number is not None:
            return _OFFER | place | number
        return _OFFER | _NEW | place if self._may_introduce() else 0

    def _agreed(self, tensor: Tensor) -> Places | None:
        """The places that all ranks have offered at the last meeting; None if one has offered none."""
        offers = self._flags.said()
        if 0 in offers:
            self._let_go()
            return None
        if max(offers) < _OFFER | _NEW:  # none is new
            return tuple(offers)
        if not self._introduce(tensor, offers):
            return None
        return tuple(
            offer & ~_NEW | self._num_introduced[rank] if offer & _NEW else offer
            for rank, offer in enumerate(offers)
        )

    def close(self) -> None:
        """Let go of everything."""
        self._forget_prepared()
        for files in self._files:
            files.clear()

    def _may_introduce(self) -> bool:
        return self._are_mapped and self._num_introduced[self._group.rank] < _MOST_NUMBERS - 1

    def _comes_again(self, storage: UntypedStorage) -> bool:
        """Whether torch's allocator owns the storage, and it was there before, with the same length."""
        if not storage.resizable() or not self._may_introduce():
            return False  # numpy and others who know the address have cleared the one
        key, num_bytes = shared_storages.key_of(storage), storage.nbytes()
        if key in self._seen and self._seen[key][1] == num_bytes:
            return True
        if len(self._seen) >= _MOST_SEEN:
            self._seen = {key: seen for key, seen in self._seen.items() if not seen[0].expired()}
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
        self._seen[key] = (StorageWeakRef(storage), num_bytes)
        return False

    def _introduce(self, tensor: Tensor, offers: Sequence[int]) -> bool:
        """Have all ranks map the storages that are offered for the first time; whether all of them could."""
        self._let_go()
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
            self._numbers[mine.number] = self._num_introduced[rank]
        return True

    def _file_of(self, tensor: Tensor) -> MappedFile | None:
        """The file in which the tensor lies, after it was moved there if need be; None if there is no room."""
        storage = tensor.untyped_storage()
        if shared_storages.find(storage) is None:
            try:
                shared_storages.move(storage)
            except Exception:  # noqa: BLE001 - whatever it is, the others wait for an answer
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

    def _let_go(self) -> None:
        """Let go of storages that are gone."""
        shared_storages.forget_gone()
        for rank, files in enumerate(self._files):
            for number in [number for number, file in files.items() if not file.is_in_use]:
                gone = files.pop(number)
                if rank == self._group.rank:
                    del self._numbers[gone.number]
                self._forget_prepared()

    def _forget_prepared(self) -> None:
        self._prepared.clear()
        self._forget()
