"""The order and the shares in which ranks add in shared memory."""

from hypothesis import given
from hypothesis import strategies as st

from popdist.exchange.host_memory.addition import LINE_BYTES, additions, blocks, share
from tests.tree_sums import tree_sum


@given(st.integers(1, 70))
def test_the_order_is_that_of_the_tree(n: int) -> None:
    """Adding row by row in place gives the very expression that `popdist.ground.tree` gives."""
    rows = [str(row) for row in range(n)]
    for left, right in additions(n):
        rows[left] = f"({rows[left]}+{rows[right]})"

    assert rows[0] == tree_sum(map(str, range(n)), lambda left, right: f"({left}+{right})")


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_shares_cover_every_element_once(num_elements: int, size: int, element_bytes: int) -> None:
    """In rank order, and no two shares meet within a line of cache."""
    shares = [share(num_elements, rank, size, element_bytes) for rank in range(size)]

    assert [element for it in shares for element in it] == list(range(num_elements))
    assert all(it.start * element_bytes % LINE_BYTES == 0 for it in shares if it)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]), st.integers(1, 100))
def test_blocks_cover_a_share_once(start: int, length: int, element_bytes: int, num_rows: int) -> None:
    """Without a gap, and none of them is empty."""
    pieces = list(blocks(range(start, start + length), element_bytes, num_rows))

    assert all(piece.start < piece.stop for piece in pieces)
    assert [piece.start for piece in pieces] == [start, *[piece.stop for piece in pieces]][: len(pieces)]
    assert sum(piece.stop - piece.start for piece in pieces) == length
