"""The loader of an instance: a replica's micro batches and the samples' augmentation are the same in any split.

Holds popdist.data.replica_loader, popdist.data.randomness and popdist.data.batch.
"""

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import popdist
from popdist.data.batch import Batch
from popdist.data.data_loader import data_loader
from popdist.data.replica_loader import SMALL_BYTES, ReplicaLoader, SentContents
from tests.instances import on_instances

SPLITS = st.sampled_from([(1, 1), (1, 6), (2, 6), (3, 6), (4, 8), (1, 8), (5, 5)])
"""Instances and replicas."""
SMALL = st.integers(1, 4)
LENGTHS = st.integers(8, 90)


class Augmented(Dataset[Tensor]):
    """Samples that hold their index and what they drew; ``late`` draws from numpy for the last index only."""

    def __init__(self, length: int = 40, *, late: bool = False) -> None:
        self.length = length
        self.late = late

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        draw = 0.0 if self.late and index < self.length - 1 else np.random.rand()
        drawn = [random.random(), torch.rand(()).item(), draw]  # noqa: S311 - as above
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Read(Augmented):
    """A dataset that reads a list of samples at once, and cannot read one."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [super(Read, self).__getitem__(index) for index in indices]

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("read one by one")


class ReadWithoutDraws(Read):
    """The same, and its samples are what they are."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.tensor([index, 0, 0, 0]) for index in indices]


def augment_batch(samples: list[Tensor]) -> Tensor:
    """A collate function that draws."""
    return torch.stack(samples) + torch.tensor([0, 0, 0, random.random()])  # noqa: S311 - what programs use


def loaders(split: tuple[int, int], *args: Any, **options: Any) -> list[ReplicaLoader]:
    """The loader of every instance of a job."""
    return on_instances(split, lambda: data_loader(*args, **options))


def steps(made: list[ReplicaLoader], count: int | None = None) -> list[list[Batch]]:
    """For each step, the batch of every instance, up to ``count`` of the epoch."""
    return [list(step) for step in islice(zip(*made, strict=True), count)]


def seen(found: list[list[Batch]]) -> list[int]:
    """The indices that the samples themselves hold."""
    return [int(row[0]) for step in found for batch in step for content in batch for row in content]


def per_replica(found: list[list[Batch]]) -> list[list[tuple[int, int, int, str]]]:
    """For each step the micro batches of all instances, one after the other."""
    return [
        [(m.replica, m.step, m.num_samples, repr(m.content)) for batch in step for m in batch.micro_batches]
        for step in found
    ]


