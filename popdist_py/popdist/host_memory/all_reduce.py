"""The all-reduce of a host group over tensors that live anywhere, through slots of shared memory or in place.

Each rank has two slots, used in turn: what it lays down for meeting n stands in the slot of n's parity (see
`popdist.host_memory.flags`). So one meeting for each piece of data is enough: while a slow rank still reads one
slot, a fast one fills the other.

An all-reduce of what fits a slot takes one meeting: every rank lays its tensor down and adds all of them itself,
in C where that is possible. So it does with a larger one piece by piece between two ranks. Among more, each rank
adds a share of every piece, lays the sum down, and takes the others' sums: two meetings for each piece, and the
work of adding is divided. A tensor whose memory all ranks map is laid down nowhere (`popdist.host_memory.offers`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple
from weakref import WeakMethod

import numpy as np
import torch
from torch import Size, Tensor
from torch.utils.dlpack import from_dlpack

from popdist.host_memory import addition, shared_storages
from popdist.host_memory.addition import (
    KINDS,
    OPS,
    SLOT_DTYPES,
    Combiner,
    Op,
    additions,
    as_numbers,
    combiner,
    path_of,
    share,
)
from popdist.host_memory.flags import operation, purpose
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.offers import LEAST_BYTES, MayMove, Offers, Places
from popdist.host_memory.row_reduction import Reduction
from popdist.host_memory.shared_storages import key_of
from popdist.host_memory.waiting import LONGEST_YIELD_SECONDS, MOST_SLEEPS, YIELD_SECONDS

FIRST_BYTES: Final = 1 << 16
"""Size of a slot until something larger is sent."""

LARGEST_BYTES: Final = 1 << 20
"""Size of a slot from then on; what is larger goes in pieces, which stay in the caches on their way."""

_PAIR: Final = 2
_SHARED_BYTES: Final = 1 << 16

SlotsListener = Callable[[Sequence[Tensor], int, int], None]


class Slots:
    """The slots of a group; every rank makes them, and lets them grow, at the same time.

    Attributes:
        num_bytes: Size of each.
    """

    def __init__(self, group: HostGroup) -> None:
        self.num_bytes = FIRST_BYTES
        self._group = group
        self._block = group.allocate(2 * FIRST_BYTES)
        self._listeners: list[SlotsListener] = []
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def tell(self, listener: SlotsListener) -> None:
        """Tell ``listener`` each rank's memory, :attr:`num_bytes` and :attr:`whole_bytes`, now and later."""
        self._listeners.append(listener)
        listener(self._block.rows, self.num_bytes, self.whole_bytes)

    def fit(self, num_bytes: int) -> None:
        """Make the slots larger if ``num_bytes`` do not fit; what does not fit the largest goes in pieces.

        Raises:
            BackendError: If a rank has no room: every rank raises it, and the slots stay as they are.
        """
        if num_bytes > self.num_bytes < LARGEST_BYTES:
            block = self._group.allocate(2 * LARGEST_BYTES)
            self._block.release()
            self._block, self.num_bytes = block, LARGEST_BYTES
            self._views.clear()
            for listener in self._listeners:
                listener(block.rows, self.num_bytes, self.whole_bytes)

    @property
    def whole_bytes(self) -> int:
        """Up to this size each rank adds all by itself, in one meeting: of three and more not what is large."""
        return self.num_bytes if self._group.size == _PAIR else _SHARED_BYTES

    def of_parity(self, parity: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's slot for meetings of this parity, in rank order: flat tensors of ``dtype``."""
        key = (parity, dtype)
        if key not in self._views:
            start = parity * self.num_bytes
            self._views[key] = [row[start : start + self.num_bytes].view(dtype) for row in self._block.rows]
        return self._views[key]

    def next(self, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's slot for the next meeting."""
        return self.of_parity(self._group.flags.next_number() & 1, dtype)


_NUM_LOOKS: Final = 400
"""How often C looks at the others' counters before it leaves its core to others, and after that Python waits."""


class QuickSums:
    """The sums in C of a group of at least two ranks.

    Args:
        settle: Sums a tensor after a meeting at which this rank has offered where it lies, and another one has not
            offered what it did before; held weakly.

    Attributes:
        in_c: What adds; None where there is nothing in C.
    """

    def __init__(self, group: HostGroup, slots: Slots, settle: Callable[[Tensor], None]) -> None:
        self._is_large_left = False
        self.in_c = _make_quick(group, WeakMethod(settle))
        if self.in_c is not None:
            slots.tell(self._lay)
            shared_storages.tell(self)

    def tell(self, places: Iterable[tuple[int, int]]) -> None:
        """Leave large tensors to Python that begin in these places, for which it has an offer to make."""
        if self.in_c is not None and not self._is_large_left:
            self.in_c.leave(as_numbers(chain.from_iterable(places)))

    def know(self, tensor: Tensor, places: Places, reduction: Reduction) -> None:
        """Have C do what was done with a tensor when it comes again, and all ranks offer these places again."""
        shared = shared_storages.find(tensor.untyped_storage())
        if self.in_c is None or reduction.in_one_pass is None or shared is None:
            return
        rows, length = reduction.in_one_pass
        lies = (key_of(tensor.untyped_storage()), shared.address, shared.num_bytes, tensor.data_ptr())
        what = (tensor.numel(), SLOT_DTYPES.index(tensor.dtype), length)
        self.in_c.know(
            as_numbers((*lies, *what)), as_numbers(places), as_numbers(rows), (reduction, shared.reference)
        )

    def forget(self) -> None:
        """Leave to Python what C knows."""
        if self.in_c is not None:
            self.in_c.forget()

    def leave_large(self) -> None:
        """Leave all large tensors to Python, which may move them."""
        self.tell([(0, _LAST_ADDRESS)])
        self._is_large_left = True

    def _lay(self, rows: Sequence[torch.Tensor], slot_bytes: int, most_bytes: int) -> None:
        self.in_c.lay(as_numbers(row.data_ptr() for row in rows), slot_bytes, most_bytes, rows)


_LAST_ADDRESS: Final = (1 << 64) - 1


def _make_quick(group: HostGroup, settle: WeakMethod[Any]) -> Any:  # noqa: ANN401 - a class of the extension, or None
    if {path_of("slot", "sum", dtype, group.size) for dtype in SLOT_DTYPES} != {"C"}:
        return None
    found: Any = addition.extension()
    flags = group.flags
    pairs = chain.from_iterable(additions(group.size))
    purposes = [purpose(_ALL_REDUCE["sum"], kind=KINDS[dtype]) for dtype in SLOT_DTYPES]
    num_looks = 1 if flags.is_crowded else _NUM_LOOKS
    wait = (
        num_looks,
        LONGEST_YIELD_SECONDS if flags.is_crowded else YIELD_SECONDS,
        flags.is_crowded * MOST_SLEEPS,
    )
    numbers = map(as_numbers, (flags.addresses, pairs, purposes))
    try:
        return found.Quick(torch.Tensor, flags, settle, group.rank, group.size, *wait, LEAST_BYTES, *numbers)
    except (AttributeError, ValueError):  # a torch whose tensors speak another DLPack
        return None


_ALL_REDUCE: Final = {op: operation(f"all_reduce ({op})") for op in OPS}

ARRAY_BYTES: Final = 1 << 19
"""Size of the pieces that two ranks add with numpy, whose calls cost less: two of them fit a usual cache."""

_MOST_PREPARED: Final = 512


class _PreparedSum(NamedTuple):
    """An all-reduce of tensors of one shape and dtype at one meeting; pairs hold what is for each parity."""

    purpose: int
    mine: tuple[Tensor, Tensor]
    rows: tuple[list[Tensor], list[Tensor]]
    combine: Combiner
    memory: list[Tensor]


class AllReduce:
    """The all-reduce of a group of at least two ranks."""

    def __init__(self, group: HostGroup, slots: Slots) -> None:
        self._flags = group.flags
        self._rank, self._size = group.rank, group.size
        self._slots = slots
        self._prepared: dict[tuple[Op, torch.dtype, Size], _PreparedSum] = {}
        self._num_bytes = slots.num_bytes
        """Size of the slots that the prepared sums are of."""
        self.quick = QuickSums(group, slots, self._settle)
        self.offers = Offers(group, self.quick.forget)

    def __call__(self, tensor: Tensor, op: Op, may_move: MayMove | None) -> None:
        """Combine in place; see `HostCollectives.all_reduce`."""
        if tensor.nbytes < LEAST_BYTES:
            self._add(tensor, op)
            return
        combiner(op, tensor.dtype)
        self._slots.fit(tensor.nbytes)
        reason = purpose(_ALL_REDUCE[op], kind=KINDS[tensor.dtype], count=tensor.numel())
        in_place = partial(self._add_in_place, tensor, op, reason)
        otherwise = partial(self._add, tensor, op, is_movable=may_move is not None)
        self.offers.run(tensor, reason, in_place, otherwise, may_move)

    def _add_in_place(self, tensor: Tensor, op: Op, reason: int, places: Places) -> None:
        reduction = self.offers.reduction(places, tensor, op)
        reduction.finish(reason)
        self.quick.know(tensor, places, reduction)

    @torch.inference_mode(mode=False)
    def _settle(self, tensor: Tensor) -> None:
        """Go on for :attr:`quick`."""
        plain = from_dlpack(tensor.detach())  # may be written into outside of inference mode
        reason = purpose(_ALL_REDUCE["sum"], kind=KINDS[tensor.dtype], count=tensor.numel())
        self.offers.settle(
            plain, partial(self._add_in_place, tensor, "sum", reason), partial(self._add, plain, "sum")
        )

    def _add(self, tensor: Tensor, op: Op, *, is_movable: bool = False) -> None:
        prepared = self._prepared.get((op, tensor.dtype, tensor.shape))
        if prepared is None or self._num_bytes != self._slots.num_bytes:
            prepared = self._prepare(tensor, op)
            if prepared is None:
                self._reduce_in_pieces(tensor, op, is_movable=is_movable)
                return
        parity = self._flags.next_number() & 1
        prepared.mine[parity].copy_(tensor)
        self.offers.meet(prepared.purpose)
        combine, rows = prepared.combine, prepared.rows[parity]
        if combine.is_plain:
            combine.plain(rows[0], rows[1], out=tensor)
        else:
            combine(rows, tensor, prepared.memory)

    def _prepare(self, tensor: Tensor, op: Op) -> _PreparedSum | None:
        """Prepare what needs one meeting only; None for what needs more."""
        num_bytes, dtype, shape = tensor.nbytes, tensor.dtype, tensor.shape
        combine = Combiner(op, dtype, self._size)
        self._slots.fit(num_bytes)
        if self._num_bytes != self._slots.num_bytes or len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
            self._num_bytes = self._slots.num_bytes
        if num_bytes > self._slots.whole_bytes:
            return None
        even, odd = (
            [slot[: tensor.numel()].view(shape) for slot in self._slots.of_parity(i, dtype)] for i in (0, 1)
        )
        prepared = self._prepared[op, dtype, shape] = _PreparedSum(
            purpose=purpose(_ALL_REDUCE[op], kind=KINDS[dtype], count=tensor.numel()),
            mine=(even[self._rank], odd[self._rank]),
            rows=(even, odd),
            combine=combine,
            memory=combine.memory(shape),
        )
        return prepared

    def _reduce_in_pieces(self, tensor: Tensor, op: Op, *, is_movable: bool) -> None:
        flat = tensor.contiguous().view(-1)
        combine = Combiner(op, tensor.dtype, self._size)
        reason = purpose(_ALL_REDUCE[op], kind=KINDS[tensor.dtype], count=len(flat))
        is_numpys = path_of("pieces", op, tensor.dtype, self._size) == "numpy"
        width = (ARRAY_BYTES if is_numpys else self._num_bytes) // tensor.element_size()
        if is_numpys and not is_movable:  # numpy's storages cannot move
            self._add_arrays(flat, width, reason)
        else:
            memory = combine.memory((width,))
            reduce_piece = self._reduce_whole if self._size == _PAIR else self._reduce_shares
            for piece in flat.split(width):
                reduce_piece(piece, reason, combine, memory)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _add_arrays(self, flat: Tensor, width: int, reason: int) -> None:
        """Each of two ranks adds all, in numpy's terms; in the pieces in which the other may do it in torch's."""
        array = flat.numpy()
        with np.errstate(all="ignore"):  # infinity and NaN are for those who look at the sum
            for start in range(0, len(array), width):
                piece = array[start : start + width]
                slots = self._slots.next(flat.dtype)
                rows = [slot[: len(piece)].numpy() for slot in slots]
                np.copyto(rows[self._rank], piece)
                self.offers.meet(reason)
                rows[self._rank] = piece
                np.add(rows[0], rows[1], out=piece)

    def _reduce_whole(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Each rank adds all of the piece."""
        length = len(piece)
        rows = [slot[:length] for slot in self._slots.next(piece.dtype)]
        rows[self._rank].copy_(piece)
        self.offers.meet(reason)
        rows[self._rank] = piece
        combine(rows, piece, [held[:length] for held in memory])

    def _reduce_shares(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Each rank adds a share of the piece and takes the others'."""
        flags, rank, slots = self._flags, self._rank, self._slots
        shares = [share(len(piece), other, self._size, piece.element_size()) for other in range(self._size)]
        mine = shares[rank]
        rows = slots.next(piece.dtype)
        for part in (slice(0, mine.start), slice(mine.stop, len(piece))):
            rows[rank][part].copy_(piece[part])
        self.offers.meet(reason)
        results = slots.next(piece.dtype)
        if mine:
            part = slice(mine.start, mine.stop)
            own, total = piece[part], results[rank][part]
            parts = [own if other == rank else row[part] for other, row in enumerate(rows)]
            combine(parts, total, [held[: len(mine)] for held in memory])
            own.copy_(total)
        flags.meet(reason)
        for other, its in enumerate(shares):
            if its and other != rank:
                part = slice(its.start, its.stop)
                piece[part].copy_(results[other][part])
