"""The collectives of ranks on one host, on any CPU tensors: through slots (buffers in shared memory) or in place.

Each rank has two slots, used alternately by the barrier's parity, so that one barrier for each piece of data is
enough. In an all-reduce every rank adds the whole piece if the piece is small or there are two ranks; otherwise
each rank adds a share of the piece, with two barriers. A tensor that all ranks have mapped is not copied
(`popdist.exchange.host_memory.in_place`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Self

import torch
from torch import Size, Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.errors import Names
from popdist.exchange.host_memory.addition import KINDS, LINE_BYTES, OPS, Combiner, Op, combiner, share
from popdist.exchange.host_memory.barriers import operation, purpose
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.host_memory.in_place import LEAST_BYTES, InPlace, MayMove, Places

FIRST_BYTES: Final = 1 << 16
"""Number of bytes of a slot, a rank's buffer in shared memory, until something larger is sent."""

LARGEST_BYTES: Final = (1 << 21) + (1 << 16)
"""Number of bytes of an enlarged slot (a buffer); larger tensors are sent in pieces, which stay in the cache.

The added 64 KiB have room for the bias of a layer whose weights fill the rest: a separate piece is not needed.
"""

_PAIR: Final = 2
_SHARED_BYTES: Final = 1 << 16

_ALL_REDUCE: Final = {op: operation(f"all_reduce ({op})") for op in OPS}
_REDUCE_SCATTER: Final = {op: operation(f"reduce_scatter ({op})") for op in OPS}
_REDUCE: Final = {op: operation(f"reduce ({op})") for op in OPS}
_ALL_GATHER: Final = operation("all_gather of bytes")
_BROADCAST: Final = operation("broadcast of bytes")
_ALL_TO_ALL: Final = operation("all_to_all")

_MOST_PREPARED: Final = 512


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the contiguous ``tensor`` as flat bytes in the same memory, so that all dtypes are sent alike."""
    return tensor.view(-1).view(torch.uint8)


class Slots:
    """The slots of a group: two buffers in shared memory for each rank, which all ranks enlarge together."""

    def __init__(self, group: HostGroup) -> None:
        self.num_bytes = FIRST_BYTES
        self._group = group
        self._block = group.allocate(2 * FIRST_BYTES)
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def fit(self, num_bytes: int) -> None:
        """Enlarge all ranks' buffers if ``num_bytes`` do not fit. Raises BackendError if a rank lacks memory."""
        if num_bytes > self.num_bytes < LARGEST_BYTES:
            block = self._group.allocate(2 * LARGEST_BYTES)
            self._block.release()
            self._block, self.num_bytes = block, LARGEST_BYTES
            self._views.clear()

    def fit_parts(self, num_bytes: int) -> int:
        """Enlarge the buffers, if possible, to ``num_bytes`` per other rank; return the bytes per other rank."""
        num_others = self._group.size - 1
        self.fit(num_bytes * num_others)
        return self.num_bytes // num_others // LINE_BYTES * LINE_BYTES

    @property
    def whole_bytes(self) -> int:
        """Maximum number of bytes of a tensor that each rank adds as a whole, which needs only one barrier."""
        return self.num_bytes if self._group.size == _PAIR else _SHARED_BYTES

    def of_parity(self, parity: int, dtype: torch.dtype) -> list[Tensor]:
        """Return each rank's buffer for even (0) or odd (1) barriers, as flat tensors of ``dtype``, by rank."""
        key = (parity, dtype)
        if key not in self._views:
            start = parity * self.num_bytes
            with torch.inference_mode(mode=False):  # collectives outside of this mode use the views, too
                self._views[key] = [row[start : start + self.num_bytes].view(dtype) for row in self._block.rows]
        return self._views[key]

    def next(self, dtype: torch.dtype) -> list[Tensor]:
        """Return each rank's buffer in shared memory for the next barrier, as flat tensors of ``dtype``."""
        return self.of_parity(self._group.barriers.next_parity(), dtype)