@settings(deadline=None)
@given(split=SPLITS, length=LENGTHS, micro=SMALL, accumulation=SMALL, shuffle=st.booleans())
def test_every_sample_comes_exactly_once(
    split: tuple[int, int], length: int, micro: int, accumulation: int, *, shuffle: bool
) -> None:
    """Over all instances an epoch is the dataset, in its order unless shuffled, and the counts are true."""
    found = steps(loaders(split, torch.arange(length).view(-1, 1), micro, accumulation, shuffle=shuffle))

    assert sorted(seen(found)) == list(range(length))
    assert shuffle or seen(found) == list(range(length))
    for number, step in enumerate(found):
        assert {(batch.epoch, batch.step) for batch in step} == {(0, number)}
        assert {batch.num_samples_job for batch in step} == {sum(batch.num_samples for batch in step)}
        assert {len(batch.micro_batches) for batch in step} == {split[1] // split[0] * accumulation}
        assert [i for batch in step for i in batch.indices] == seen([step])
        assert all(m.num_samples <= micro + 1 for batch in step for m in batch.micro_batches)


@settings(deadline=None, max_examples=25)
@given(accumulation=SMALL, seed=st.integers(0, 3), collate_fn=st.sampled_from([None, augment_batch]))
def test_a_replica_gets_the_same_in_any_split(
    accumulation: int, seed: int, collate_fn: Callable[[list[Any]], Any] | None
) -> None:
    """Six replicas in 1, 2, 3 and 6 instances: the same micro batches, augmentation included, in each epoch."""
    jobs = [
        loaders((size, 6), Augmented(), 2, accumulation, shuffle=True, seed=seed, collate_fn=collate_fn)
        for size in (1, 2, 3, 6)
    ]

    first, second = ([per_replica(steps(job)) for job in jobs] for _ in range(2))

    assert all(found == first[0] for found in first)
    assert all(found == second[0] for found in second)
    assert first[0] != second[0]


@pytest.mark.parametrize("split", [(1, 1), (1, 2), (2, 2)])
def test_a_batch_that_is_taken_for_a_micro_batch_is_an_error(split: tuple[int, int]) -> None:
    """The error has the loop to write, and evaluation works."""
    loader = loaders(split, TensorDataset(torch.arange(8), torch.arange(8)), 4)[0]
    wanted = r"(?s)unpacked.*for x, y in model\.micro_batches\(batch\):.*`for x, y in batch:`"
    for batch in loader:
        with pytest.raises(popdist.BatchError, match=r"was asked for \[0\]"):
            batch[0]
        with pytest.raises(popdist.BatchError, match=r"was given to linear.*micro batches"):
            torch.nn.Linear(1, 1)(batch)
        with pytest.raises(popdist.BatchError, match="was taken for a dict"):
            dict(**batch)
        with pytest.raises(AttributeError, match=wanted.replace("unpacked", r"was asked for \.to")):
            batch.to("cpu")
        with pytest.raises(popdist.BatchError, match=wanted.replace("unpacked", "unpacked into 2 names")):
            _, _ = batch
        for calculation in ("x / 255", "2 * x", "-x", "1 - x"):
            with pytest.raises(popdist.BatchError, match="was calculated with"):
                eval(calculation, {"x": batch})  # noqa: S307 - ours
        assert not hasattr(pickle.loads(pickle.dumps(copy.copy(batch))), "items")  # noqa: S301 - our own
        assert [len(x) for x, _ in batch] == [len(x) for x, y in list(batch)]
        assert len([*batch]) == len(batch)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_loop_of_torch_is_refused(accumulation: int) -> None:
    """Also where a batch has as many micro batches as the program has names; a batch is still iterated over."""
    loader = data_loader(TensorDataset(torch.arange(12), torch.arange(12)), 2, accumulation)
    with pytest.raises(popdist.BatchError, match="unpacked into 2 names"):
        for _x, _y in loader:
            pass
    with pytest.raises(popdist.BatchError, match="unpacked into 2 names"):
        for _, (_x, _y) in enumerate(loader):
            pass
    batch = next(iter(loader))
    first, *others = batch
    assert len(others) == accumulation - 1
    assert [len(it) for it in batch] == [2] * accumulation
    assert torch.equal(first[0], torch.arange(2))
    if accumulation == 2:
        one, other = (content for content in batch)
        assert (len(one), len(other)) == (2, 2)


def test_what_is_written_for_torch_has_an_answer() -> None:
    """``batch_size=``, no size at all, and the epoch of a sampler."""
    with pytest.raises(
        popdist.DatasetError, match=r"batch_size=4: say micro_batch_size, the batch of one replica"
    ):
        data_loader(range(8), batch_size=4)
    with pytest.raises(
        popdist.DatasetError, match=r"data_loader\(5, \.\.\.\): .* data_loader\(dataset, micro_batch_size, acc"
    ):
        data_loader(5, 8)
    with pytest.raises(popdist.DatasetError, match="say how many samples a micro batch has"):
        data_loader(range(8))
    first, second = (data_loader(range(40), 40, shuffle=True) for _ in range(2))
    first.sampler.set_epoch(3)  # type: ignore[attr-defined] # torch promises any sampler
    second.set_epoch(3)
    assert next(iter(first)).indices == next(iter(second)).indices


@pytest.mark.parametrize("dataset", [Augmented(), Augmented(late=True), Subset(Augmented(), range(40))])
def test_augmentation_belongs_to_the_sample(dataset: Dataset[Tensor]) -> None:
    """It follows from seed, epoch and index, whatever the batches; also where one sample alone draws."""

    def rows(micro: int, epoch: int = 0, seed: int = 0) -> list[list[float]]:
        loader = data_loader(dataset, micro, seed=seed)
        loader.set_epoch(epoch)
        return [row for batch in loader for content in batch for row in content.tolist()]

    assert rows(1) == rows(3) == rows(40)
    assert rows(3) != rows(3, epoch=1)
    assert rows(3) != rows(3, seed=1)


def test_the_process_keeps_its_own_random_state() -> None:
    """What the loop draws does not depend on what the loader draws, nor on whether there is one."""

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: S311 - under test

    def drawn(loader: ReplicaLoader | range) -> list[list[float]]:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        return [draw() for _ in loader]

    expected = drawn(range(10))

    assert drawn(data_loader(Augmented(), 4)) == expected
    assert drawn(data_loader(Augmented(late=True), 4)) == expected
    assert drawn(data_loader(TensorDataset(torch.arange(40)), 4)) == expected


def test_rows_of_tensors_are_taken_at_once() -> None:
    """And look as torch's own loader makes them."""
    data = TensorDataset(torch.randn(10, 3), torch.arange(10))

    ours = [content for batch in data_loader(data, 4) for content in batch]

    for found, expected in zip(ours, DataLoader(data, 4), strict=True):
        assert type(found) is type(expected)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dataset", [Read(), ReadWithoutDraws()])
def test_a_dataset_may_read_many_at_once(dataset: Read) -> None:
    """Through ``__getitems__``, as torch's own loader does; it draws for a micro batch as for its first sample."""
    one, other = (steps(loaders((size, 4), dataset, 3, shuffle=True)) for size in (1, 2))

    assert per_replica(one) == per_replica(other)
    assert sorted(seen(one)) == list(range(40))


@settings(deadline=None)
@given(first=SPLITS, second=SPLITS, length=LENGTHS, sizes=st.tuples(SMALL, SMALL, SMALL, SMALL), done=SMALL)
def test_resuming_loses_nothing_and_repeats_nothing(
    first: tuple[int, int], second: tuple[int, int], length: int, sizes: tuple[int, int, int, int], done: int
) -> None:
    """Half an epoch with some replicas and the rest with others is one epoch; then an empty batch is legal."""
    data = torch.arange(length).view(-1, 1)
    before = loaders(first, data, *sizes[:2], shuffle=True)
    found = seen(steps(before, min(done, len(before[0]))))
    after = loaders(second, data, *sizes[2:], shuffle=True)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())

    rest, whole = steps(after), steps(after)

    assert sorted(found + seen(rest)) == sorted(seen(whole)) == list(range(length))
    assert all(
        m.content is None for step in rest for batch in step for m in batch.micro_batches if not m.num_samples
    )


