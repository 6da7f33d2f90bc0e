"""Numbers in range notation, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.text.ranges import fold_numbers, parse_numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        (range(0), ""),
        ((5,), "5"),
        (range(5, 6), "5"),
        ((0, 1, 2, 3, 6), "0-3,6"),
        ((0, 2, 4), "0,2,4"),
        (range(65_536), "0-65535"),
    ],
)
def test_fold_numbers(numbers: tuple[int, ...] | range, text: str) -> None:
    """Neighbours become a range."""
    assert fold_numbers(numbers) == text


@given(st.sets(st.integers(0, 10_000), max_size=50).map(sorted))
def test_folded_numbers_read_back(numbers: list[int]) -> None:
    """parse_numbers is the inverse of fold_numbers."""
    assert parse_numbers(fold_numbers(numbers)) == tuple(numbers)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "1,", ",1", "3-1", "2,1", "1,1", "0-99999999", "1 2"])
def test_what_is_refused(text: str) -> None:
    """Text that is no list of ascending ranges, or stands for more numbers than a machine has cores."""
    with pytest.raises(ValueError, match=r"no list|ascend|more than"):
        parse_numbers(text)
