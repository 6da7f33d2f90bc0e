"""All-reduce of a tensor that lives anywhere, through the slots of its group; small ones in C where it was built.

What fits a slot takes one meeting: every rank lays its tensor down and adds all of them itself. So it does with a
larger one piece by piece between two ranks. Among more, each rank adds a share of every piece, lays the sum down,
and takes the others' sums: two meetings for each piece, and the work of adding is divided.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import torch
from torch import Size, Tensor

from popdist.host_memory import addition
from popdist.host_memory.addition import KINDS, NO_ARRAYS, Combiner, Op, additions, as_numbers, share
from popdist.host_memory.flags import operation, purpose
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.slots import Slots

DTYPES: Final = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What the extension adds, in its order."""

MOST_RANKS: Final = 64

_NUM_LOOKS: Final = 400
"""At the others' counters, before Python waits for them."""


QuickSum = Callable[[list[torch.Tensor]], bool]
"""Whether the one tensor of the list has become the sum over the ranks; if not, nothing has happened.

Raises as all collectives do.
"""


def never(_tensors: Any) -> bool:  # noqa: ANN401 - whatever it is
    """What adds nothing."""
    return False


def alone(_tensors: Any) -> bool:  # noqa: ANN401 - as above
    """The sum over one rank, whatever it is."""
    return True


def make_quick_sum(group: HostGroup, slots: Slots, operation: int) -> QuickSum:
    """What adds small tensors of a group of at least two ranks.

    Args:
        group: The ranks.
        slots: Theirs.
        operation: The sum's number.
    """
    found, flags = addition.extension(), group.flags
    if found is None or group.size > MOST_RANKS:
        return never
    pairs = chain.from_iterable(additions(group.size))
    purposes = [purpose(operation, kind=KINDS[dtype]) for dtype in DTYPES]
    num_looks = 1 if flags.is_crowded else _NUM_LOOKS
    numbers = map(as_numbers, (flags.addresses, pairs, purposes))
    try:
        quick = found.Quick(torch.Tensor, flags, group.rank, group.size, num_looks, *numbers)
    except (AttributeError, ValueError):  # a torch whose tensors speak another DLPack
        return never

    def lay(rows: Sequence[torch.Tensor], slot_bytes: int, most_bytes: int) -> None:
        quick.lay(as_numbers(row.data_ptr() for row in rows), slot_bytes, most_bytes, rows)

    slots.tell(lay)
    reduce: QuickSum = quick.reduce
    return reduce


_ALL_REDUCE: Final[dict[Op, int]] = {op: operation(f"all_reduce ({op})") for op in get_args(Op)}

ARRAY_BYTES: Final = 1 << 19
"""Size of the pieces that two ranks add with numpy, whose calls cost less: two of them fit a usual cache."""

_MOST_PLANS: Final = 512
_PAIR: Final = 2


class _Plan(NamedTuple):
    """How to reduce a tensor of one shape and dtype at one meeting; by parity where there are two of a thing."""

    purpose: int
    mine: tuple[Tensor, Tensor]
    rows: tuple[list[Tensor], list[Tensor]]
    combine: Combiner
    memory: list[Tensor]


