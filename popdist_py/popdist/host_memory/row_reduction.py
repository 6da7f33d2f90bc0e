"""Combining rows of shared memory in place: each rank a share of the elements, in blocks that fit its cache."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from popdist.host_memory import addition
from popdist.host_memory.addition import (
    KINDS,
    OPS,
    Combine,
    Op,
    Place,
    additions,
    as_numbers,
    blocks,
    combine_in_place,
    combiner,
    is_widened,
    path_of,
    share,
)
from popdist.host_memory.flags import Flags, operation, purpose

_REDUCE: Final = {op: operation(f"reduction in place ({op})") for op in OPS}

_POWER_OF_TWO: Final = 0.5
"""The mantissa of one."""

_MODERATE: Final = 2.0**100
"""Below it a power of two has an inverse that no processor takes for 0."""


class Reduction:
    """A reduction in place that can be run again and again; made by `HostGroup.reduction`.

    Attributes:
        in_one_pass: Where the extension sums this rank's share, which is not divided: where that begins in each
            row, and how many numbers it has; None where something else is done.
    """

    def __init__(
        self,
        flags: Flags,
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
        elements = share(num_elements, flags.rank, flags.size, dtype.itemsize)
        path = path_of(_place_of(rows, outputs, order), op, dtype, len(rows))
        self._flags = flags
        self._rows = tuple(rows)
        self._purpose = purpose(_REDUCE[op], kind=KINDS[dtype], count=num_elements)
        self._divisor = len(rows) if op == "mean" else None
        self._combine_share: Callable[[float], None]
        self.in_one_pass: tuple[list[int], int] | None = None
        if path == "C":
            starts = [row.data_ptr() + elements.start * dtype.itemsize for row in rows]
            self._combine_share = _sum_in_one_pass(starts, len(elements), dtype)
            self.in_one_pass = (starts, len(elements)) if op == "sum" else None
        else:
            self._combine_share = _BlockByBlock(path, op, rows, outputs, order, elements)

    def run(self, timeout_seconds: float | None = None, *, over: float = 1) -> None:
        """Combine: a collective of the group.

        Args:
            timeout_seconds: How long to wait for the others; None means as long as the group was made to.
            over: What a sum of floats is divided by; the same on every rank. 1 leaves it as it is.
        """
        self._flags.meet(self._purpose, timeout_seconds)
        self._combine_share(over if self._divisor is None else self._divisor)
        self._flags.meet(self._purpose, timeout_seconds)

    def finish(self, reason: int) -> None:
        """Combine after a meeting at which all ranks have come with their rows: the rest of :meth:`run`."""
        self._combine_share(self._divisor or 1)
        self._flags.meet(reason)


def _place_of(rows: Sequence[Tensor], outputs: Sequence[Tensor], order: Sequence[tuple[int, int]]) -> Place:
    if any(out.dtype != rows[0].dtype for out in outputs):
        return "cast outputs"
    is_into_rows = [row.data_ptr() for row in outputs] == [row.data_ptr() for row in rows]
    return "rows" if is_into_rows and order == additions(len(rows)) else "outputs"


def _sum_in_one_pass(starts: Sequence[int], length: int, dtype: torch.dtype) -> Callable[[float], None]:
    """The extension's sum into all rows, divided by what it is given; the rows must outlive it."""
    found: Any = addition.extension()
    return partial(found.add_rows, as_numbers(starts), length, dtype is torch.float64)


class _Block(NamedTuple):
    """A block of this rank's share, in torch's terms or numpy's."""

    rows: list[Any]
    outputs: list[Any]


class _BlockByBlock:
    """A reduction of a share by numpy or torch, one block of elements after the other."""

    def __init__(
        self,
        path: addition.Path,
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
        self._combine: Combine = combiner(op, dtype)
        self._divide: Callable[[Any, float], object] = Tensor.div_
        self._copy: Callable[[Any, Any], object] = Tensor.copy_
        if path == "numpy":
            self._combine, self._divide, self._copy = np.add, divide, np.copyto
            self._blocks = [_Block(*([row.numpy() for row in part] for part in block)) for block in self._blocks]
        longest = max((piece.stop - piece.start for piece in pieces), default=0)
        self._wide = [torch.empty(longest, dtype=torch.float32) for _ in rows] if is_half else None

    def __call__(self, divisor: float) -> None:
        """Combine all blocks; divide each result."""
        with np.errstate(all="ignore"):  # infinity and NaN are for those who look at the sum
            for rows, outputs in self._blocks:
                total = combine_in_place(self._combine, self._widened(rows), self._order)
                if divisor != 1:
                    self._divide(total, divisor)
                for out in outputs:
                    self._copy(out, total)

    def _widened(self, rows: list[Any]) -> list[Any]:
        if self._wide is None:
            return rows
        return [held[: len(row)].copy_(row) for held, row in zip(self._wide, rows, strict=True)]


def divide(array: Any, divisor: float) -> None:  # noqa: ANN401 - numpy's stubs would want its dtype
    """Divide floats in place; by a power of two it is a product, which has the same bits and is faster."""
    number = array.dtype.type(divisor)
    if math.frexp(number)[0] == _POWER_OF_TWO and 1 / _MODERATE < number < _MODERATE:
        np.multiply(array, 1 / number, out=array)
    else:
        np.divide(array, number, out=array)


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.dtype == right.dtype
