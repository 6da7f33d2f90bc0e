"""Which ranks of a group may add in the memory of their host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.exchange.transport.hosts import ranks_of_each
from popdist.ground.tree import aligned_nodes


@pytest.mark.parametrize(
    ("machines", "num_local"),
    [
        ("a", 1),
        ("aaa", 3),
        ("aabb", 2),
        ("aabbcc", 2),
        ("aaabbb", 1),
        ("aab", 1),
        ("abab", 1),
        ("abba", 1),
        ("aabbaa", 1),
        ("ab", 1),
    ],
)
def test_hosts_that_make_up_nodes_share(machines: str, num_local: int) -> None:
    """All of one machine; or as many of each, in a row, a power of two."""
    assert ranks_of_each(list(machines)) == num_local


def test_an_unknown_machine_shares_with_nobody() -> None:
    """Two ranks that cannot say where they are may be far from each other."""
    assert ranks_of_each(["", ""]) == 1
    assert ranks_of_each(["a", "a", "", ""]) == 1


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=16))
def test_a_block_is_one_machine_and_one_node(machines: list[str]) -> None:
    """Whatever the ranks are dealt to."""
    num_local, size = ranks_of_each(machines), len(machines)
    for first in range(0, size, num_local):
        assert len(set(machines[first : first + num_local])) == 1
        assert len(aligned_nodes(first, first + num_local, size)) == 1
