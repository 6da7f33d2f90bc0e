"""The order of additions belongs to the items' positions, never to how they are dealt to processes."""

import itertools
import math
import operator
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.tree import Node, TreeSum, aligned_nodes, finish, height, span
from popdist.step.training.norm_sync import tree_sum_of_values
from tests.tree_sums import tree_sum

FLOATS = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=70)


def bits(number: float) -> bytes:
    """The eight bytes of ``number``: -0.0 and 0.0 differ."""
    return struct.pack("d", number)


def level_by_level(items: list[float]) -> float:
    """The definition, word for word: pairs of a level become the next one, an odd one out passes up."""
    while len(items) > 1:
        items = [sum(items[first + 1 : first + 2], start=items[first]) for first in range(0, len(items), 2)]
    return items[0]


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Numbers, and the borders of a split of them into contiguous blocks, some of them empty."""
    items = draw(FLOATS)
    inner = draw(st.lists(st.integers(0, len(items)), max_size=6))
    return items, [0, *sorted(inner), len(items)]


@given(FLOATS)
def test_tree_sum_adds_level_by_level(items: list[float]) -> None:
    """tree_sum gives the bits of the definition."""
    assert bits(tree_sum(items, operator.add)) == bits(level_by_level(items))


@given(FLOATS)
def test_rows_are_added_in_the_same_tree(items: list[float]) -> None:
    """Those that batch norm groups exchange."""
    found = tree_sum_of_values(np.array(items)[:, None])
    assert bits(found[0]) == bits(level_by_level(items))


@given(splits())
def test_every_split_gives_the_same_bits(case: tuple[list[float], list[int]]) -> None:
    """Blocks that add up their aligned nodes and finish the same tree have the bits of one block, any n."""
    items, borders = case
    exchanged: dict[Node, float] = {}
    for start, stop in itertools.pairwise(borders):
        block = TreeSum(len(items), operator.add, start=start)
        for item in items[start:stop]:
            block.push(item)
        assert list(block.nodes) == aligned_nodes(start, stop, len(items))
        exchanged |= block.nodes

    assert bits(finish(exchanged, len(items), operator.add)) == bits(tree_sum(items, operator.add))


@given(FLOATS, st.data())
def test_a_part_can_go_on_by_itself(items: list[float], data: st.DataObject) -> None:
    """Begun anywhere and left anywhere, the sum of parts has the bits of the whole, which stays as it is."""
    start = data.draw(st.integers(0, len(items) - 1))
    whole = TreeSum(len(items), operator.add, start=start)
    for item in items[start : data.draw(st.integers(start, len(items) - 1))]:
        whole.push(item)
    before = whole.nodes
    part = whole.of_part(
        lambda value: (value, -value), lambda left, right: (left[0] + right[0], left[1] + right[1])
    )
    for item in items[whole.position :]:
        part.push((item, -item))
    assert whole.nodes == before
    for item in items[whole.position :]:
        whole.push(item)
    assert {node: bits(value) for node, (value, _) in part.nodes.items()} == {
        node: bits(value) for node, value in whole.nodes.items()
    }


@given(st.integers(1, 300), st.data())
def test_aligned_nodes_cover_the_block_once(n: int, data: st.DataObject) -> None:
    """Aligned nodes cover exactly their block, in order, with at most 2 ceil(log2(n)) nodes (one for n = 1)."""
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    nodes = aligned_nodes(start, stop, n)

    assert [item for node in nodes for item in span(node, n)] == list(range(start, stop))
    assert len(nodes) <= max(1, 2 * height(n))


@given(st.integers(1, 300))
def test_few_sums_are_held(n: int) -> None:
    """A whole pass never holds more than ceil(log2(n)) + 1 values, the one being added included."""
    total = TreeSum(n, operator.add)
    held = []
    for item in range(n):
        held.append(len(total.nodes) + 1)
        total.push(item)

    assert max(held) <= math.ceil(math.log2(n)) + 1
    assert total.nodes == {Node(height(n), 0): sum(range(n))}


def test_a_single_item_keeps_its_sign() -> None:
    """Nothing is added to a single item, so -0.0 stays -0.0; two of them add up to -0.0."""
    assert bits(tree_sum([-0.0], operator.add)) == bits(-0.0)
    assert bits(tree_sum([-0.0, -0.0], operator.add)) == bits(-0.0)


def test_sums_may_be_made_in_place() -> None:
    """An ``add`` that changes its left operand gives the same sum."""
    items = [[number] for number in range(1, 8)]

    def add(left: list[int], right: list[int]) -> list[int]:
        left[0] += right[0]
        return left

    assert tree_sum(items, add) == [28]


@given(st.integers(1, 70))
def test_the_lower_positions_are_added_first(n: int) -> None:
    """``add`` may change its left operand, and need not be commutative."""
    letters = [chr(ord("0") + position) for position in range(n)]

    assert tree_sum(letters, operator.add) == "".join(letters)


@pytest.mark.parametrize("nodes", [{Node(0, 0): 1}, {Node(0, 0): 1, Node(1, 0): 3}, {Node(0, 1): 2}, {}])
def test_a_sum_with_a_gap_or_an_overlap_is_refused(nodes: dict[Node, int]) -> None:
    """Nodes that do not cover each of the items exactly once are an error, not a wrong sum."""
    with pytest.raises(ValueError, match="position"):
        finish(nodes, 3, operator.add)


def test_impossible_trees_are_refused() -> None:
    """A tree has at least one item, a block lies within it, and no item comes after the last."""
    with pytest.raises(ValueError, match="at least one item"):
        tree_sum([], operator.add)
    with pytest.raises(ValueError, match=r"\[2, 5\)"):
        aligned_nodes(2, 5, 4)
    with pytest.raises(ValueError, match="position 3"):
        TreeSum(2, operator.add, start=3)
    full = TreeSum(1, operator.add)
    full.push(1)
    with pytest.raises(ValueError, match="position 1 of 1"):
        full.push(2)
