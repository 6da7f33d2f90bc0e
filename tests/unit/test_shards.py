"""Every element belongs to one instance, all have about as many, and cuts lie where torch's loops may be cut."""

from hypothesis import given
from hypothesis import strategies as st

from popdist.gradients.shards import ALIGNMENT, deal_elements

SIZES = st.lists(st.integers(0, 2000), max_size=12)


@given(SIZES, st.integers(1, 9), st.data())
def test_each_element_has_one_owner(sizes: list[int], num_shares: int, data: st.DataObject) -> None:
    """The ranges of a parameter follow each other, in the order of the instances, from its start to its end."""
    may_cut = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))

    shares = deal_elements(sizes, num_shares, may_cut=may_cut)

    assert len(shares) == num_shares
    for position, (size, can_cut) in enumerate(zip(sizes, may_cut, strict=True)):
        ranges = [share[position] for share in shares]
        assert [index for it in ranges for index in it] == list(range(size))
        assert all(it.start % ALIGNMENT == 0 or it.start == size for it in ranges)
        assert can_cut or sum(map(bool, ranges)) <= 1


@given(SIZES, st.integers(1, 9))
def test_shares_are_about_equal(sizes: list[int], num_shares: int) -> None:
    """No share is longer or shorter than its part by more than what alignment takes."""
    shares = deal_elements(sizes, num_shares, may_cut=[True] * len(sizes))

    for share in shares:
        assert abs(sum(map(len, share)) - sum(sizes) / num_shares) <= ALIGNMENT + 1


def test_large_parameters_are_cut() -> None:
    """One that is larger than a share has several owners."""
    assert deal_elements([1000, 24], 2, may_cut=[True, True]) == [
        [range(512), range(0)],
        [range(512, 1000), range(24)],
    ]


def test_one_that_may_not_be_cut_goes_where_most_of_it_lies() -> None:
    """As a whole."""
    assert deal_elements([1000, 24], 2, may_cut=[False, True])[0] == [range(1000), range(0)]
