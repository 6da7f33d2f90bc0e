"""Combining rows of shared memory in place: each rank a share of the elements, in blocks that fit its cache.

Sums are made by numpy, which adds the same bits as torch and whose functions are called faster; those of two or
four rows by popdist's extension, in one pass.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from popdist.host_memory.addition import (
    HALVES,
    KINDS,
    NO_ARRAYS,
    Op,
    additions,
    blocks,
    combiner,
    fused_sum,
    share,
)
from popdist.host_memory.flags import Flags, operation, purpose

_REDUCE: Final = {op: operation(f"reduction in place ({op})") for op in get_args(Op)}

_POWER_OF_TWO: Final = 0.5
"""The mantissa of one."""

_MODERATE: Final = 2.0**100
"""Below it a power of two has an inverse that no processor takes for 0."""


class _Piece(NamedTuple):
    """A block of this rank's share, in torch's terms or numpy's."""

    rows: list[Any]
    outputs: list[Any]


class Reduction:
    """A reduction in place that can be run again and again; made by `HostGroup.reduction`."""

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
        self._flags = flags
        self._purpose = purpose(_REDUCE[op], kind=KINDS[dtype], count=num_elements)
        self._combine = combiner(op, dtype)
        self._pairs = additions(len(rows)) if pairs is None else tuple(pairs)
        self._divisor = len(rows) if op == "mean" else None
        elements = share(num_elements, flags.rank, flags.size, rows[0].element_size())
        pieces = list(blocks(elements, rows[0].element_size(), len(rows)))
        is_half = dtype in HALVES
        targets = [out for out in outputs if is_half or not _is_same(out, rows[0])]
        self._pieces = [_Piece([row[it] for row in rows], [out[it] for out in targets]) for it in pieces]
        self._fused = fused_sum(rows, outputs, self._pairs, elements) if op in ("sum", "mean") else None
        self._arrays: list[_Piece] | None = None
        if op in ("sum", "mean") and dtype not in NO_ARRAYS and _all_of(outputs, dtype):
            self._arrays = [
                _Piece([it.numpy() for it in piece.rows], [it.numpy() for it in piece.outputs])
                for piece in self._pieces
            ]
        longest = max((piece.stop - piece.start for piece in pieces), default=0)
        self._wide = [torch.empty(longest, dtype=torch.float32) for _ in rows] if is_half else None

    def run(self, timeout_seconds: float | None = None, *, over: float = 1) -> None:
        """Combine: a collective of the group.

        Args:
            timeout_seconds: How long to wait for the others; None means as long as the group was made to.
            over: What a sum of floats is divided by; the same on every rank. 1 leaves it as it is.

        Raises:
            BackendError: If a rank was lost or did not come in time; the message names it.
            CollectiveError: If a rank is in another operation of this group.
        """
        divisor = over if self._divisor is None else self._divisor
        self._flags.meet(self._purpose, timeout_seconds)
        if self._fused is not None:
            self._fused(divisor)
        elif self._arrays is None:
            self._combine_tensors(divisor)
        else:
            self._add_arrays(self._arrays, divisor)
        self._flags.meet(self._purpose, timeout_seconds)

    def _combine_tensors(self, divisor: float) -> None:
        for rows, outputs in self._pieces:
            if self._wide is None:
                total = self._combine_rows(rows, divisor)
            else:
                wide = [held[: len(row)].copy_(row) for held, row in zip(self._wide, rows, strict=True)]
                total = self._combine_rows(wide, divisor)
            for out in outputs:
                out.copy_(total)

    def _add_arrays(self, pieces: Sequence[_Piece], divisor: float) -> None:
        with np.errstate(all="ignore"):  # infinity and NaN are for those who look at the sum
            for rows, outputs in pieces:
                for left, right in self._pairs:
                    np.add(rows[left], rows[right], out=rows[left])
                total = rows[0]
                if divisor != 1:
                    divide(total, divisor)
                for out in outputs:
                    np.copyto(out, total)

    def _combine_rows(self, rows: Sequence[Tensor], divisor: float) -> Tensor:
        combine = self._combine
        for left, right in self._pairs:
            combine(rows[left], rows[right], out=rows[left])
        total = rows[0]
        if divisor != 1:
            total.div_(divisor)
        return total


def divide(array: Any, divisor: float) -> None:  # noqa: ANN401 - numpy's stubs would want its dtype
    """Divide floats in place; by a power of two it is a product, which has the same bits and is faster."""
    number = array.dtype.type(divisor)
    if math.frexp(number)[0] == _POWER_OF_TWO and 1 / _MODERATE < number < _MODERATE:
        np.multiply(array, 1 / number, out=array)
    else:
        np.divide(array, number, out=array)


def _all_of(outputs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return all(out.dtype == dtype for out in outputs)


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.dtype == right.dtype