class _PreparedSum(NamedTuple):
    """The views and functions for an all-reduce, with one barrier, of tensors of one shape and dtype."""

    purpose: int
    mine: tuple[Tensor, Tensor]
    rows: tuple[list[Tensor], list[Tensor]]
    combine: Combiner
    memory: list[Tensor]


class AllReduce:
    """The all-reduce of a host's ranks, at least two, through buffers in shared memory or in place."""

    def __init__(self, group: HostGroup, slots: Slots, in_place: InPlace) -> None:
        self._barriers = group.barriers
        self._rank, self._size = group.rank, group.size
        self._slots = slots
        self._in_place = in_place
        self._prepared: dict[tuple[Op, torch.dtype, Size], _PreparedSum] = {}
        self._num_bytes = slots.num_bytes  # the size of the slots in the prepared sums

    def __call__(self, tensor: Tensor, op: Op, may_move: MayMove | None) -> None:
        """Combine the tensors of all ranks in place; see `HostCollectives.all_reduce`."""
        if tensor.nbytes < LEAST_BYTES:
            self._add(tensor, op)
            return
        combiner(op, tensor.dtype)  # raises an error before anything is sent
        reason = purpose(_ALL_REDUCE[op], kind=KINDS[tensor.dtype], count=tensor.numel())
        places = self._in_place.agree(tensor, reason, may_move)
        if places is None:
            self._add(tensor, op)
        else:
            self._in_place.reduction(places, tensor, op).finish(reason)

    def _add(self, tensor: Tensor, op: Op) -> None:
        prepared = self._prepared.get((op, tensor.dtype, tensor.shape))
        if prepared is None or self._num_bytes != self._slots.num_bytes:
            prepared = self._prepare(tensor, op)
            if prepared is None:
                self._reduce_in_pieces(tensor, op)
                return
        parity = self._barriers.next_parity()
        prepared.mine[parity].copy_(tensor)
        self._barriers.wait(prepared.purpose)
        prepared.combine(prepared.rows[parity], tensor, prepared.memory)

    @torch.inference_mode(mode=False)  # collectives outside of this mode use the prepared views, too
    def _prepare(self, tensor: Tensor, op: Op) -> _PreparedSum | None:
        """Prepare an all-reduce of ``tensor`` that needs one barrier; return None if it needs several barriers."""
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
        width = self._num_bytes // tensor.element_size()
        memory = combine.memory((width,))
        reduce_piece = self._reduce_whole if self._size == _PAIR else self._reduce_shares
        for piece in flat.split(width):
            reduce_piece(piece, reason, combine, memory)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _reduce_whole(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Combine a part of all ranks' tensors: after one barrier every rank adds all elements of this part."""
        length = len(piece)
        rows = [slot[:length] for slot in self._slots.next(piece.dtype)]
        rows[self._rank].copy_(piece)
        self._barriers.wait(reason)
        rows[self._rank] = piece
        combine(rows, piece, [held[:length] for held in memory])

    def _reduce_shares(self, piece: Tensor, reason: int, combine: Combiner, memory: Sequence[Tensor]) -> None:
        """Combine a part of all ranks' tensors: each rank adds some of the elements, and copies the other sums."""
        barriers, rank, slots = self._barriers, self._rank, self._slots
        shares = [share(len(piece), other, self._size, piece.element_size()) for other in range(self._size)]
        own_share = shares[rank]
        rows = slots.next(piece.dtype)
        for part in (slice(0, own_share.start), slice(own_share.stop, len(piece))):
            rows[rank][part].copy_(piece[part])
        barriers.wait(reason)
        results = slots.next(piece.dtype)
        if own_share:
            part = slice(own_share.start, own_share.stop)
            own_piece, total = piece[part], results[rank][part]
            parts = [own_piece if other == rank else row[part] for other, row in enumerate(rows)]
            combine(parts, total, [held[: len(own_share)] for held in memory])
            own_piece.copy_(total)
        barriers.wait(reason)
        for other, other_share in enumerate(shares):
            if other_share and other != rank:
                part = slice(other_share.start, other_share.stop)
                piece[part].copy_(results[other][part])


class HostCollectives:
    """The collectives of one host's ranks; all ranks must make the same calls with the same sizes and operations.

    Tensors must be on the CPU and without gradient, and, except in :meth:`all_reduce`, flat and contiguous.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.rank = self._rank = group.rank
        self.size = group.size
        self._barriers = group.barriers
        self._is_alone = group.size == 1
        if not self._is_alone:
            self._slots = Slots(group)
            self._in_place = InPlace(group)
            self._all_reduce = AllReduce(group, self._slots, self._in_place)

    @classmethod
    def connect(
        cls, store: Store, rank: int, num_local: int, *, names: Names, timeout_seconds: float
    ) -> Self | None:
        """Return the collectives of this host's ``num_local`` ranks; None on all ranks if sharing memory fails."""
        first = rank - rank % num_local
        local = replace(names, members=names.members[first : first + num_local])
        prefix = PrefixStore(f"host/{first}", store)
        group = HostGroup.connect(prefix, rank - first, num_local, timeout_seconds=timeout_seconds, names=local)
        return None if group is None else cls(group)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", may_move: MayMove | None = None) -> None:
        """Combine the tensors of all ranks in place. To avoid copies in later calls, a tensor's memory is moved
        into shared memory, but only if ``may_move(tensor)`` returns True.
        """
        if not self._is_alone:
            self._all_reduce(tensor, op, may_move)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor of every rank with the tensor of rank ``root``."""
        if self._is_alone:
            return
        data = as_bytes(tensor)
        self._slots.fit(len(data))
        reason = purpose(_BROADCAST, root=root + 1, count=len(data))
        for piece in _cut(data, self._slots.num_bytes):
            slot = self._slots.next(torch.uint8)[root][: len(piece)]
            if self._rank == root:
                slot.copy_(piece)
            self._barriers.wait(reason)
            if self._rank != root:
                piece.copy_(slot)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy the tensor of each rank into ``outputs[rank]``; all tensors must have the same length."""
        if self._is_alone:
            outputs[0].copy_(tensor)
            return
        data, into = as_bytes(tensor), [as_bytes(output) for output in outputs]
        reason = purpose(_ALL_GATHER, count=len(data))
        places = self._in_place.agree(data, reason) if len(data) >= LEAST_BYTES else None
        if places is None:
            self._gather_in_pieces(into, data, reason)
            return
        rows = self._in_place.rows(places, len(data), torch.uint8)
        rows[self._rank] = data
        for output, row in zip(into, rows, strict=True):
            if output.data_ptr() != row.data_ptr():
                output.copy_(row)
        self._barriers.wait(reason)

    def _gather_in_pieces(self, into: Sequence[Tensor], data: Tensor, reason: int) -> None:
        self._slots.fit(len(data))
        pieces = [_cut(output, self._slots.num_bytes) for output in into]
        for index, piece in enumerate(_cut(data, self._slots.num_bytes)):
            slots = [slot[: len(piece)] for slot in self._slots.next(torch.uint8)]
            slots[self._rank].copy_(piece)
            self._barriers.wait(reason)
            slots[self._rank] = piece
            for row, slot in zip(pieces, slots, strict=True):
                row[index].copy_(slot)

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """Combine the tensors of all ranks into rank ``root``'s tensor; the other tensors stay unchanged."""
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
            self._barriers.wait(reason)
            if self._rank == root:
                rows[root] = piece
                combine(rows, piece, [held[:length] for held in memory])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """Combine ``tensors[i]`` of all ranks, where *i* is the number of this rank, into ``output``."""
        if self._is_alone:
            output.copy_(tensors[0])
            return
        combine = Combiner(op, output.dtype, self.size)
        reason = purpose(_REDUCE_SCATTER[op], kind=KINDS[output.dtype], count=len(output))
        is_large = output.nbytes * self.size >= LEAST_BYTES
        places = self._in_place.agree(_joined(tensors), reason) if is_large else None
        if places is None:
            self._scatter_in_pieces(output, tensors, combine, reason)
        else:
            self._scatter_in_place(output, combine, reason, places)

    def _scatter_in_place(self, output: Tensor, combine: Combiner, reason: int, places: Places) -> None:
        """Combine this rank's part of all ranks' tensors into ``output``, directly from the tensors' memory."""
        first, width = self._rank * len(output), LARGEST_BYTES // output.element_size()
        wholes = self._in_place.rows(places, output.nbytes * self.size, output.dtype)
        rows = [whole[first : first + len(output)] for whole in wholes]
        memory = combine.memory((min(width, len(output)),))
        for parts in zip(*(_cut(row, width) for row in (output, *rows)), strict=True):
            combine(parts[1:], parts[0], [held[: len(parts[0])] for held in memory])
        self._barriers.wait(reason)

    def _scatter_in_pieces(
        self, output: Tensor, tensors: Sequence[Tensor], combine: Combiner, reason: int
    ) -> None:
        rank, others = self._rank, range(self.size)
        width = self._slots.fit_parts(output.nbytes) // output.element_size()
        memory = combine.memory((width,))
        pieces = [_cut(tensor, width) for tensor in tensors]
        for index, out in enumerate(_cut(output, width)):
            length = len(out)
            slots = self._slots.next(output.dtype)
            for other in others:
                if other != rank:
                    _part(slots[rank], rank, other, width)[:length].copy_(pieces[other][index])
            self._barriers.wait(reason)
            rows = [
                pieces[rank][index] if other == rank else _part(slots[other], other, rank, width)[:length]
                for other in others
            ]
            combine(rows, out, [held[:length] for held in memory])

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Send ``tensors[i]`` to each rank *i*, and receive its tensor into ``outputs[i]``; lengths may differ."""
        if self._is_alone:
            outputs[0].copy_(tensors[0])
            return
        barriers, rank = self._barriers, self._rank
        sent, received = [as_bytes(tensor) for tensor in tensors], [as_bytes(tensor) for tensor in outputs]
        most_bytes = max(barriers.exchange(max(map(len, [*sent, *received])), purpose(_ALL_TO_ALL)))
        width = self._slots.fit_parts(most_bytes)
        received[rank].copy_(sent[rank])
        for start in range(0, most_bytes, width):
            slots = self._slots.next(torch.uint8)
            for other, data in enumerate(sent):
                if other != rank and (piece := data[start : start + width]).numel():
                    _part(slots[rank], rank, other, width)[: len(piece)].copy_(piece)
            barriers.wait(purpose(_ALL_TO_ALL, count=most_bytes))
            for other, data in enumerate(received):
                if other != rank and (piece := data[start : start + width]).numel():
                    piece.copy_(_part(slots[other], other, rank, width)[: len(piece)])

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait until all ranks of the host are in this call; see :meth:`HostGroup.barrier`."""
        self.group.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set how long later collectives wait for a lost or late rank before raising an error."""
        self.group.barriers.timeout_seconds = timeout_seconds

    def close(self) -> None:
        """Leave the group of the host's ranks; the other ranks detect that this rank has left."""
        if not self._is_alone:
            self._in_place.close()
        self.group.close()

    def abort(self) -> None:
        """End a collective that runs in another thread of this process, with an error in that thread."""
        self.group.barriers.abort()


def _part(slot: Tensor, owner: int, reader: int, width: int) -> Tensor:
    """Return the part of ``owner``'s slot (shared buffer) that is for ``reader``, which must be another rank."""
    start = (reader - (reader > owner)) * width
    return slot[start : start + width]


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return parts of equal length as one tensor, without a copy; None if the parts are not adjacent in memory."""
    first = parts[0]
    storage = first.untyped_storage().data_ptr()
    for number, part in enumerate(parts):
        is_next = part.data_ptr() == first.data_ptr() + number * first.nbytes
        if not is_next or part.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(parts) * len(first),), (1,))


def _cut(tensor: Tensor, width: int) -> Sequence[Tensor]:
    """Return ``tensor`` in pieces of ``width`` elements, the last may be shorter; no elements make one piece."""
    return tensor.split(width) if len(tensor) > width else (tensor,)
