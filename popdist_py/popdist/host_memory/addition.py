"""Adding rows of numbers, one from each rank, in the fixed order: in C, by numpy or by torch, as one table says.

The order is the binary tree of `popdist.tree` over the rank. An element's sum depends on nothing but that tree, so
its bits are the same for every length, for every share and block that it may fall into, for every number of
threads, and for every path of `PATHS`. Pure.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from popdist import extensions
from popdist.host_memory.flags import kind
from popdist.tree import Node, finish

Op = Literal["sum", "mean", "min", "max", "product", "rounded sum"]
"""``rounded sum`` rounds each partial sum to the dtype of the rows; the others combine half dtypes in float32."""

OPS: Final[tuple[Op, ...]] = get_args(Op)

HALVES: Final = (torch.float16, torch.bfloat16)
"""Dtypes that are combined in float32, but in a rounded sum."""

ARRAY_DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
"""Dtypes that numpy has, and adds as torch does."""

DTYPES: Final = (*ARRAY_DTYPES[:2], *HALVES, *ARRAY_DTYPES[2:], torch.bool)
"""Dtypes that can be combined."""

KINDS: Final = {dtype: kind(str(dtype).removeprefix("torch.")) for dtype in DTYPES}

SLOT_DTYPES: Final = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What the extension adds in slots, in its order."""

Place = Literal["slot", "pieces", "rows", "outputs", "cast outputs"]
"""Where rows are added, which also tells how large they are.

``slot``: a tensor that fits the slots of its group, at one meeting. ``pieces``: a larger one, piece by piece in
the slots. ``rows``: rows of shared memory of any size, in the usual order, into each of them. ``outputs``: such
rows in any order into any others; ``cast outputs``: into others of another dtype.
"""

Path = Literal["C", "numpy", "torch"]


class _Rule(NamedTuple):
    """A rule of the table: the additions that take a path."""

    place: Place
    path: Path
    ops: Collection[Op]
    dtypes: Collection[torch.dtype]
    nums_rows: Collection[int]


_SUM: Final[tuple[Op, ...]] = ("sum",)
_SUM_OR_MEAN: Final[tuple[Op, ...]] = ("sum", "mean")
_ANY_NUMBER: Final = range(1 << 32)

PATHS: Final = (
    _Rule("slot", "C", _SUM, SLOT_DTYPES, range(2, 65)),
    _Rule("pieces", "numpy", _SUM, ARRAY_DTYPES, (2,)),
    _Rule("rows", "C", _SUM_OR_MEAN, (torch.float32, torch.float64), (2, 4)),
    _Rule("rows", "numpy", _SUM_OR_MEAN, ARRAY_DTYPES, _ANY_NUMBER),
    _Rule("outputs", "numpy", _SUM_OR_MEAN, ARRAY_DTYPES, _ANY_NUMBER),
)
"""The first rule that fits is taken; all else is done by torch.

C adds all rows in one pass, and needs no call of Python's for a tensor that fits a slot. numpy's functions are
called faster than torch's; torch knows all dtypes and operations.
"""


def path_of(place: Place, op: Op, dtype: torch.dtype, num_rows: int) -> Path:
    """The path of an addition; what is meant for C takes the next path where there is no extension."""
    for rule in PATHS:
        is_meant = rule.place == place and op in rule.ops and dtype in rule.dtypes and num_rows in rule.nums_rows
        if is_meant and (rule.path != "C" or extension() is not None):
            return rule.path
    return "torch"


extension: Final = partial(extensions.find, "popdist.host_memory._quick")
"""Gives the part of this folder that is written in C, or None."""


def as_numbers(numbers: Iterable[int]) -> bytes:
    """Numbers from 0 to 2**64 - 1, such as addresses, as the extension reads them."""
    return array("Q", numbers).tobytes()


CACHED_BYTES: Final = 1 << 19
"""Length of the blocks of all rows together: they fit a usual second-level cache of 1 MiB."""

