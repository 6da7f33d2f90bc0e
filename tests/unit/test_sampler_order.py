"""A loader in the order of a sampler: dealt by position, the same in any split, resumable in any other.

Holds popdist.data.sampler.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import popdist
from popdist.data.batch import Batch
from popdist.data.data_loader import data_loader
from popdist.data.replica_loader import ReplicaLoader
from tests.instances import on_instances

NUM_SAMPLES = 40
SPLITS = st.sampled_from([(1, 1), (1, 6), (2, 6), (3, 6), (4, 8), (5, 5)])
"""Instances and replicas."""
SMALL = st.integers(1, 4)


class Augmented(Dataset[Tensor]):
    """Samples that hold their index and what they drew."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), torch.rand(()).item()]  # noqa: S311 - what programs use
        return torch.tensor([index, *drawn], dtype=torch.float64)


class RepeatedAugmentation:
    """Each index three times in a row, in an order that follows from the epoch; it can divide by rank."""

    def __init__(self, num_replicas: int = 1, rank: int = 0) -> None:
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """As torch's DistributedSampler."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 3 * NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return (number for number in order.tolist() for _ in range(3))


class Drawn:
    """Gives what it draws from one of the process's generators, and has no length."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        return iter([self.draw() for _ in range(50)])


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler([float(i) for i in range(NUM_SAMPLES)], 55),
    "replacement": lambda: RandomSampler(range(NUM_SAMPLES), replacement=True, num_samples=61),
    "subset": lambda: SubsetRandomSampler(range(7, 32)),
    "repeated": RepeatedAugmentation,
    "distributed": lambda: DistributedSampler(range(NUM_SAMPLES), num_replicas=1, rank=0),  # type: ignore[arg-type] # any length
    "python": lambda: Drawn(lambda: random.randrange(NUM_SAMPLES)),  # noqa: S311 - what programs use
    "numpy": lambda: Drawn(lambda: np.random.randint(NUM_SAMPLES)),
    "tensors": lambda: Drawn(lambda: torch.randint(NUM_SAMPLES, ())),
}


def loaders(split: tuple[int, int], make: Callable[[], Any], *sizes: int, **options: Any) -> list[ReplicaLoader]:
    """The loader of every instance of a job, each with a sampler of its own."""
    return on_instances(split, lambda: data_loader(Augmented(), *sizes, sampler=make(), **options))


def steps(made: list[ReplicaLoader], count: int | None = None) -> list[list[Batch]]:
    """For each step, the batch of every instance, up to ``count`` of the epoch."""
    return [list(step) for step in itertools.islice(zip(*made, strict=True), count)]


def rows(found: list[list[Batch]]) -> list[list[float]]:
    """All samples, in the order of the sampler."""
    return [row for step in found for batch in step for content in batch for row in content.tolist()]


def per_replica(found: list[list[Batch]]) -> list[tuple[int, int, int, str]]:
    """The micro batches of all instances, one after the other."""
    micros = [m for step in found for batch in step for m in batch.micro_batches]
    return [(m.replica, m.step, m.num_samples, repr(m.content)) for m in micros]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replica_gets_the_same_in_any_split(name: str) -> None:
    """The whole order, position by position, with the same augmentation; another one in the next epoch."""
    jobs = [loaders((size, 6), SAMPLERS[name], 2, 2) for size in (1, 2, 3, 6)]
    torch.manual_seed(4)
    expected_draw = torch.rand(()).item()
    torch.manual_seed(4)

    first = [steps(job) for job in jobs]
    second = [steps(job) for job in jobs]

    assert torch.rand(()).item() == expected_draw
    assert all(per_replica(found) == per_replica(first[0]) for found in first)
    assert all(per_replica(found) == per_replica(second[0]) for found in second)
    assert rows(first[0]) != rows(second[0])
    for found in first:
        indices = [index for step in found for batch in step for index in batch.indices]
        assert indices == [int(row[0]) for row in rows(found)]
    (alone,) = loaders((1, 1), SAMPLERS[name], 4)
    assert rows(steps([alone])) == rows(first[0])


def test_an_index_that_comes_twice_draws_twice() -> None:
    """Repeated augmentation would else repeat the augmentation too."""
    (loader,) = loaders((1, 2), RepeatedAugmentation, 4)
    found = rows(steps([loader]))
    assert [row[0] for row in found] == [x for row in found[::3] for x in [row[0]] * 3]
    assert len({tuple(row) for row in found}) == 3 * NUM_SAMPLES


def test_rows_and_workers_follow_the_sampler() -> None:
    """Rows of tensors are taken at once; workers read ahead of the loop, in the same order."""
    kinds: list[dict[str, Any]] = [{}, {"num_workers": 2, "persistent_workers": True}]
    alone, ahead = (
        data_loader(Augmented(), 3, sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, 30), **options)
        for options in kinds
    )
    for _ in range(2):
        assert rows([[batch] for batch in alone]) == rows([[batch] for batch in ahead])
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    found = [x for batch in data_loader(data, 2, sampler=[3, 3, 39, 0, 5]) for (x,) in batch]
    assert torch.cat(found).tolist() == [3, 3, 39, 0, 5]


