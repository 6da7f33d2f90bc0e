"""Dealing an epoch's positions to replicas: exact, the same for every split, and resumable."""

from collections import Counter
from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from popdist.data.epoch import EpochPlan
from popdist.layout import part, parts

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