LEAST_BYTES: Final = 1 << 16
"""Length of a block at least: of shorter ones the calls cost more than the additions."""

LINE_BYTES: Final = 64
"""Shares begin at multiples of it, so that no two ranks write into one line of cache."""


def node_additions(nodes: Sequence[Node], num_items: int) -> tuple[tuple[int, int], ...]:
    """The pairs of rows to add, where row *i* is the sum of ``nodes[i]`` in the tree over ``num_items``.

    Returns:
        ``(left, right)`` means that row ``left`` becomes the sum of both. The row of the leftmost node ends as the
        sum of all.
    """
    pairs: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        pairs.append((left, right))
        return left

    finish({node: row for row, node in enumerate(nodes)}, num_items, add)
    return tuple(pairs)


@cache
def additions(num_rows: int) -> tuple[tuple[int, int], ...]:
    """The pairs of rows to add, where the rows are the items of the tree: row 0 ends as the sum."""
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


Combine = Callable[..., Any]

_COMBINERS: Final[dict[Op, Combine]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "rounded sum": torch.add,
}


def combiner(op: Op, dtype: torch.dtype) -> Combine:
    """The function of two tensors and ``out=`` that combines them, or ValueError where there is none.

    Bools are added as "or" and multiplied as "and".
    """
    if op == "mean" and not dtype.is_floating_point:
        raise ValueError(f"a mean of {dtype} is no {dtype}")
    if dtype == torch.bool:
        return torch.logical_and if op in ("min", "product") else torch.logical_or
    return _COMBINERS[op]


def combine_in_place(combine: Combine, rows: Sequence[Any], pairs: Iterable[tuple[int, int]]) -> Any:  # noqa: ANN401 - tensors or arrays
    """Combine rows in the order of ``pairs``, in their own memory; the row that ends as the result."""
    for left, right in pairs:
        combine(rows[left], rows[right], out=rows[left])
    return rows[0]


def is_widened(op: Op, dtype: torch.dtype) -> bool:
    """Whether rows of ``dtype`` are combined in float32."""
    return dtype in HALVES and op != "rounded sum"


class Combiner:
    """Combines rows of one dtype.

    Args:
        op: How; "mean" divides the sum by the number of rows.
        dtype: The dtype of rows and result.
        num_rows: Rows to combine, at least 2.
    """

    def __init__(self, op: Op, dtype: torch.dtype, num_rows: int) -> None:
        self.plain = combiner(op, dtype)
        self._pairs = additions(num_rows)
        self._divisor = num_rows if op == "mean" else None
        self._is_half = is_widened(op, dtype)
        self._num_held = num_rows if self._is_half else len(self._pairs[:-1])
        self._dtype = torch.float32 if self._is_half else dtype
        self.is_plain = num_rows == len((0, 1)) and not self._is_half and self._divisor is None
        """Whether :attr:`plain`, called with both rows and ``out=``, is all there is to do."""

    def memory(self, shape: Sequence[int]) -> list[Tensor]:
        """The memory that :meth:`__call__` needs for rows of ``shape``."""
        return [torch.empty(shape, dtype=self._dtype) for _ in range(self._num_held)]

    def __call__(self, rows: Sequence[Tensor], out: Tensor, memory: Sequence[Tensor]) -> None:
        """Combine ``rows`` of one shape into ``out``, which may be one of them."""
        combine, values = self.plain, list(rows)
        if self._is_half:
            values = [held.copy_(row) for held, row in zip(memory, rows, strict=True)]
            total = combine_in_place(combine, values, self._pairs)
            if self._divisor is not None:
                total.div_(self._divisor)
            out.copy_(total)
            return
        *inner, (first, last) = self._pairs
        for (left, right), held in zip(inner, memory, strict=True):
            values[left] = combine(values[left], values[right], out=held)
        combine(values[first], values[last], out=out)
        if self._divisor is not None:
            out.div_(self._divisor)
