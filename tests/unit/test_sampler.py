"""The sampler of an instance: exact epochs, the same samples for a replica in any split, resuming anywhere.

Holds popdist.data.epoch and popdist.data.sampler.
"""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from popdist.data.sampler import ReplicaSampler
from popdist.errors import DatasetError
from popdist.ground.layout import part
from tests.instances import instance, on_instances

SPLITS = st.sampled_from([(1, 1), (1, 6), (2, 6), (3, 6), (6, 6), (4, 8), (1, 8), (5, 5)])
"""Instances and replicas."""
SMALL = st.integers(1, 4)
LENGTHS = st.integers(8, 120)


def _samplers(
    split: tuple[int, int],
    length: int,
    *arguments: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> list[ReplicaSampler]:
    """The sampler of every instance of a job."""
    return on_instances(
        split, lambda: ReplicaSampler(length, *arguments, shuffle=shuffle, seed=seed, drop_last=drop_last)
    )


def _steps(samplers: list[ReplicaSampler], num_steps: int | None = None) -> list[list[list[int]]]:
    """For each step, the batch of every instance, up to ``num_steps`` of the epoch."""
    return [list(step) for step in islice(zip(*samplers, strict=True), num_steps)]


def _seen(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


@given(split=SPLITS, length=LENGTHS, micro=SMALL, accumulation=SMALL, shuffle=st.booleans())
def test_every_index_comes_exactly_once(
    split: tuple[int, int], length: int, micro: int, accumulation: int, *, shuffle: bool
) -> None:
    """Over all instances an epoch is the dataset, and no batch is empty, whatever the sizes."""
    samplers = _samplers(split, length, micro, accumulation, shuffle=shuffle)

    steps = _steps(samplers)

    assert sorted(_seen(steps)) == list(range(length))
    assert all(batch for step in steps for batch in step)
    assert {len(steps)} == {len(sampler) for sampler in samplers}


@given(split=SPLITS, length=LENGTHS, micro=SMALL, accumulation=SMALL)
def test_drop_last_leaves_full_steps_only(
    split: tuple[int, int], length: int, micro: int, accumulation: int
) -> None:
    """Each index at most once, in full batches, and less than a step left out; no step at all is an error."""
    full = micro * accumulation * split[1]
    if length < full:
        with pytest.raises(DatasetError, match=f"leaves nothing of {length} samples: a step takes {full} "):
            _samplers(split, length, micro, accumulation, drop_last=True)
        return
    samplers = _samplers(split, length, micro, accumulation, drop_last=True)

    steps = _steps(samplers)

    assert {len(batch) for step in steps for batch in step} <= {full // split[0]}
    assert len(set(_seen(steps))) == len(_seen(steps)) == length // full * full


@given(length=LENGTHS, micro=SMALL, accumulation=SMALL, seed=st.integers(0, 9))
def test_a_replica_sees_the_same_whatever_the_split(length: int, micro: int, accumulation: int, seed: int) -> None:
    """Eight replicas in 1, 2, 4 and 8 instances: each has the same samples in each step."""

    def per_replica(num_instances: int) -> list[list[list[int]]]:
        local = 8 // num_instances
        steps = _steps(_samplers((num_instances, 8), length, micro, accumulation, seed=seed))
        return [
            [
                [batch[i] for i in part(range(len(batch)), replica, local)]
                for batch in step
                for replica in range(local)
            ]
            for step in steps
        ]

    assert per_replica(1) == per_replica(2) == per_replica(4) == per_replica(8)


def test_each_iteration_is_the_next_epoch() -> None:
    """Also after one that was broken off; without shuffle every epoch is the dataset's order."""
    (sampler,) = _samplers((1, 1), 30, 30)
    (other,) = _samplers((1, 1), 30, 30)
    (plain,) = _samplers((1, 1), 30, 7, shuffle=False)

    epochs = [next(iter(sampler)) for _ in range(3)]
    next(iter(other))
    next(iter(other))

    assert len(set(map(tuple, epochs))) == 3
    assert list(other) == [epochs[2]]
    assert [sum(plain, []) for _ in range(2)] == [list(range(30))] * 2  # noqa: RUF017 - two short lists


def test_what_was_loaded_stands_until_the_next_iteration() -> None:
    """An iteration that is still being read says nothing of the place that was loaded, or set, meanwhile."""
    (sampler,) = _samplers((1, 1), 30, 10)
    epochs = [list(sampler) for _ in range(4)]
    sampler.set_epoch(0)
    steps = iter(sampler)
    next(steps)
    state = sampler.state_dict()
    next(steps)
    sampler.load_state_dict(state)
    list(steps)
    assert list(sampler) == epochs[0][1:]

    steps = iter(sampler)
    next(steps)
    sampler.set_epoch(3)
    list(steps)
    assert list(sampler) == epochs[3]


def test_set_epoch_jumps() -> None:
    """It chooses the next epoch, restarts one that is running, and keeps the place in one that was loaded."""
    (sampler,) = _samplers((1, 1), 30, 10)
    epochs = [list(sampler) for _ in range(4)]

    sampler.set_epoch(2)
    assert list(sampler) == epochs[2]
    sampler.set_epoch(1)
    next(iter(sampler))
    state = sampler.state_dict()
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1][1:]


def test_it_feeds_a_data_loader() -> None:
    """As torch's batch sampler: batches, length, and epochs in order."""
    data = TensorDataset(torch.arange(10))
    (sampler,) = _samplers((1, 1), 10, 4, shuffle=False)

    loader = DataLoader(data, batch_sampler=sampler)

    assert len(loader) == 3
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_dataset_stands_for_its_length() -> None:
    """Anything with a length will do."""
    assert len(ReplicaSampler([1, 2, 3], 2)) == 2


def _short() -> object:
    with instance(0, 2, 4):
        return ReplicaSampler(3, 1)


def _without_length() -> object:
    return ReplicaSampler(iter([1, 2]), 1)  # type: ignore[arg-type] # the mistake under test


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_short, r"3 samples is shorter than the job's 4 replicas.*--num-replicas 3"),
        (_without_length, "has no length"),
        (lambda: ReplicaSampler(9, 0), "micro_batch_size=0 must be a whole number of at least 1"),
        (lambda: ReplicaSampler(9, 1, -1), "accumulation=-1"),
    ],
)
def test_what_cannot_be_dealt_is_refused(make: Callable[[], object], message: str) -> None:
    """The error says what was asked and what is wrong with it."""
    with pytest.raises(DatasetError, match=message):
        make()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"length": 31}, r"'length': 31.*'length': 30"),
        ({"seed": 1}, r"'seed': 1.*'seed': 0"),
        ({"shuffle": False}, r"'shuffle': False.*'shuffle': True"),
        ({"position": 31}, "no state of a ReplicaSampler"),
        ({"other": 0}, "no state of a ReplicaSampler"),
    ],
)
def test_the_state_of_another_order_is_refused(state: dict[str, int], message: str) -> None:
    """The message names both."""
    (sampler,) = _samplers((1, 1), 30, 10)

    with pytest.raises(DatasetError, match=message):
        sampler.load_state_dict(sampler.state_dict() | state)
