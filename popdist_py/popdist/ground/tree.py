"""The order in which popdist adds: a binary tree over positions, equal for any number of instances.

Level 0 of the tree has the items. Each next level has the sums of the pairs (2i, 2i + 1) of the level below; a
last item without a partner moves up unchanged. A process that owns the block ``[start, stop)`` adds whole subtrees
of the block, its *aligned nodes*. The processes exchange these nodes and finish the same tree, so that every
process gets bitwise equal sums for any number of instances.
"""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Node(NamedTuple):
    """A node of the tree of additions over the items 0 to n - 1: the sum of the items with the numbers
    ``index * 2**level`` to ``(index + 1) * 2**level - 1``, or to n - 1 if n - 1 is smaller.
    """

    level: int  # 0 for an item itself, ``height(n)`` for the sum of all items
    index: int  # type: ignore[assignment] # position in the level; replaces tuple.index(), which no caller uses


def height(n: int) -> int:
    """Return the level of the tree's root over ``n`` items, ``ceil(log2(n))``. Raises ValueError if ``n < 1``."""
    if n < 1:
        raise ValueError(f"a tree needs at least one item, not {n}")
    return (n - 1).bit_length()


def span(node: Node, n: int) -> range:
    """Return the range of items whose sum is ``node`` in the tree of additions over ``n`` items; may be empty."""
    return range(min(node.index << node.level, n), min((node.index + 1) << node.level, n))


def aligned_nodes(start: int, stop: int, n: int) -> list[Node]:
    """Return the fewest nodes of the tree of additions over ``n`` items, left to right, whose sums together have
    exactly the items from number ``start`` up to number ``stop - 1``.
    """
    top = height(n)
    if not 0 <= start <= stop <= n:
        raise ValueError(f"the block [{start}, {stop}) does not lie within the {n} items")
    nodes = []
    while start < stop:
        level = 0
        while level < top and start % (2 << level) == 0 and min(start + (2 << level), n) <= stop:
            level += 1
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


class TreeSum(Generic[T]):
    """A sum that adds items in the order of a binary tree, and keeps only the sums that cannot be added yet."""

    def __init__(self, n: int, add: Callable[[T, T], T], *, start: int = 0) -> None:
        self._height = height(n)
        if not 0 <= start <= n:
            raise ValueError(f"position {start} does not lie within the {n} items")
        self._n = n
        self._add = add  # called with the lower positions first; may change and return its first argument
        self._position = start
        self._held: list[tuple[tuple[int, int], T]] = []
        """The kept sums, with level and index: a `Node` would take longer to make than numbers take to add."""

    @property
    def position(self) -> int:
        """Position of the next item that is added to this sum; ``n`` after the last item."""
        return self._position

    @property
    def nodes(self) -> dict[Node, T]:
        """The kept sums, by node from left to right: the :func:`aligned_nodes` of all items pushed so far."""
        return {Node(*place): value for place, value in self._held}

    @property
    def values(self) -> list[T]:
        """The values of the kept sums, in the order of :attr:`nodes`."""
        return [value for _, value in self._held]

    @property
    def total(self) -> T:
        """The sum of all items. All ``n`` items, at least one, must have been pushed."""
        ((_, value),) = self._held
        return value

    def of_part(self, part: Callable[[T], S], add: Callable[[S, S], S]) -> "TreeSum[S]":
        """Return a new sum at the same position that keeps ``part(value)`` for each value that this sum keeps."""
        tree = TreeSum(self._n, add, start=self._position)
        tree._held = [(place, part(value)) for place, value in self._held]
        return tree

    def push(self, value: T) -> None:
        """Add ``value``, the item at :attr:`position`. Raises ValueError if all ``n`` items were pushed before."""
        self.push_sum(0, self._position, value)

    def push_sum(self, level: int, index: int, value: T) -> None:
        """Add ``value``, the sum of the node at ``level`` and ``index``, which must begin at :attr:`position`."""
        # no addition begins with zero, because 0.0 + -0.0 is 0.0 and a single item must keep its bits
        if self._position >= self._n:
            raise ValueError(f"expected no item at position {self._position} of {self._n}")
        self._position = min((index + 1) << level, self._n)
        while level < self._height:
            if index % 2:
                if not self._held or self._held[-1][0] != (level, index - 1):
                    break
                value = self._add(self._held.pop()[1], value)
            elif (index + 1) << level < self._n:
                break
            level, index = level + 1, index // 2
        self._held.append(((level, index), value))


def finish(nodes: Mapping[Node, T], n: int, add: Callable[[T, T], T]) -> T:
    """Return the sum of ``n`` items from ``nodes``. Raise ValueError unless each item is in exactly one node."""
    total = TreeSum(n, add)
    for node in sorted(nodes, key=lambda node: node.index << node.level):
        if node.index << node.level != total.position:
            raise ValueError(f"expected the item at position {total.position} of {n}, got {node}")
        total.push_sum(*node, nodes[node])
    if total.position != n:
        raise ValueError(f"the sum of the item at position {total.position} of {n} is missing")
    return total.total
