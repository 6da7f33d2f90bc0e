"""Combining rows of numbers, one from each rank, in the fixed order, into one row."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from popdist.host_memory.addition_order import additions
from popdist.host_memory.flags import kind

Op = Literal["sum", "mean", "min", "max", "product"]

HALVES: Final = (torch.float16, torch.bfloat16)
"""Dtypes that are combined in float32."""

NO_ARRAYS: Final = (*HALVES, torch.bool)
"""Dtypes that numpy lacks, or adds otherwise than torch."""

DTYPES: Final = (
    torch.float64,
    torch.float32,
    *HALVES,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Dtypes that can be combined."""

KINDS: Final = {dtype: kind(str(dtype).removeprefix("torch.")) for dtype in DTYPES}

Combine = Callable[..., Any]

_COMBINERS: Final[dict[Op, Combine]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def combiner(op: Op, dtype: torch.dtype) -> Combine:
    """The function of two tensors and ``out=`` that combines them; bools are added as "or", multiplied as "and".

    Raises:
        ValueError: If there is none.
    """
    if op == "mean" and not dtype.is_floating_point:
        raise ValueError(f"a mean of {dtype} is no {dtype}")
    if dtype == torch.bool:
        return torch.logical_and if op in ("min", "product") else torch.logical_or
    return _COMBINERS[op]


class Combiner:
    """Combines rows of one dtype.

    Args:
        op: How; "mean" divides the sum by the number of rows.
        dtype: Of rows and result.
        num_rows: Rows to combine, at least 2.

    Raises:
        ValueError: If there is no such operation on the dtype.
    """

    def __init__(self, op: Op, dtype: torch.dtype, num_rows: int) -> None:
        self.plain = combiner(op, dtype)
        self._pairs = additions(num_rows)
        self._divisor = num_rows if op == "mean" else None
        self._is_half = dtype in HALVES
        self._num_held = num_rows if self._is_half else len(self._pairs[:-1])
        self._dtype = torch.float32 if self._is_half else dtype
        self.is_plain = num_rows == len((0, 1)) and not self._is_half and self._divisor is None
        """Whether :attr:`plain`, called with both rows and ``out=``, is all there is to do."""

    def memory(self, shape: Sequence[int]) -> list[Tensor]:
        """What :meth:`__call__` needs for rows of ``shape``."""
        return [torch.empty(shape, dtype=self._dtype) for _ in range(self._num_held)]

    def __call__(self, rows: Sequence[Tensor], out: Tensor, memory: Sequence[Tensor]) -> None:
        """Combine ``rows`` of one shape into ``out``, which may be one of them."""
        combine, values = self.plain, list(rows)
        if self._is_half:
            values = [held.copy_(row) for held, row in zip(memory, rows, strict=True)]
            for left, right in self._pairs:
                combine(values[left], values[right], out=values[left])
            if self._divisor is not None:
                values[0].div_(self._divisor)
            out.copy_(values[0])
            return
        *inner, (first, last) = self._pairs
        for (left, right), held in zip(inner, memory, strict=True):
            values[left] = combine(values[left], values[right], out=held)
        combine(values[first], values[last], out=out)
        if self._divisor is not None:
            out.div_(self._divisor)
