"""The one order in which popdist adds: a binary tree over positions, the same for every split.

Level 0 holds the items, each next level the sums of the pairs (2i, 2i + 1) below it, and an odd one out passes up
unchanged. A process that owns the block ``[start, stop)`` adds up whole subtrees of it, its *aligned nodes*;
exchanging those and finishing the same tree gives every process the same bits for every split.
"""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Node(NamedTuple):
    """A sum of the tree over n items: it covers ``[index * 2**level, (index + 1) * 2**level)``, cut at n."""

    level: int  # 0 for an item itself, ``height(n)`` for the sum of everything
    index: int  # type: ignore[assignment] # its position in the level; nobody asks a node for that of a value


def height(n: int) -> int:
    """Level of the root of the tree over ``n`` items: ``ceil(log2(n))``; raises ValueError if ``n`` is below 1."""
    if n < 1:
        raise ValueError(f"a tree needs at least one item, not {n}")
    return (n - 1).bit_length()


def span(node: Node, n: int) -> range:
    """Positions of the items that ``node`` covers in the tree over ``n`` items; empty when it lies past them."""
    return range(min(node.index << node.level, n), min((node.index + 1) << node.level, n))


def aligned_nodes(start: int, stop: int, n: int) -> list[Node]:
    """The fewest nodes that together cover items ``[start, stop)`` of ``n`` and nothing else, left to right."""
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
    """Adds items as they come, in tree order, and holds only the sums that cannot be added further yet."""

    def __init__(self, n: int, add: Callable[[T, T], T], *, start: int = 0) -> None:
        self._height = height(n)
        if not 0 <= start <= n:
            raise ValueError(f"position {start} does not lie within the {n} items")
        self._n = n
        self._add = add  # of the lower positions first; it may change and return its first value
        self._position = start
        self._held: list[tuple[tuple[int, int], T]] = []
        """Level and index of each sum, which is not yet a `Node`: to make one takes longer than to add numbers."""

    @property
    def position(self) -> int:
        """Position of the next item; ``n`` when all have come."""
        return self._position

    @property
    def nodes(self) -> dict[Node, T]:
        """The sums held, left to right: the values of :func:`aligned_nodes` of what was pushed so far."""
        return {Node(*place): value for place, value in self._held}

    @property
    def values(self) -> list[T]:
        """The values of :attr:`nodes`, in their order."""
        return [value for _, value in self._held]

    @property
    def total(self) -> T:
        """The sum of all items, at least one, which must all have been pushed."""
        ((_, value),) = self._held
        return value

    def of_part(self, part: Callable[[T], S], add: Callable[[S, S], S]) -> "TreeSum[S]":
        """A new sum, of a ``part`` of each item that this one has taken so far; this one does not change."""
        tree = TreeSum(self._n, add, start=self._position)
        tree._held = [(place, part(value)) for place, value in self._held]
        return tree

    def push(self, value: T) -> None:
        """Take the item at :attr:`position`; raises ValueError if all ``n`` items have come already."""
        self.push_sum(0, self._position, value)

    def push_sum(self, level: int, index: int, value: T) -> None:
        """Take the sum of a whole subtree, a node, whose first item is the one at :attr:`position`."""
        # no addition starts from zero: 0.0 + -0.0 is 0.0, and an item alone keeps its bits
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
    """The sum of all ``n`` items from nodes that cover each of them once; a ValueError if they do not."""
    total = TreeSum(n, add)
    for node in sorted(nodes, key=lambda node: node.index << node.level):
        if node.index << node.level != total.position:
            raise ValueError(f"expected the item at position {total.position} of {n}, got {node}")
        total.push_sum(*node, nodes[node])
    if total.position != n:
        raise ValueError(f"the sum of the item at position {total.position} of {n} is missing")
    return total.total