def test_a_micro_batch_unpacks_and_has_no_index() -> None:
    """Its attributes have names; what a number in brackets means would have to be looked up."""
    (batch,) = data_loader(torch.arange(3), 3)
    (micro,) = batch.micro_batches
    replica, step, num_samples, content = micro

    assert (replica, step, num_samples, content.tolist()) == (0, 0, 3, [0, 1, 2])
    assert not hasattr(micro, "__getitem__")


def test_an_old_iterator_does_not_move_the_loader() -> None:
    """Only the one that was started last counts."""
    loader = data_loader(torch.arange(30), 10)
    old, new = iter(loader), iter(loader)
    next(new)
    next(old)
    next(old)

    assert loader.state_dict()["position"] == 10


def test_each_micro_batch_is_collated_by_itself() -> None:
    """Padding to the longest of a micro batch, strings, dicts: nothing has to be split."""

    def pad(samples: list[list[int]]) -> dict[str, Any]:
        longest = max(map(len, samples))
        rows = [sample + [0] * (longest - len(sample)) for sample in samples]
        return {"rows": torch.tensor(rows), "text": [str(sample) for sample in samples]}

    sentences = [[1] * length for length in range(1, 9)]
    (loader,) = loaders((1, 2), sentences, 2, collate_fn=pad)

    shapes = [[tuple(content["rows"].shape) for content in batch] for batch in loader]

    assert shapes == [[(2, 2), (2, 4)], [(2, 6), (2, 8)]]
    assert [len(batch) for batch in loader] == [2, 2]


