"""Combining rows of shared memory in place: each rank a share of the elements, in blocks that fit its cache."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from popdist import extension
from popdist.host_memory.addition import (
    KINDS,
    OPS,
    Op,
    additions,
    blocks,
    combine_in_place,
    combiner,
    is_widened,
    share,
)
from popdist.host_memory.barriers import Barriers, operation, purpose

_REDUCE: Final = {op: operation(f"reduction in place ({op})") for op in OPS}

Divisor = float


class Reduction:
    """A reduction in place that can be run again and again; made by `HostGroup.reduction`."""

    def __init__(
        self,
        barriers: Barriers,
        rows: Sequence[Tensor],
        op: Op,
        *,
        outputs: Sequence[Tensor],
        pairs: Sequence[tuple[int, int]] | None,
    ) -> None:
        num_elements, dtype = len(rows[0]), rows[0].dtype
        if {(row.shape, row.dtype) for row in rows} != {(rows[0].shape, dtype)} or rows[0].dim() != 1:
            raise ValueError("the rows of a reduction must be flat, and of one length and dtype")
        if any(row.shape != rows[0].shape for row in outputs):
            raise ValueError("the outputs of a reduction must be as long as its rows")
        order = additions(len(rows)) if pairs is None else tuple(pairs)
        elements = share(num_elements, barriers.rank, barriers.size, dtype.itemsize)
        self._barriers = barriers
        self._rows = tuple(rows)
        self._purpose = purpose(_REDUCE[op], kind=KINDS[dtype], count=num_elements)
        self._divisor = len(rows) if op == "mean" else None
        self._combine_share: Callable[[Divisor], None] = (
            _in_one_pass(rows, elements)
            if _can_add_in_one_pass(rows, op, outputs, order)
            else _BlockByBlock(op, rows, outputs, order, elements)
        )

    def run(self, timeout_seconds: float | None = None, *, over: Divisor = 1) -> None:
        """Combine: a collective of the group. A sum of floats is divided by ``over``, the same on every rank."""
        self._barriers.wait(self._purpose, timeout_seconds)
        self._combine_share(over if self._divisor is None else self._divisor)
        self._barriers.wait(self._purpose, timeout_seconds)

    def finish(self, reason: int) -> None:
        """Combine after a barrier to which all ranks have come with their rows: the rest of :meth:`run`."""
        self._combine_share(self._divisor or 1)
        self._barriers.wait(reason)


def _can_add_in_one_pass(
    rows: Sequence[Tensor], op: Op, outputs: Sequence[Tensor], order: Sequence[tuple[int, int]]
) -> bool:
    """Whether C adds these rows: two or four of floats, in the usual order, into themselves."""
    is_sum = op in ("sum", "mean") and rows[0].dtype in (torch.float32, torch.float64)
    is_into_rows = [(row.data_ptr(), row.dtype) for row in outputs] == [
        (row.data_ptr(), row.dtype) for row in rows
    ]
    is_usual = len(rows) in (2, 4) and order == additions(len(rows))
    return is_sum and is_into_rows and is_usual and extension.find() is not None


def _in_one_pass(rows: Sequence[Tensor], elements: range) -> Callable[[Divisor], None]:
    """C's sum into all rows, divided by what it is given; the rows must outlive it."""
    dtype = rows[0].dtype
    starts = array("Q", [row.data_ptr() + elements.start * dtype.itemsize for row in rows]).tobytes()
    found: Any = extension.find()
    return partial(found.add_rows, starts, len(elements), dtype is torch.float64)


class _Block(NamedTuple):
    """A block of this rank's share."""

    rows: list[Tensor]
    outputs: list[Tensor]


class _BlockByBlock:
    """A reduction of a share by torch, one block of elements after the other."""

    def __init__(
        self,
        op: Op,
        rows: Sequence[Tensor],
        outputs: Sequence[Tensor],
        order: Sequence[tuple[int, int]],
        elements: range,
    ) -> None:
        dtype = rows[0].dtype
        is_half = is_widened(op, dtype)
        pieces = list(blocks(elements, dtype.itemsize, len(rows)))
        targets = [out for out in outputs if is_half or not _is_same(out, rows[0])]
        self._blocks = [_Block([row[piece] for row in rows], [out[piece] for out in targets]) for piece in pieces]
        self._order = order
        self._combine = combiner(op, dtype)
        longest = max((piece.stop - piece.start for piece in pieces), default=0)
        self._wide = [torch.empty(longest, dtype=torch.float32) for _ in rows] if is_half else None

    def __call__(self, divisor: Divisor) -> None:
        """Combine all blocks; divide each result."""
        for rows, outputs in self._blocks:
            total = combine_in_place(self._combine, self._widened(rows), self._order)
            if divisor != 1:
                total.div_(divisor)
            for out in outputs:
                out.copy_(total)

    def _widened(self, rows: list[Tensor]) -> list[Tensor]:
        if self._wide is None:
            return rows
        return [held[: len(row)].copy_(row) for held, row in zip(self._wide, rows, strict=True)]


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.dtype == right.dtype
