"""The collectives of a host group over tensors that live anywhere, through slots of shared memory.

A slot (see `popdist.host_memory.all_reduce`) is cut into as many parts as there are receivers of different data,
and a piece is what fits such a part. Each piece takes one meeting.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.host_memory import addition
from popdist.host_memory.addition import KINDS, OPS, Combiner, Op
from popdist.host_memory.all_reduce import LARGEST_BYTES, AllReduce, Slots
from popdist.host_memory.flags import Names, operation, purpose
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.offers import LEAST_BYTES, MayMove, Places

_REDUCE_SCATTER: Final = {op: operation(f"reduce_scatter ({op})") for op in OPS}
_REDUCE: Final = {op: operation(f"reduce ({op})") for op in OPS}
_ALL_GATHER: Final = operation("all_gather of bytes")
_BROADCAST: Final = operation("broadcast of bytes")
_ALL_TO_ALL: Final = operation("all_to_all")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes: every dtype travels the same way."""
    return tensor.view(-1).view(torch.uint8)


class HostCollectives:
    """Collectives of a group; each call is one, on every rank, with the same arguments but for the values.

    Tensors are on the CPU, strided, and without gradient; in all calls but :meth:`all_reduce` they are flat and
    contiguous, too. Reductions are over the dtypes of `popdist.host_memory.addition.DTYPES`, half dtypes in
    float32, in the order of `popdist.tree`; "mean" is for floating dtypes only. Other calls take any dtype.

    Every call raises BackendError if a rank was lost or did not come in time, and CollectiveError if the ranks are
    not in the same one; and the reductions ValueError if there is no such operation on the dtype, before anything
    has been sent.

    Attributes:
        group: The ranks.
        rank: This process among them.
        size: How many they are.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.rank = self._rank = group.rank
        self.size = group.size
        self._flags = group.flags
        self._is_alone = group.size == 1
        if not self._is_alone:
            self._slots = Slots(group)
            self._all_reduce = AllReduce(group, self._slots)
            self._offers = self._all_reduce.offers

    @classmethod
    def connect(
        cls, store: Store, rank: int, num_local: int, *, names: Names, timeout_seconds: float
    ) -> Self | None:
        """The collectives of the ranks of this host, where each host has ``num_local`` ranks in a row.

        Args:
            store: Where the ranks of all hosts find each other; used by nobody else under its prefix.
            rank: This process, among the ranks of all hosts.
            num_local: Ranks of each host.
            names: What the ranks of all hosts are called in errors.
            timeout_seconds: How long a lost or late rank is waited for, here and in every operation.

        Returns:
            None on every rank of the host where they may not share memory.
        """
        first = rank - rank % num_local
        own = Names(members=names.members[first : first + num_local], noun=names.noun)
        prefix = PrefixStore(f"host/{first}", store)
        group = HostGroup.connect(prefix, rank - first, num_local, timeout_seconds=timeout_seconds, names=own)
        return None if group is None else cls(group)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", may_move: MayMove | None = None) -> None:
        """Combine the tensors of all ranks, in place: the same bits on each of them.

        Args:
            tensor: This rank's.
            op: How they are combined.
            may_move: Asked whether the tensor's memory may be moved to where all ranks map it; None if it may not.
        """
        if not self._is_alone:
            self._all_reduce(tensor, op, may_move)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor of every rank with that of rank ``root``."""
        if self._is_alone:
            return
        data = as_bytes(tensor)
        self._slots.fit(len(data))
        reason = purpose(_BROADCAST, root=root + 1, count=len(data))
        for piece in _cut(data, self._slots.num_bytes):
            slot = self._slots.next(torch.uint8)[root][: len(piece)]
            if self._rank == root:
                slot.copy_(piece)
            self._flags.meet(reason)
            if self._rank != root:
                piece.copy_(slot)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """``outputs[rank]`` becomes a copy of the tensor of ``rank``, which has the same length everywhere."""
        if self._is_alone:
            outputs[0].copy_(tensor)
            return
        data, into = as_bytes(tensor), [as_bytes(output) for output in outputs]
        self._slots.fit(len(data))
        reason = purpose(_ALL_GATHER, count=len(data))
        if len(data) < LEAST_BYTES:
            self._gather_in_pieces(into, data, reason)
            return
        in_place = partial(self._gather_in_place, into, data, reason)
        self._offers.run(data, reason, in_place, partial(self._gather_in_pieces, into, data, reason))

    def _gather_in_place(self, into: Sequence[Tensor], data: Tensor, reason: int, places: Places) -> None:
        rows = self._offers.rows(places, len(data), torch.uint8)
        rows[self._rank] = data
        for output, row in zip(into, rows, strict=True):
            if output.data_ptr() != row.data_ptr():
                output.copy_(row)
        self._flags.meet(reason)

    def _gather_in_pieces(self, into: Sequence[Tensor], data: Tensor, reason: int) -> None:
        pieces = [_cut(output, self._slots.num_bytes) for output in into]
        for index, piece in enumerate(_cut(data, self._slots.num_bytes)):
            slots = [slot[: len(piece)] for slot in self._slots.next(torch.uint8)]
            slots[self._rank].copy_(piece)
            self._offers.meet(reason)
            slots[self._rank] = piece
            for row, slot in zip(pieces, slots, strict=True):
                row[index].copy_(slot)

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """Combine the tensors of all ranks into that of rank ``root``; the others stay as they are."""
        if self._is_alone:
            return
        combine = Combiner(op, tensor.dtype, self.size)
        self._slots.fit(tensor.nbytes)
        width = self._slots.num_bytes // tensor.element_size()
        memory = combine.memory((width,)) if self._rank == root else []
        reason = purpose(_REDUCE[op], kind=KINDS[tensor.dtype], root=root + 1, count=len(tensor))
        for piece in _cut(tensor, width):
            length = len(piece)
            rows = [slot[:length] for slot in self._slots.next(tensor.dtype)]
            if self._rank != root:
                rows[self._rank].copy_(piece)
            self._flags.meet(reason)
            if self._rank == root:
                rows[root] = piece
                combine(rows, piece, [held[:length] for held in memory])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """``output`` becomes the combination of what all ranks have at this rank's place in ``tensors``."""
        if self._is_alone:
            output.copy_(tensors[0])
            return
        combine = Combiner(op, output.dtype, self.size)
        self._slots.fit(output.nbytes * self.size)
        reason = purpose(_REDUCE_SCATTER[op], kind=KINDS[output.dtype], count=len(output))
        in_pieces = partial(self._scatter_in_pieces, output, tensors, combine, reason)
        if output.nbytes * self.size < LEAST_BYTES:
            in_pieces()
            return
        in_place = partial(self._scatter_in_place, output, combine, reason)
        self._offers.run(_joined(tensors), reason, in_place, in_pieces)

    def _scatter_in_place(self, output: Tensor, combine: Combiner, reason: int, places: Places) -> None:
        """Combine this rank's part of all ranks' tensors where they lie."""
        first, width = self._rank * len(output), LARGEST_BYTES // output.element_size()
        wholes = self._offers.rows(places, output.nbytes * self.size, output.dtype)
        rows = [whole[first : first + len(output)] for whole in wholes]
        memory = combine.memory((min(width, len(output)),))
        for parts in zip(*(_cut(row, width) for row in (output, *rows)), strict=True):
            combine(parts[1:], parts[0], [held[: len(parts[0])] for held in memory])
        self._flags.meet(reason)

    def _scatter_in_pieces(
        self, output: Tensor, tensors: Sequence[Tensor], combine: Combiner, reason: int
    ) -> None:
        width = self._slots.num_bytes // (self.size * output.element_size())
        memory = combine.memory((width,))
        pieces = [_cut(tensor, width) for tensor in tensors]
        for index, out in enumerate(_cut(output, width)):
            length = len(out)
            slots = self._slots.next(output.dtype)
            for other in range(self.size):
                if other != self._rank:
                    slots[self._rank][other * width : other * width + length].copy_(pieces[other][index])
            self._offers.meet(reason)
            first = self._rank * width
            rows = [slot[first : first + length] for slot in slots]
            rows[self._rank] = pieces[self._rank][index]
            combine(rows, out, [held[:length] for held in memory])

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``outputs[rank]`` becomes what ``rank`` has at this rank's place in ``tensors``; lengths may differ."""
        if self._is_alone:
            outputs[0].copy_(tensors[0])
            return
        flags, mine = self._flags, self._rank
        sent, received = [as_bytes(tensor) for tensor in tensors], [as_bytes(tensor) for tensor in outputs]
        flags.say(max(map(len, [*sent, *received])))
        flags.meet(purpose(_ALL_TO_ALL))
        most = max(flags.said())
        self._slots.fit(most * self.size)
        width = self._slots.num_bytes // self.size // 8 * 8
        received[mine].copy_(sent[mine])
        for start in range(0, most, width):
            slots = self._slots.next(torch.uint8)
            for other, data in enumerate(sent):
                if other != mine and (piece := data[start : start + width]).numel():
                    slots[mine][other * width : other * width + len(piece)].copy_(piece)
            flags.meet(purpose(_ALL_TO_ALL, count=most))
            for other, data in enumerate(received):
                if other != mine and (piece := data[start : start + width]).numel():
                    piece.copy_(slots[other][mine * width : mine * width + len(piece)])

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks; see :meth:`HostGroup.barrier`."""
        self.group.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set how long a lost or late rank is waited for from now on."""
        self.group.flags.timeout_seconds = timeout_seconds

    def quick_call(self, *gate: object) -> Any:  # noqa: ANN401 - a class of the extension, or None
        """A call in C of a torch group's allreduce, which adds what is small; None where there is none in C.

        Args:
            gate: What else ``QuickCall`` of quick_call.c takes: when it adds, and what it does otherwise.
        """
        quick = None if self._is_alone else self._all_reduce.quick.in_c
        found: Any = addition.extension()
        is_there = found is not None and (self._is_alone or quick is not None)
        return found.QuickCall(quick, *gate) if is_there else None

    def leave_large(self) -> None:
        """Have :meth:`quick_call` leave large tensors to :meth:`all_reduce`, which can move their memory."""
        if not self._is_alone:
            self._all_reduce.quick.leave_large()

    def close(self) -> None:
        """Leave: the other ranks see it."""
        if not self._is_alone:
            self._offers.close()
        self.group.close()

    def break_off(self) -> None:
        """End a call that is going on in another thread, with an error."""
        self.group.flags.break_off()


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts of one length as one tensor, where they lie in a row."""
    first = parts[0]
    storage = first.untyped_storage().data_ptr()
    for number, part in enumerate(parts):
        is_next = part.data_ptr() == first.data_ptr() + number * first.nbytes
        if not is_next or part.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(parts) * len(first),), (1,))


def _cut(tensor: Tensor, width: int) -> Sequence[Tensor]:
    """The tensor in pieces of ``width`` elements; an empty tensor is one piece."""
    return tensor.split(width) if len(tensor) > width else (tensor,)