def give_nothing(samples: list[Any]) -> None:
    """A collate function without a return."""


class Sized(IterableDataset[int]):
    """A stream that knows how long it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class Endless(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: list(data_loader([1, 2, 3], 2, collate_fn=give_nothing)),
            "BatchError",
            "give_nothing returned No",
        ),
        (lambda: data_loader(Endless(), 2), "DatasetError", r"Endless is a stream.*shard_iterable\(stream\)"),
        (lambda: data_loader(Sized(), 2), "DatasetError", r"Sized is a stream.*shard_iterable\(stream\)"),
        (
            lambda: data_loader([1, 2, 3], 2, in_order=False),
            "DatasetError",
            "in_order: data_loader deals the samp",
        ),
        (lambda: data_loader([1, 2, 3], 0), "DatasetError", "micro_batch_size=0"),
        (lambda: data_loader([1], 1).load_state_dict({"epoch": 1}), "DatasetError", "no state of a data_loader"),
    ],
)
def test_what_cannot_be_loaded_is_refused(make: Callable[[], object], error: str, message: str) -> None:
    """The error says what was asked and what to do."""
    with pytest.raises(getattr(popdist, error), match=message):
        make()


@pytest.mark.parametrize("sample", [(1, torch.ones(2)), ("a", {"b": 2.0}), ((1, 2), [3.0])])
def test_tuples_are_collated_as_torch_does(sample: tuple[object, ...]) -> None:
    """Types included; samples of different sizes are torch's own error."""
    samples: Any = [sample] * 3
    (batch,), (theirs,) = data_loader(samples, 3), DataLoader(samples, 3)

    assert repr(list(batch)) == repr([theirs])
    with pytest.raises(RuntimeError, match="of equal size"):
        list(data_loader([sample, sample[:1]], 2))


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]),
)
def test_a_small_tensor_is_sent_as_it_is(shape: list[int], dtype: torch.dtype) -> None:
    """Of any shape and dtype; it is written to as a new one is, and lies where one does."""
    sent = (torch.rand(shape) * 9).to(dtype)

    found, text = pickle.loads(ForkingPickler.dumps(SentContents([sent, "x"])))  # noqa: S301 - our own

    assert found.dtype == dtype
    assert torch.equal(found, sent)
    assert text == "x"
    assert found.resize_(7).data_ptr() % 64 == 0


class Strange:
    """Samples that a worker cannot copy as they lie in memory, and one that it can."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        whole = torch.arange(24.0).view(4, 6)
        kinds = [
            whole,
            whole.T,
            whole[1:3],
            torch.arange(SMALL_BYTES // 4),
            torch.arange(SMALL_BYTES // 4 + 1),
            torch.nn.Parameter(whole),
        ]
        return kinds[index], {"two": kinds[0], "one": kinds[0]}


def test_whatever_a_worker_sends_arrives() -> None:
    """With its strides and its type, as without workers; an object that comes twice is one."""
    here, there = (
        [
            content
            for batch in data_loader(Strange(), 1, collate_fn=itemgetter(0), num_workers=num_workers)
            for content in batch
        ]
        for num_workers in (0, 1)
    )

    for (expected, _), (found, mapping) in zip(here, there, strict=True):
        assert type(found) is type(expected)
        assert (found.stride(), found.requires_grad) == (expected.stride(), expected.requires_grad)
        assert torch.equal(found, expected)
        assert mapping["one"] is mapping["two"]


def test_what_cannot_be_sent_is_an_error() -> None:
    """It is the worker's, which torch hands on; the thread that sends would print it, and the loop would wait."""
    with pytest.raises(TypeError, match="cannot pickle 'dict_values'"):
        SentContents([{}.values()])
