"""The collectives of a host group over tensors that live anywhere, through slots of shared memory.

Each rank has two slots, used in turn: what it lays down for meeting n stands in the slot of n's parity (see
`popdist.host_memory.flags`). So one meeting for each piece of data is enough: while a slow rank still reads one
slot, a fast one fills the other. A slot is cut into as many parts as there are receivers of different data, and a
piece is what fits such a part.

An all-reduce of what fits a slot takes one meeting: every rank lays its tensor down and adds all of them itself,
in C where that is possible. So it does with a larger one piece by piece between two ranks. Among more, each rank
adds a share of every piece, lays the sum down, and takes the others' sums: two meetings for each piece, and the
work of adding is divided.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Size, Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.host_memory import addition
from popdist.host_memory.addition import (
    KINDS,
    OPS,
    SLOT_DTYPES,
    Combiner,
    Op,
    additions,
    as_numbers,
    path_of,
    share,
)
from popdist.host_memory.flags import Names, operation, purpose
from popdist.host_memory.host_group import HostGroup

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


QuickSum = Callable[[list[torch.Tensor]], bool]
"""Whether the one tensor of the list has become the sum over the ranks; if not, nothing has happened.

Raises as all collectives do.
"""

_NUM_LOOKS: Final = 400
"""How often C looks at the others' counters before Python waits for them."""


def never(_tensors: Any) -> bool:  # noqa: ANN401 - whatever it is
    """The quick sum that adds nothing."""
    return False


def alone(_tensors: Any) -> bool:  # noqa: ANN401 - as above
    """The quick sum over one rank, which is there already."""
    return True


def make_quick_sum(group: HostGroup, slots: Slots) -> QuickSum:
    """The quick sum of a group of at least two ranks, in C; :func:`never` where that cannot be."""
    if {path_of("slot", "sum", dtype, group.size) for dtype in SLOT_DTYPES} != {"C"}:
        return never
    found: Any = addition.extension()
    flags = group.flags
    pairs = chain.from_iterable(additions(group.size))
    purposes = [purpose(_ALL_REDUCE["sum"], kind=KINDS[dtype]) for dtype in SLOT_DTYPES]
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


_ALL_REDUCE: Final = {op: operation(f"all_reduce ({op})") for op in OPS}
_REDUCE_SCATTER: Final = {op: operation(f"reduce_scatter ({op})") for op in OPS}
_REDUCE: Final = {op: operation(f"reduce ({op})") for op in OPS}
_ALL_GATHER: Final = operation("all_gather of bytes")
_BROADCAST: Final = operation("broadcast of bytes")
_ALL_TO_ALL: Final = operation("all_to_all")

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
        self.quick_sum = make_quick_sum(group, slots)

    def __call__(self, tensor: Tensor, op: Op) -> None:
        """Combine in place; see `HostCollectives.all_reduce`."""
        prepared = self._prepared.get((op, tensor.dtype, tensor.shape))
        if prepared is None or self._num_bytes != self._slots.num_bytes:
            prepared = self._prepare(tensor, op)
            if prepared is None:
                self._reduce_in_pieces(tensor, op)
                return
        flags = self._flags
        parity = flags.next_number() & 1
        prepared.mine[parity].copy_(tensor)
        flags.meet(prepared.purpose)
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

    def _reduce_in_pieces(self, tensor: Tensor, op: Op) -> None:
        flat = tensor.contiguous().view(-1)
        combine = Combiner(op, tensor.dtype, self._size)
        reason = purpose(_ALL_REDUCE[op], kind=KINDS[tensor.dtype], count=len(flat))
        if path_of("pieces", op, tensor.dtype, self._size) == "numpy":
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
                slots = self._slots.next(flat.dtype)
                rows = [slot[: len(piece)].numpy() for slot in slots]
                np.copyto(rows[self._rank], piece)
                self._flags.meet(reason)
                rows[self._rank] = piece
                np.add(rows[0], rows[1], out=piece)

    def _reduce_whole(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Each rank adds all of the piece."""
        length = len(piece)
        rows = [slot[:length] for slot in self._slots.next(piece.dtype)]
        rows[self._rank].copy_(piece)
        self._flags.meet(reason)
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
        flags.meet(reason)
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
        quick_sum: Whether the one tensor of a list has become the sum over the ranks, as by :meth:`all_reduce`;
            where it answers no, nothing has happened.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.rank = self._rank = group.rank
        self.size = group.size
        self.quick_sum: QuickSum = alone
        self._flags = group.flags
        self._is_alone = group.size == 1
        if not self._is_alone:
            self._slots = Slots(group)
            self._all_reduce = AllReduce(group, self._slots)
            self.quick_sum = self._all_reduce.quick_sum

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

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Combine the tensors of all ranks, in place: the same bits on each of them."""
        if not self._is_alone:
            self._all_reduce(tensor, op)

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
        pieces = [_cut(output, self._slots.num_bytes) for output in into]
        for index, piece in enumerate(_cut(data, self._slots.num_bytes)):
            slots = [slot[: len(piece)] for slot in self._slots.next(torch.uint8)]
            slots[self._rank].copy_(piece)
            self._flags.meet(reason)
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
        width = self._slots.num_bytes // (self.size * output.element_size())
        memory = combine.memory((width,))
        reason = purpose(_REDUCE_SCATTER[op], kind=KINDS[output.dtype], count=len(output))
        pieces = [_cut(tensor, width) for tensor in tensors]
        for index, out in enumerate(_cut(output, width)):
            length = len(out)
            slots = self._slots.next(output.dtype)
            for other in range(self.size):
                if other != self._rank:
                    slots[self._rank][other * width : other * width + length].copy_(pieces[other][index])
            self._flags.meet(reason)
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

    def close(self) -> None:
        """Leave: the other ranks see it."""
        self.group.close()

    def break_off(self) -> None:
        """End a call that is going on in another thread, with an error."""
        self.group.flags.break_off()


def _cut(tensor: Tensor, width: int) -> Sequence[Tensor]:
    """The tensor in pieces of ``width`` elements; an empty tensor is one piece."""
    return tensor.split(width) if len(tensor) > width else (tensor,)
