"""Sums in the order of `popdist.ground.tree`, to compare with."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from popdist.ground.tree import TreeSum

T = TypeVar("T")


def tree_sum(items: Iterable[T], add: Callable[[T, T], T]) -> T:
    """The sum of ``items`` in tree order; a single item comes back as it is."""
    values = list(items)
    total = TreeSum(len(values), add)
    for value in values:
        total.push(value)
    return total.total