class AllReduce:
    """The all-reduce of a group of at least two ranks.

    Args:
        group: The ranks.
        slots: Theirs; they may be shared with other collectives.
    """

    def __init__(self, group: HostGroup, slots: Slots) -> None:
        self._flags = group.flags
        self._rank, self._size = group.rank, group.size
        self._slots = slots
        self._plans: dict[tuple[Op, torch.dtype, Size], _Plan] = {}
        self._num_bytes = slots.num_bytes
        """Size of the slots that the plans are of."""
        self.quickly = make_quick_sum(group, slots, _ALL_REDUCE["sum"])

    def __call__(self, tensor: Tensor, op: Op) -> None:
        """Combine in place; see `HostCollectives.all_reduce`."""
        plan = self._plans.get((op, tensor.dtype, tensor.shape))
        if plan is None or self._num_bytes != self._slots.num_bytes:
            plan = self._prepare(tensor, op)
            if plan is None:
                self._reduce_in_pieces(tensor, op)
                return
        flags = self._flags
        parity = flags.next_number() & 1
        plan.mine[parity].copy_(tensor)
        flags.meet(plan.purpose)
        combine, rows = plan.combine, plan.rows[parity]
        if combine.is_plain:
            combine.plain(rows[0], rows[1], out=tensor)
        else:
            combine(rows, tensor, plan.memory)

    def _prepare(self, tensor: Tensor, op: Op) -> _Plan | None:
        """The plan for what needs one meeting only; None for what needs more."""
        num_bytes, dtype, shape = tensor.nbytes, tensor.dtype, tensor.shape
        combine = Combiner(op, dtype, self._size)
        self._slots.fit(num_bytes)
        if self._num_bytes != self._slots.num_bytes or len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._num_bytes = self._slots.num_bytes
        if num_bytes > self._slots.whole_bytes:
            return None
        even, odd = ([it[: tensor.numel()].view(shape) for it in self._slots.at(i, dtype)] for i in (0, 1))
        plan = self._plans[op, dtype, shape] = _Plan(
            purpose=purpose(_ALL_REDUCE[op], kind=KINDS[dtype], count=tensor.numel()),
            mine=(even[self._rank], odd[self._rank]),
            rows=(even, odd),
            combine=combine,
            memory=combine.memory(shape),
        )
        return plan

    def _reduce_in_pieces(self, tensor: Tensor, op: Op) -> None:
        flat = tensor.contiguous().view(-1)
        combine = Combiner(op, tensor.dtype, self._size)
        reason = purpose(_ALL_REDUCE[op], kind=KINDS[tensor.dtype], count=len(flat))
        if op == "sum" and combine.is_plain and tensor.dtype not in NO_ARRAYS:
            self._add_arrays(flat, reason)
        else:
            width = self._num_bytes // tensor.element_size()
            memory = combine.memory((width,))
            reduce_piece = self._reduce_whole if self._size == _PAIR else self._reduce_shares
            for piece in flat.split(width):
                reduce_piece(piece, reason, combine, memory)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _add_arrays(self, flat: Tensor, reason: int) -> None:
        """Each of two ranks adds all, in numpy's terms."""
        array, width = flat.numpy(), ARRAY_BYTES // flat.element_size()
        with np.errstate(all="ignore"):  # infinity and NaN are for those who look at the sum
            for start in range(0, len(array), width):
                piece = array[start : start + width]
                slots = self._slots.at(self._flags.next_number(), flat.dtype)
                rows = [slot[: len(piece)].numpy() for slot in slots]
                np.copyto(rows[self._rank], piece)
                self._flags.meet(reason)
                rows[self._rank] = piece
                np.add(rows[0], rows[1], out=piece)

    def _reduce_whole(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Each rank adds all of the piece."""
        length = len(piece)
        rows = [slot[:length] for slot in self._slots.at(self._flags.next_number(), piece.dtype)]
        rows[self._rank].copy_(piece)
        self._flags.meet(reason)
        rows[self._rank] = piece
        combine(rows, piece, [held[:length] for held in memory])

    def _reduce_shares(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Each rank adds a share of the piece and takes the others'."""
        flags, rank, slots = self._flags, self._rank, self._slots
        shares = [share(len(piece), it, self._size, piece.element_size()) for it in range(self._size)]
        mine = shares[rank]
        rows = slots.at(flags.next_number(), piece.dtype)
        for part in (slice(0, mine.start), slice(mine.stop, len(piece))):
            rows[rank][part].copy_(piece[part])
        flags.meet(reason)
        results = slots.at(flags.next_number(), piece.dtype)
        if mine:
            part = slice(mine.start, mine.stop)
            own, total = piece[part], results[rank][part]
            parts = [own if it == rank else row[part] for it, row in enumerate(rows)]
            combine(parts, total, [held[: len(mine)] for held in memory])
            own.copy_(total)
        flags.meet(reason)
        for other, its in enumerate(shares):
            if its and other != rank:
                part = slice(its.start, its.stop)
                piece[part].copy_(results[other][part])
