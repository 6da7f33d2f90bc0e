"""The shuffle without memory: a bijection, the same everywhere, and even enough to train with."""

from collections import Counter
from itertools import chain
from math import factorial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from popdist.data.epoch import MAX_LENGTH, EpochPlan, Permutation
from popdist.ground.layout import part, parts


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


SMALL = st.integers(1, 5)
SPLITS = st.sampled_from([(1, 1), (1, 6), (2, 3), (3, 2), (6, 1), (4, 2)])
"""Instances and replicas of each."""


@st.composite
def plans(draw: st.DrawFn) -> EpochPlan:
    """A dataset that is long enough for its replicas."""
    num_replicas = draw(st.integers(1, 9))
    return EpochPlan(
        length=draw(st.integers(num_replicas, 200)),
        num_replicas=num_replicas,
        samples_per_replica=draw(SMALL),
        drop_last=draw(st.booleans()),
    )


@given(size=st.integers(0, 50), num_parts=st.integers(1, 12))
def test_parts_are_those_of_tensor_split(size: int, num_parts: int) -> None:
    """Dealing is what torch calls tensor_split."""
    expected = [list(rows) for rows in torch.arange(size).tensor_split(num_parts)]

    assert [list(part(range(size), index, num_parts)) for index in range(num_parts)] == expected


@given(size=st.integers(0, 50), split=SPLITS)
def test_dealing_composes(size: int, split: tuple[int, int]) -> None:
    """A replica gets the same from the whole step as from its instance's share of it."""
    num_instances, num_local = split
    num_replicas = num_instances * num_local
    row = range(100, 100 + size)

    for instance in range(num_instances):
        share = parts(row, range(instance * num_local, (instance + 1) * num_local), num_replicas)
        for local in range(num_local):
            assert part(share, local, num_local) == part(row, instance * num_local + local, num_replicas)


@given(plans())
def test_steps_cover_the_epoch_once(plan: EpochPlan) -> None:
    """Steps follow each other without gap; what drop_last leaves out is less than a full step."""
    seen = list(chain.from_iterable(plan.steps()))

    assert seen == list(range(len(seen)))
    assert len(list(plan.steps())) == plan.num_steps()
    left_out = plan.length - len(seen)
    assert 0 <= left_out < plan.samples_per_step if plan.drop_last else left_out == 0


@given(plans())
def test_every_replica_has_a_sample_in_every_step(plan: EpochPlan) -> None:
    """Steps are full but the last two, and none has fewer samples than replicas."""
    sizes = [len(step) for step in plan.steps()]

    assert all(size == plan.samples_per_step for size in sizes[:-2])
    assert all(size >= plan.num_replicas for size in sizes)
    if plan.samples_per_replica > 1:
        assert all(size <= plan.samples_per_step for size in sizes)
    else:
        assert all(size < 2 * plan.num_replicas for size in sizes)


@given(plans(), SMALL)
def test_the_rest_of_an_epoch_has_the_steps_it_had(plan: EpochPlan, num_done: int) -> None:
    """Resuming with the same replicas goes on as if nothing had happened."""
    steps = list(plan.steps())
    done = min(num_done, len(steps))
    position = steps[done - 1].stop if done else 0

    assert list(plan.steps(position)) == steps[done:]
    assert plan.num_steps(position) == len(steps) - done


@given(plans(), plans(), SMALL)
def test_the_rest_of_an_epoch_is_dealt_to_other_replicas(
    first: EpochPlan, other: EpochPlan, num_done: int
) -> None:
    """Resuming with other replicas sees each remaining position once."""
    second = EpochPlan(
        length=first.length, num_replicas=other.num_replicas, samples_per_replica=other.samples_per_replica
    )
    done = list(first.steps())[:num_done]
    position = done[-1].stop if done else 0

    rest = list(second.steps(position))

    assert list(chain.from_iterable([*done, *rest])) == list(range(first.length))
    assert len(rest) == second.num_steps(position)


@given(plans())
def test_each_position_belongs_to_one_replica(plan: EpochPlan) -> None:
    """The replicas of a step share it out, evenly but for one sample."""
    for step in plan.steps():
        shares = [plan.positions_of(range(index, index + 1), step) for index in range(plan.num_replicas)]

        assert Counter(chain.from_iterable(shares)) == Counter(step)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
