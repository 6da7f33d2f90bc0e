"""In which order the ranks' numbers are added, and how many of them at a time.

The order is the binary tree of `popdist.tree` over the rank. An element's sum depends on nothing but that tree, so
its bits are the same for every length, for every share and block that it may fall into, and for every number of
threads. Pure.
"""

from collections.abc import Iterator
from functools import cache
from typing import Final

from popdist.tree import tree_sum

CACHED_BYTES: Final = 1 << 19
"""Length of the blocks of all rows together: they fit a usual second-level cache of 1 MiB."""

LEAST_BYTES: Final = 1 << 16
"""Length of a block at least: of shorter ones the calls cost more than the additions."""

LINE_BYTES: Final = 64
"""Shares begin at multiples of it, so that no two ranks write into one line of cache."""


@cache
def additions(n: int) -> tuple[tuple[int, int], ...]:
    """Which rows to add: ``(left, right)`` means that row ``left`` becomes the sum of both. Row 0 ends as the sum.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    pairs: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        pairs.append((left, right))
        return left

    tree_sum(range(n), add)
    return tuple(pairs)


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