@settings(deadline=None, max_examples=20)
@given(
    name=st.sampled_from(sorted(SAMPLERS)),
    first=SPLITS,
    second=SPLITS,
    sizes=st.tuples(SMALL, SMALL, SMALL, SMALL),
    done=SMALL,
    epoch=st.integers(0, 2),
)
def test_resuming_loses_nothing_and_repeats_nothing(
    name: str,
    first: tuple[int, int],
    second: tuple[int, int],
    sizes: tuple[int, int, int, int],
    done: int,
    epoch: int,
) -> None:
    """Part of an epoch with some replicas and the rest with others is the epoch; what follows is the next one."""
    before, whole = loaders(first, SAMPLERS[name], *sizes[:2]), loaders((1, 1), SAMPLERS[name], 8)
    for loader in [*before, *whole]:
        loader.set_epoch(epoch)
    read = zip(*map(iter, before), strict=True)
    found = rows([list(step) for step in itertools.islice(read, min(done, len(before[0])))])
    states = [loader.state_dict() for loader in before]
    after = loaders(second, SAMPLERS[name], *sizes[2:])
    for loader in after:
        loader.load_state_dict(states[0])
        assert loader.state_dict() == states[0]

    assert all(state == states[0] for state in states)
    assert sorted(found + rows(steps(after))) == sorted(rows(steps(whole)))
    assert rows(steps(after)) == rows(steps(whole))


def test_a_generator_that_has_moved_on_is_not_resumed() -> None:
    """Its state is the program's: where it is given back, the epoch goes on, else the error says so."""

    def make(generator: torch.Generator) -> ReplicaLoader:
        return data_loader(Augmented(), 4, sampler=RandomSampler(range(NUM_SAMPLES), generator=generator))

    generator = torch.Generator().manual_seed(3)
    loader = make(generator)
    found = rows(steps([loader], 2))
    state = loader.state_dict()

    resumed = make(torch.Generator().manual_seed(3))
    resumed.load_state_dict(state)
    assert sorted(row[0] for row in found + rows(steps([resumed]))) == list(range(NUM_SAMPLES))
    resumed = make(generator)
    resumed.load_state_dict(state)
    with pytest.raises(
        popdist.DatasetError, match=r"indices of epoch 0 again of which 8 were read.*set_epoch\(1\)"
    ):
        iter(resumed)
    resumed.set_epoch(1)
    assert len(rows(steps([resumed]))) == NUM_SAMPLES


def test_the_state_names_the_sampler() -> None:
    """A position in the order of one means nothing in that of the dataset, and the reverse."""
    plain, sampled = data_loader(Augmented(), 4), data_loader(Augmented(), 4, sampler=range(9))
    assert sampled.state_dict()["sampler"] is True
    with pytest.raises(popdist.DatasetError, match=r"'length'.* is no state of a data_loader with a sampler"):
        sampled.load_state_dict(plain.state_dict())
    with pytest.raises(popdist.DatasetError, match=r"'sampler': True.* is no state of a data_loader,"):
        plain.load_state_dict(sampled.state_dict())


def test_the_length_is_that_of_the_sampler() -> None:
    """Before the first epoch what it says, and then what it gave."""
    loader = data_loader(Augmented(), 4, sampler=RepeatedAugmentation())
    assert len(loader) == len(list(loader)) == 30
    loader = data_loader(Augmented(), 4, sampler=Drawn(lambda: 1))
    with pytest.raises(TypeError, match="Drawn has no length, so its loader has none before its first epoch"):
        len(loader)
    assert len(list(loader)) == len(loader) == 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": range(9), "shuffle": True}, "sampler= with shuffle=True: .* leave shuffle out"),
        ({"sampler": range(9), "packing": object()}, "sampler= with packing="),
        ({"batch_sampler": [[1]]}, "batch_sampler: data_loader deals the samples itself"),
        ({"sampler": 3}, "sampler=3 cannot be iterated over"),
        ({"sampler": iter([1])}, "list_iterator is an iterator, which ends with its first epoch"),
        (
            {"sampler": RepeatedAugmentation(4)},
            r"by rank itself \(num_replicas=4\).* write RepeatedAugmentation\(\.\.\., num_replicas=1, rank=0\)",
        ),
        ({"sampler": [1, 40]}, "list gave 40 at position 1, and an index of this dataset is .* from 0 to 39"),
        ({"sampler": [-1]}, "list gave -1 at position 0"),
        ({"sampler": [2**70]}, "list gave 1180591620717411303424 at position 0"),
        ({"sampler": ["a"]}, "list gave 'a' at position 0"),
        (
            {"sampler": BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)},
            r"gave \[0, 1\] at position 0.*a sampler of batches",
        ),
        ({"sampler": []}, "list gave 0 indices in epoch 0, and the job needs at least 1: one for each replica"),
        ({"sampler": range(3), "drop_last": True}, "range gave 3 indices .* needs at least 4: a full step"),
    ],
)
def test_what_cannot_be_dealt_is_refused(options: dict[str, Any], message: str) -> None:
    """The error says what was given and what to do."""
    with pytest.raises(popdist.DatasetError, match=message):
        list(data_loader(Augmented(), 4, **options))


def test_a_stream_has_no_sampler() -> None:
    """Nor has one that nobody has made ready for it."""
    with pytest.raises(popdist.DatasetError, match="sampler= with a stream"):
        data_loader(popdist.shard_iterable([1, 2]), 1, sampler=[0])
