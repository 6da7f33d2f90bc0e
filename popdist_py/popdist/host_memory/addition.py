"""Adding rows of numbers, one from each rank, in the fixed order: by numpy, by torch, or in C.

The order is the binary tree of `popdist.tree` over the rank. An element's sum depends on nothing but that tree, so
its bits are the same for every length, for every share and block that it may fall into, and for every number of
threads. Pure.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from popdist.host_memory.flags import kind
from popdist.tree import Node, finish

CACHED_BYTES: Final = 1 << 19
"""Length of the blocks of all rows together: they fit a usual second-level cache of 1 MiB."""

LEAST_BYTES: Final = 1 << 16
"""Length of a block at least: of shorter ones the calls cost more than the additions."""

LINE_BYTES: Final = 64
"""Shares begin at multiples of it, so that no two ranks write into one line of cache."""


def node_additions(nodes: Sequence[Node], num_items: int) -> tuple[tuple[int, int], ...]:
    """Which rows to add, where row *i* is the sum of ``nodes[i]`` in the tree over so many items.

    Returns:
        ``(left, right)`` means that row ``left`` becomes the sum of both. The row of the leftmost node ends as the
        sum of all.

    Raises:
        ValueError: If the nodes do not cover each item once.
    """
    pairs: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        pairs.append((left, right))
        return left

    finish({node: row for row, node in enumerate(nodes)}, num_items, add)
    return tuple(pairs)


@cache
def additions(num_rows: int) -> tuple[tuple[int, int], ...]:
    """As :func:`node_additions`, of rows that are items themselves: row 0 ends as the sum.

    Raises:
        ValueError: If there is no row.
    """
    return node_additions([Node(0, row) for row in range(num_rows)], num_rows)


def share(num_elements: int, rank: int, size: int, element_bytes: int) -> range:
    """The elements that ``rank`` of ``size`` adds: equal shares but for the last ones, which may be empty."""
    unit = max(1, LINE_BYTES // element_bytes)
    width = -(-num_elements // (size * unit)) * unit
    return range(min(rank * width, num_elements), min((rank + 1) * width, num_elements))


def blocks(elements: range, element_bytes: int, num_rows: int) -> Iterator[slice]:
    """``elements`` in blocks, for as many rows."""
    width = max(CACHED_BYTES // num_rows, LEAST_BYTES) // LINE_BYTES * LINE_BYTES // element_bytes
    for start in range(elements.start, elements.stop, width):
        yield slice(start, min(start + width, elements.stop))


def extension() -> ModuleType | None:
    """The module; None where it was not built, for want of a compiler or for another interpreter."""
    try:
        return import_module("popdist.host_memory._quick")
    except ImportError:
        return None


def as_numbers(numbers: Iterable[int]) -> bytes:
    """Numbers from 0 to 2**64 - 1, such as addresses, as the extension reads them."""
    return array("Q", numbers).tobytes()


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


NUMS_ROWS: Final = (2, 4)
FUSED_DTYPES: Final = (torch.float32, torch.float64)


def fused_sum(
    rows: Sequence[Tensor], outputs: Sequence[Tensor], pairs: Sequence[tuple[int, int]], elements: range
) -> Callable[[float], None] | None:
    """What adds ``elements`` of flat rows of one dtype and length, into all of them, divided by what it is given.

    Args:
        rows: Which must outlive what is returned.
        outputs: Where the sum is wanted.
        pairs: In which order the rows are added.
        elements: A part of each row.

    Returns:
        None where the extension is missing, or makes no such sum.
    """
    dtype, found = rows[0].dtype, extension()
    is_usual = tuple(pairs) == additions(len(rows)) and _places(outputs) == _places(rows)
    if found is None or dtype not in FUSED_DTYPES or len(rows) not in NUMS_ROWS or not is_usual:
        return None
    starts = as_numbers(row.data_ptr() + elements.start * dtype.itemsize for row in rows)
    return partial(found.add_rows, starts, len(elements), dtype is torch.float64)


def _places(rows: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(row.data_ptr(), row.dtype) for row in rows]
