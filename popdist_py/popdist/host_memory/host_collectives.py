"""The collectives of a host group over tensors that live anywhere.

All tensors are flat and contiguous. A slot is cut into as many parts as there are receivers of different data, and
a piece is what fits such a part; each piece takes one meeting.
"""

from collections.abc import Sequence
from typing import Final, get_args

import torch
from torch import Tensor

from popdist.host_memory.addition import KINDS, Combiner, Op
from popdist.host_memory.all_reduce import AllReduce, QuickSum, alone
from popdist.host_memory.flags import operation, purpose
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.slots import Slots

_REDUCE_SCATTER: Final[dict[Op, int]] = {op: operation(f"reduce_scatter ({op})") for op in get_args(Op)}
_REDUCE: Final[dict[Op, int]] = {op: operation(f"reduce ({op})") for op in get_args(Op)}
_ALL_GATHER: Final = operation("all_gather of bytes")
_BROADCAST: Final = operation("broadcast of bytes")
_ALL_TO_ALL: Final = operation("all_to_all")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a flat contiguous tensor: every dtype travels the same way."""
    return tensor.view(torch.uint8)


class Moving:
    """What a group of at least two ranks hands round.

    Args:
        group: The ranks.
        slots: Theirs; they may be shared with other collectives.
    """

    def __init__(self, group: HostGroup, slots: Slots) -> None:
        self._flags = group.flags
        self._rank, self._size = group.rank, group.size
        self._slots = slots

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite with the root's."""
        data = as_bytes(tensor)
        self._slots.fit(len(data))
        reason = purpose(_BROADCAST, root=root + 1, count=len(data))
        for piece in _cut(data, self._slots.num_bytes):
            slot = self._slots.at(self._flags.next_number(), torch.uint8)[root][: len(piece)]
            if self._rank == root:
                slot.copy_(piece)
            self._flags.meet(reason)
            if self._rank != root:
                piece.copy_(slot)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """``outputs[rank]`` becomes the tensor of ``rank``."""
        data, into = as_bytes(tensor), [as_bytes(it) for it in outputs]
        self._slots.fit(len(data))
        reason = purpose(_ALL_GATHER, count=len(data))
        pieces = [_cut(it, self._slots.num_bytes) for it in into]
        for index, piece in enumerate(_cut(data, self._slots.num_bytes)):
            slots = [it[: len(piece)] for it in self._slots.at(self._flags.next_number(), torch.uint8)]
            slots[self._rank].copy_(piece)
            self._flags.meet(reason)
            slots[self._rank] = piece
            for row, slot in zip(pieces, slots, strict=True):
                row[index].copy_(slot)

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """The root's becomes the combination of all; the others' stay."""
        combine = Combiner(op, tensor.dtype, self._size)
        self._slots.fit(tensor.nbytes)
        width = self._slots.num_bytes // tensor.element_size()
        memory = combine.memory((width,)) if self._rank == root else []
        reason = purpose(_REDUCE[op], kind=KINDS[tensor.dtype], root=root + 1, count=len(tensor))
        for piece in _cut(tensor, width):
            length = len(piece)
            rows = [it[:length] for it in self._slots.at(self._flags.next_number(), tensor.dtype)]
            if self._rank != root:
                rows[self._rank].copy_(piece)
            self._flags.meet(reason)
            if self._rank == root:
                rows[root] = piece
                combine(rows, piece, [held[:length] for held in memory])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """``output`` becomes the combination of all ranks' ``tensors[rank]`` of this rank."""
        combine = Combiner(op, output.dtype, self._size)
        self._slots.fit(output.nbytes * self._size)
        width = self._slots.num_bytes // (self._size * output.element_size())
        memory = combine.memory((width,))
        reason = purpose(_REDUCE_SCATTER[op], kind=KINDS[output.dtype], count=len(output))
        pieces = [_cut(it, width) for it in tensors]
        for index, out in enumerate(_cut(output, width)):
            length = len(out)
            slots = self._slots.at(self._flags.next_number(), output.dtype)
            for other in range(self._size):
                if other != self._rank:
                    slots[self._rank][other * width : other * width + length].copy_(pieces[other][index])
            self._flags.meet(reason)
            first = self._rank * width
            rows = [it[first : first + length] for it in slots]
            rows[self._rank] = pieces[self._rank][index]
            combine(rows, out, [held[:length] for held in memory])

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``outputs[rank]`` becomes the ``tensors[self]`` of ``rank``; the lengths may all differ."""
        flags, mine = self._flags, self._rank
        sent, received = [as_bytes(it) for it in tensors], [as_bytes(it) for it in outputs]
        flags.say(max(map(len, [*sent, *received])))
        flags.meet(purpose(_ALL_TO_ALL))
        most = max(flags.said())
        self._slots.fit(most * self._size)
        width = self._slots.num_bytes // self._size // 8 * 8
        received[mine].copy_(sent[mine])
        for start in range(0, most, width):
            slots = self._slots.at(flags.next_number(), torch.uint8)
            for other, data in enumerate(sent):
                if other != mine and (piece := data[start : start + width]).numel():
                    slots[mine][other * width : other * width + len(piece)].copy_(piece)
            flags.meet(purpose(_ALL_TO_ALL, count=most))
            for other, data in enumerate(received):
                if other != mine and (piece := data[start : start + width]).numel():
                    piece.copy_(slots[other][mine * width : mine * width + len(piece)])


def _cut(tensor: Tensor, width: int) -> Sequence[Tensor]:
    """In pieces of ``width`` elements; one, which is empty, of an empty tensor."""
    return tensor.split(width) if len(tensor) > width else (tensor,)


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
        size: How many they are.
        add_quickly: Whether the one tensor of a list has become the sum over the ranks, as by :meth:`all_reduce`;
            where it answers no, nothing has happened.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.size = group.size
        self._is_alone = group.size == 1
        self.add_quickly: QuickSum = alone
        if not self._is_alone:
            slots = Slots(group)
            self._moving = Moving(group, slots)
            self.all_reduce_together = AllReduce(group, slots)
            self.add_quickly = self.all_reduce_together.quickly

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Combine the tensors of all ranks, in place: the same bits on each of them."""
        if not self._is_alone:
            self.all_reduce_together(tensor, op)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor of every rank with that of rank ``root``."""
        if not self._is_alone:
            self._moving.broadcast(tensor, root)

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """Combine the tensors of all ranks into that of rank ``root``; the others stay as they are."""
        if not self._is_alone:
            self._moving.reduce(tensor, op, root)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """``outputs[rank]`` becomes a copy of the tensor of ``rank``, which has the same length everywhere."""
        if self._is_alone:
            outputs[0].copy_(tensor)
        else:
            self._moving.all_gather(outputs, tensor)

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """``output`` becomes the combination of what all ranks have at this rank's place in ``tensors``."""
        if self._is_alone:
            output.copy_(tensors[0])
        else:
            self._moving.reduce_scatter(output, tensors, op)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``outputs[rank]`` becomes what ``rank`` has at this rank's place in ``tensors``; lengths may differ."""
        if self._is_alone:
            outputs[0].copy_(tensors[0])
        else:
            self._moving.all_to_all(outputs, tensors)

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks; see :meth:`HostGroup.barrier`."""
        self.group.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """How long a lost or late rank is waited for from now on."""
        self.group.flags.timeout_seconds = timeout_seconds

    def close(self) -> None:
        """Leave: the other ranks see it."""
        self.group.close()

    def break_off(self) -> None:
        """End a call that is going on in another thread, with an error."""
        self.group.flags.break_off()
