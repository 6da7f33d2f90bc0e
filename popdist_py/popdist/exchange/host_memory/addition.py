"""Addition of rows of numbers, one row from each rank, in the order of the tree of `popdist.ground.tree`.

An element's sum depends only on the tree. So its bits are equal for every length, share, block and number of
threads, and in C and torch. A :class:`Reduction` combines rows of shared memory in place: each rank combines a
share of the elements, in blocks that fit its cache.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from popdist.exchange.host_memory.barriers import Barriers, kind, operation, purpose
from popdist.ground import extension
from popdist.ground.tree import Node, finish

Op = Literal["sum", "mean", "min", "max", "product", "rounded sum"]
"""The operations of a reduction; ``rounded sum`` rounds partial sums, others combine half dtypes in float32."""

OPS: Final[tuple[Op, ...]] = get_args(Op)

HALVES: Final = (torch.float16, torch.bfloat16)
"""The 16-bit dtypes of floats, whose elements are combined in float32, except in a rounded sum."""

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
"""The dtypes whose elements collectives in shared memory can combine."""

KINDS: Final = {dtype: kind(str(dtype).removeprefix("torch.")) for dtype in DTYPES}

CACHED_BYTES: Final = 1 << 19
"""Number of bytes, over all rows together, of a block that is combined at once and fits a cache of 1 MiB."""

LEAST_BYTES: Final = 1 << 16
"""Minimum number of bytes of a row's block, because calls for shorter blocks take longer than the additions."""

LINE_BYTES: Final = 64
"""Number of bytes of a cache line; ranks' shares begin at multiples, so that no two ranks write to one line."""


