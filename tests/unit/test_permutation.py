"""The shuffle without memory: a bijection, the same everywhere, and even enough to train with."""

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.data.epoch import MAX_LENGTH, Permutation


def _whole(length: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    order: list[int] = Permutation(length, seed=seed, epoch=epoch).indices(np.arange(length)).tolist()
    return order


@given(length=st.integers(0, 3000), seed=st.integers(), epoch=st.integers(0, 2**70))
def test_every_index_has_one_position(length: int, seed: int, epoch: int) -> None:
    """It is a bijection on the range, for any length, seed and epoch."""
    assert sorted(_whole(length, seed=seed, epoch=epoch)) == list(range(length))


@given(length=st.integers(10**12, MAX_LENGTH), start=st.integers(0, 10**12 - 1000))
def test_large_ranges_stay_in_range_and_distinct(length: int, start: int) -> None:
    """Indices of 10^12 samples and more are looked up without being made."""
    found = Permutation(length, seed=3, epoch=1).indices(np.arange(start, start + 1000))

    assert found.min() >= 0
    assert found.max() < length
    assert len(np.unique(found)) == 1000


def test_a_part_is_that_part_of_the_whole() -> None:
    """What stands at a position depends on the position alone, in any shape and order of asking."""
    positions = np.array([[7, 3], [99, 0]])

    found = Permutation(100, seed=5, epoch=2).indices(positions)

    whole = _whole(100, seed=5, epoch=2)
    assert found.tolist() == [[whole[7], whole[3]], [whole[99], whole[0]]]


def test_a_seed_means_the_same_order_for_ever() -> None:
    """Checkpoints remember a seed and a position, so the order behind them must not change."""
    assert _whole(10, seed=0, epoch=0) == [7, 0, 3, 4, 5, 6, 9, 1, 2, 8]
    assert Permutation(10**12, seed=7, epoch=3).indices(np.arange(3)).tolist() == [
        406531211361,
        34465205089,
        642930416683,
    ]


def test_seeds_and_epochs_give_other_orders() -> None:
    """Neighbouring seeds and epochs have nothing in common."""
    orders = [_whole(50, seed=seed, epoch=epoch) for seed in range(-3, 4) for epoch in range(7)]

    assert len({tuple(order) for order in orders}) == len(orders)


def test_all_orders_of_five_are_equally_frequent() -> None:
    """Chi-square over 2400 epochs and 120 orders stays below its 99.9 % bound."""
    found = Counter(tuple(_whole(5, seed=1, epoch=epoch)) for epoch in range(2400))

    expected = 2400 / factorial(5)
    assert len(found) == factorial(5)
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 172.4


@pytest.mark.parametrize(("length", "bound"), [(7, 67.98), (10, 126.1), (33, 1168.5)])
def test_every_index_is_equally_frequent_at_every_position(length: int, bound: float) -> None:
    """Chi-square over (position, index) stays below its 99.9 % bound for (length - 1)^2 degrees of freedom."""
    counts = np.zeros((length, length))
    for epoch in range(1500):
        counts[np.arange(length), _whole(length, epoch=epoch)] += 1

    expected = 1500 / length
    assert ((counts - expected) ** 2 / expected).sum() < bound


def test_neighbours_are_torn_apart() -> None:
    """Positions and indices are uncorrelated, and few neighbours stay together."""
    order = np.array(_whole(100_000))

    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.01
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 15


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_is_refused(position: int) -> None:
    """There is no index beyond the ends."""
    with pytest.raises(IndexError, match="10"):
        Permutation(10, seed=0, epoch=0).indices(np.array([position]))


@pytest.mark.parametrize("length", [-1, MAX_LENGTH + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    """Indices are signed 64-bit integers."""
    with pytest.raises(ValueError, match=r"2\*\*63"):
        Permutation(length, seed=0, epoch=0)