def node_additions(nodes: Sequence[Node], num_items: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (left, right) of indices of ``nodes``, partial sums, in the order of their additions."""
    pairs: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        pairs.append((left, right))
        return left

    finish({node: row for row, node in enumerate(nodes)}, num_items, add)
    return tuple(pairs)


@cache
def additions(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (left, right) of rows in the order of their additions, after which row 0 is the sum."""
    return node_additions([Node(0, row) for row in range(num_rows)], num_rows)


def share(num_elements: int, rank: int, size: int, element_bytes: int) -> range:
    """Return the indices, below ``num_elements``, of the elements that rank ``rank`` adds; may be empty."""
    unit = max(1, LINE_BYTES // element_bytes)
    width = -(-num_elements // (size * unit)) * unit
    return range(min(rank * width, num_elements), min((rank + 1) * width, num_elements))


def blocks(elements: range, element_bytes: int, num_rows: int) -> Iterator[slice]:
    """Yield the range ``elements`` in slices; ``num_rows`` rows of one slice together fit the CPU's cache."""
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
    """Return torch's function that combines tensors by ``op``; raise ValueError for a mean of integers."""
    if op == "mean" and not dtype.is_floating_point:
        raise ValueError(f"a mean of {dtype} is no {dtype}")
    if dtype == torch.bool:  # sum means "or", product means "and"
        return torch.logical_and if op in ("min", "product") else torch.logical_or
    return _COMBINERS[op]


def combine_in_place(combine: Combine, rows: Sequence[Tensor], pairs: Iterable[tuple[int, int]]) -> Tensor:
    """Combine the tensors ``rows`` in place, pair by pair, as ``pairs`` says; return the row with the result."""
    for left, right in pairs:
        combine(rows[left], rows[right], out=rows[left])
    return rows[0]


def is_widened(op: Op, dtype: torch.dtype) -> bool:
    """Whether ``op`` combines tensors of ``dtype`` in float32."""
    return dtype in HALVES and op != "rounded sum"


def sum_of(dtype: torch.dtype) -> Op:
    """Return the operation that adds gradients of ``dtype``: ``rounded sum`` for half dtypes, else ``sum``."""
    return "rounded sum" if dtype in HALVES else "sum"


class Combiner:
    """A function that combines tensors (rows) of one dtype; "mean" divides the sum by the number of rows."""

    def __init__(self, op: Op, dtype: torch.dtype, num_rows: int) -> None:
        self._combine = combiner(op, dtype)
        self._pairs = additions(num_rows)
        self._divisor = num_rows if op == "mean" else None
        self._is_half = is_widened(op, dtype)
        self._num_held = num_rows if self._is_half else len(self._pairs[:-1])
        self._dtype = torch.float32 if self._is_half else dtype

    def memory(self, shape: Sequence[int]) -> list[Tensor]:
        """Return new scratch tensors, which a call of this object needs to combine rows of ``shape``."""
        return [torch.empty(shape, dtype=self._dtype, device="cpu") for _ in range(self._num_held)]

    def __call__(self, rows: Sequence[Tensor], out: Tensor, memory: Sequence[Tensor]) -> None:
        """Combine ``rows``, all of one shape, into ``out``, which may be a row; ``memory`` is scratch memory."""
        combine, values = self._combine, list(rows)
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


_REDUCE: Final = {op: operation(f"reduction in place ({op})") for op in OPS}


class Reduction:
    """A reduction of several ranks' tensors in shared memory, in place; prepared once, and run repeatedly."""

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
        self._combine_share: Callable[[float], None] = (
            _in_one_pass(rows, elements)
            if _can_add_in_one_pass(rows, op, outputs, order)
            else _BlockByBlock(op, rows, outputs, order, elements)
        )

    def run(self, timeout_seconds: float | None = None, *, over: float = 1) -> None:
        """Combine the rows of all ranks, and divide a sum of floats by ``over``. All ranks must call this method,
        with the same ``over``.
        """
        self._barriers.wait(self._purpose, timeout_seconds)
        self._combine_share(over if self._divisor is None else self._divisor)
        self._barriers.wait(self._purpose, timeout_seconds)

    def finish(self, reason: int) -> None:
        """Combine the rows, which all ranks have written before a barrier; then wait at a second barrier."""
        self._combine_share(self._divisor or 1)
        self._barriers.wait(reason)


def _can_add_in_one_pass(
    rows: Sequence[Tensor], op: Op, outputs: Sequence[Tensor], order: Sequence[tuple[int, int]]
) -> bool:
    """Whether the C extension can add ``rows`` in one pass: two or four rows of float32 or float64, added
    in the order of :func:`additions`, if the results replace the rows.
    """
    is_sum = op in ("sum", "mean") and rows[0].dtype in (torch.float32, torch.float64)
    is_into_rows = [(row.data_ptr(), row.dtype) for row in outputs] == [
        (row.data_ptr(), row.dtype) for row in rows
    ]
    is_usual = len(rows) in (2, 4) and order == additions(len(rows))
    return is_sum and is_into_rows and is_usual and extension.find() is not None


def _in_one_pass(rows: Sequence[Tensor], elements: range) -> Callable[[float], None]:
    """Return C's ``f(divisor)``, which replaces ``rows`` by their sum / divisor; ``rows`` must outlive ``f``."""
    dtype = rows[0].dtype
    starts = array("Q", [row.data_ptr() + elements.start * dtype.itemsize for row in rows]).tobytes()
    c_extension: Any = extension.find()
    return partial(c_extension.add_rows, starts, len(elements), dtype is torch.float64)


class _BlockByBlock:
    """A function that combines this rank's part of the elements of all rows with torch, block by block."""

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
        result = (rows[0].data_ptr(), dtype)
        targets = [out for out in outputs if is_half or (out.data_ptr(), out.dtype) != result]
        self._blocks = [([row[piece] for row in rows], [out[piece] for out in targets]) for piece in pieces]
        self._order = order
        self._combine = combiner(op, dtype)
        longest = max((piece.stop - piece.start for piece in pieces), default=0)
        self._wide = [torch.empty(longest, dtype=torch.float32, device="cpu") for _ in rows] if is_half else None

    def __call__(self, divisor: float) -> None:
        """Combine this rank's part of the elements, and divide each result by ``divisor``."""
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
