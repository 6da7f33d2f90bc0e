"""poptorch's loader: who reads what in which order, joined batches, and reading ahead.

Holds poptorch.data.combined_batches, poptorch.data.read_ahead and poptorch._logging.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

import poptorch
from poptorch import DataLoaderMode, SharingStrategy
from poptorch.custom_types import PARSERS
from poptorch.data.combined_batches import JoinedBatchSampler, Partition, PartitionSampler
from poptorch.data.read_ahead import rebatched
from tests.running import run

FORK: dict[str, Any] = {"sharing_strategy": SharingStrategy.Fork}


PROGRAM = """
import torch
import poptorch

numbers = torch.utils.data.TensorDataset(torch.arange(4))
loader = poptorch.DataLoader(poptorch.Options(), numbers, 2, mode=poptorch.DataLoaderMode.Async)
print([batch.tolist() for batch, in loader])
"""


class Numbers(Dataset[Tensor]):
    """Sample i is i, and reading ``broken`` fails."""

    def __init__(self, size: int, broken: int = -1) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if index == self.broken:
            raise ValueError("sample is broken")
        return torch.tensor(index)


class Stream(IterableDataset[Tensor]):
    """The same numbers in turn, divided among workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(torch.tensor, range(first, self.size, step))


def options(process: int = 0, num_processes: int = 1, *, iterations: int = 1, seed: int | None = None) -> Any:
    """As the process of a job."""
    made = poptorch.Options().deviceIterations(iterations)
    made.Distributed.configureProcessId(process, num_processes)
    if seed is not None:
        made.createOrSet(random_seed=seed)
    return made


def read(loader: Any) -> list[list[int]]:
    """One epoch."""
    return [batch.tolist() for batch in loader]


SIZES = st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(SIZES, st.none() | st.integers(0, 9), st.integers(0, 3))
def test_every_sample_is_read_once(sizes: tuple[int, int, int], seed: int | None, epoch: int) -> None:
    """Without drop_last, by the processes together, in each epoch; in order, or in one permutation for all."""
    num_samples, batch_size, num_processes = sizes
    parts = [
        list(
            Partition(
                num_samples=num_samples,
                batch_size=batch_size,
                process_id=process,
                num_processes=num_processes,
                drop_last=False,
                seed=seed,
            ).indices(epoch)
        )
        for process in range(num_processes)
    ]
    joined = [index for part in parts for index in part]

    assert sorted(joined) == list(range(num_samples))
    assert seed is not None or joined == list(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [len(part) for part in parts] == sorted(map(len, parts), reverse=True)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.none() | st.integers(0, 9), st.integers(0, 3))
def test_every_process_reads_as_many_full_batches(
    sizes: tuple[int, int, int], seed: int | None, epoch: int
) -> None:
    """With drop_last: consecutive blocks, no sample twice, every second epoch begins at the leftovers."""
    num_samples, batch_size, num_processes = sizes
    num_batches = num_samples // (batch_size * num_processes)
    assume(num_batches)
    parts = [
        Partition(
            num_samples=num_samples,
            batch_size=batch_size,
            process_id=process,
            num_processes=num_processes,
            drop_last=True,
            seed=seed,
        )
        for process in range(num_processes)
    ]
    read = [index for part in parts for index in part.indices(epoch)]
    share = batch_size * num_batches
    first = epoch % 2 * (num_samples % share)

    assert len(read) == len(set(read)) == share * num_processes
    assert set(read) <= set(range(num_samples))
    assert seed is not None or read == list(range(first, first + share * num_processes))


def test_a_process_without_a_batch_is_refused() -> None:
    """The numbers are named."""
    with pytest.raises(poptorch.Error, match="7 samples are no full combined batch of 4 for each of 2 processes"):
        poptorch.DataLoader(options(1, 2), Numbers(7), batch_size=4)


def test_a_combined_batch_holds_all_micro_batches() -> None:
    """Of device iterations, replicas by group, and accumulation; the options are frozen."""
    made = options(iterations=2).replicationFactor(6).inputReplicaGrouping(3, poptorch.CommGroupType.Consecutive)
    made.Training.gradientAccumulation(3)
    loader = poptorch.DataLoader(made, Numbers(50), batch_size=2)

    assert loader.combinedBatchSize == loader.batch_size == 24
    assert (len(loader), read(loader)) == (2, [list(range(24)), list(range(24, 48))])
    assert loader.options is made
    with pytest.raises(AttributeError):
        made.deviceIterations(1)
    with pytest.raises(poptorch.Error, match="no multiple"):
        poptorch.DataLoader(options().replicationFactor(3).set(input_group_size=2), Numbers(50))


def test_shuffled_processes_share_one_order() -> None:
    """Another one in each epoch, none without a seed; a lone process needs none."""
    loaders = [poptorch.DataLoader(options(process, 2, seed=3), Numbers(8), shuffle=True) for process in (0, 1)]
    epochs = [[number for loader in loaders for (number,) in read(loader)] for _ in range(3)]

    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    with pytest.raises(AssertionError, match="randomSeed"):
        poptorch.DataLoader(options(0, 2), Numbers(8), shuffle=True)
    assert len(poptorch.DataLoader(options(), Numbers(8), shuffle=True)) == 8


def test_leftovers_are_read_every_second_epoch() -> None:
    """Also with workers that persist, until the loader is told to end them."""
    for num_workers in (0, 1):
        loader = poptorch.DataLoader(options(1, 2), Numbers(7), batch_size=3, num_workers=num_workers)
        assert [read(loader) for _ in range(3)] == [[[3, 4, 5]], [[4, 5, 6]], [[3, 4, 5]]]
        assert len(multiprocessing.active_children()) == num_workers
        loader.terminate()
        assert not multiprocessing.active_children()


def test_what_excludes_each_other_is_refused() -> None:
    """With torch's own errors beside it."""
    batches = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    for arguments in ({"batch_size": 2}, {"shuffle": True}):
        with pytest.raises(poptorch.Error, match="batch_sampler excludes"):
            poptorch.DataLoader(options(), Numbers(8), batch_sampler=batches, **arguments)
    with pytest.raises(poptorch.Error, match="auto_distributed_partitioning"):
        poptorch.DataLoader(options(0, 2), Numbers(8), batch_sampler=batches)
    with pytest.raises(poptorch.Error, match="sampler="):
        poptorch.DataLoader(options(0, 2), Numbers(8), sampler=RandomSampler(range(8)))
    with pytest.raises(AssertionError, match="iterable"):
        poptorch.DataLoader(options(0, 2), Stream(8))
    with pytest.raises(poptorch.Error, match="AsyncRebatched, and the mode is Sync"):
        poptorch.DataLoader(options(), Numbers(8), rebatched_worker_size=1)
    with pytest.raises(poptorch.Error, match="without a batch_sampler"):
        poptorch.DataLoader(
            options(),
            Numbers(8),
            batch_sampler=batches,
            mode=DataLoaderMode.AsyncRebatched,
            rebatched_worker_size=1,
        )
    with pytest.raises(poptorch.Error, match="rebatched_worker_size=3"):
        poptorch.DataLoader(options(), Numbers(8), 2, mode=DataLoaderMode.AsyncRebatched, rebatched_worker_size=3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_batches_of_a_sampler_are_joined(size: int, batch_size: int, factor: int, drop_last: bool) -> None:  # noqa: FBT001 - drawn
    """So many to one; drop_last is about incomplete joins."""
    batches = BatchSampler(SequentialSampler(range(size)), batch_size, drop_last=False)
    joined = JoinedBatchSampler(batches, factor, drop_last=drop_last)
    found = list(joined)
    parts = [list(batches)[first : first + factor] for first in range(0, len(batches), factor)]
    expected = [list(chain(*part)) for part in parts if len(part) == factor or not drop_last]

    assert found == expected
    assert len(joined) == len(expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), max_size=6), st.integers(1, 9), st.booleans())
def test_rebatching_keeps_every_sample(sizes: list[int], size: int, drop_last: bool) -> None:  # noqa: FBT001 - drawn
    """In order, in full batches, and the structure is kept."""
    numbers = torch.arange(sum(sizes))
    given_batches = [{"x": (part, [part * 2])} for part in numbers.split(sizes)] if sizes else []
    found = list(rebatched(given_batches, size, drop_last=drop_last))
    joined = [number for batch in found for number in batch["x"][0].tolist()]

    assert joined == numbers[: len(joined)].tolist()
    assert len(joined) == sum(sizes) - (sum(sizes) % size if drop_last else 0)
    assert all(torch.equal(batch["x"][0] * 2, batch["x"][1][0]) for batch in found)
    assert all(len(batch["x"][0]) == size for batch in found[:-1])


def test_reading_ahead_gives_the_same_batches() -> None:
    """In each epoch; one that is left early restarts the data."""
    loader = poptorch.DataLoader(options(), Numbers(7), 2, mode=DataLoaderMode.Async, async_options=FORK)
    try:
        assert len(loader) == 3
        assert [read(loader) for _ in range(2)] == [[[0, 1], [2, 3], [4, 5]]] * 2
        assert next(iter(loader)).tolist() == [0, 1]
        assert read(loader) == [[0, 1], [2, 3], [4, 5]]
        first, _ = iter(loader), iter(loader)
        with pytest.raises(poptorch.Error, match="another one of the loader was made"):
            next(first)
        with pytest.raises(poptorch.Error, match="already uses"):
            poptorch.AsynchronousDataAccessor(loader)
    finally:
        loader.terminate()


def test_workers_parts_are_joined() -> None:
    """Of an iterable dataset, whose workers each have a remainder; the order is free."""
    for mode, arguments in (
        (DataLoaderMode.AsyncRebatched, {"rebatched_worker_size": 2}),
        (DataLoaderMode.Async, {"drop_last": False}),
    ):
        loader = poptorch.DataLoader(
            options(), Stream(11), 4, num_workers=2, mode=mode, async_options=FORK, **arguments
        )
        found = read(loader)
        loader.terminate()
        drops = mode is DataLoaderMode.AsyncRebatched
        assert [len(batch) for batch in found] == [4, 4] + ([] if drops else [3])
        assert len(set(chain(*found))) == (8 if drops else 11)
        assert len(loader) == len(found)


@pytest.mark.parametrize("drop_last", [True, False])
def test_every_mode_gives_the_same_batches(drop_last: bool) -> None:  # noqa: FBT001 - a row
    """Of samples and of a sampler's batches, texts in them too; and as many as the length says."""
    for arguments in (
        {"batch_size": 2},
        {"batch_sampler": BatchSampler(SequentialSampler(range(6)), 2, drop_last=False)},
    ):
        expected: list[Any] | None = None
        for mode in DataLoaderMode:
            ahead: dict[str, Any] = {} if mode is DataLoaderMode.Sync else {"async_options": FORK}
            rows: Any = [{"x": torch.tensor(number), "name": str(number)} for number in range(6)]
            loader = poptorch.DataLoader(
                options(iterations=2),
                rows,
                drop_last=drop_last,
                mode=mode,
                **arguments,
                **ahead,
            )
            found = [(batch["x"].tolist(), batch["name"]) for batch in loader]
            loader.terminate()
            assert len(loader) == len(found)
            expected = expected or found
            assert found == expected


def test_many_workers_are_named() -> None:
    """By torch, before they are waited for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        poptorch.DataLoader(options(), Numbers(4), num_workers=1)
    with pytest.warns(UserWarning, match="4096 worker processes in total"):
        poptorch.DataLoader(options(), Numbers(4), num_workers=1 << 12)


def test_what_cannot_be_read_is_an_error() -> None:
    """Where it is asked for, with the dataset's own traceback; after terminate() nothing is read."""
    loader = poptorch.DataLoader(options(), Numbers(3, broken=2), mode=DataLoaderMode.Async, async_options=FORK)
    batches = iter(loader)
    assert next(batches).tolist() == [0]
    with pytest.raises(ValueError, match="sample is broken"):
        list(batches)
    loader.terminate()
    for ended in (batches, loader):
        with pytest.raises((poptorch.Error, StopIteration)):
            next(iter(ended))
    with pytest.raises(poptorch.Error, match="buffer_size=0"):
        poptorch.AsynchronousDataAccessor(Numbers(3), buffer_size=0)


def test_a_dead_reader_is_an_error_and_no_wait() -> None:
    """Raised where the program reads, or by torch where it happens to be."""
    program = """
import multiprocessing, os, signal
import torch, poptorch
fork = poptorch.SharingStrategy.Fork
accessor = poptorch.AsynchronousDataAccessor(torch.arange(3), load_indefinitely=False, sharing_strategy=fork)
list(accessor)
(reader,) = multiprocessing.active_children()
os.kill(reader.pid, signal.SIGKILL)
list(accessor)
"""
    ended = run([sys.executable, "-c", program])
    assert ended.code == 1
    assert "killed by signal: Killed" in ended.err or "exited unexpectedly" in ended.err


def test_a_program_need_not_end_its_reader() -> None:
    """A server starts it unless another way is asked for; the end of the program is the end of all."""
    assert run([sys.executable, "-c", PROGRAM]).succeeded().out == "[[0, 1], [2, 3]]\n"
    assert run([sys.executable, "-c", f"{PROGRAM}\nimport os; os.kill(os.getpid(), 9)"]).code == -9


def test_a_partition_has_a_length() -> None:
    """As torch's loaders ask for."""
    partition = Partition(num_samples=7, batch_size=2, process_id=0, num_processes=3, drop_last=False)
    assert len(PartitionSampler(partition)) == len(list(PartitionSampler(partition))) == 3


class Named:
    """A program's own type, with a text."""

    def __init__(self, values: Tensor, name: str) -> None:
        self.values, self.name = values, name


class NamedParser(poptorch.ICustomArgParser):
    """Its parser."""

    def yieldTensors(self, struct: Named) -> Iterator[Tensor]:  # noqa: N802 - PopTorch's
        """The one."""
        yield struct.values

    def reconstruct(self, original_structure: Named, tensor_iterator: Iterator[Tensor]) -> Named:
        """With the name of the original."""
        return Named(next(tensor_iterator), original_structure.name)


@pytest.mark.parametrize("mode", DataLoaderMode)
def test_batches_of_a_program_s_own_types(mode: DataLoaderMode) -> None:
    """Within containers, in every mode."""
    poptorch.registerCustomArgParser(Named, NamedParser())
    rows: Any = [(Named(torch.tensor([float(number)]), "n"), number) for number in range(4)]
    ahead: dict[str, Any] = {} if mode is DataLoaderMode.Sync else {"async_options": FORK}
    if mode is DataLoaderMode.AsyncRebatched:
        ahead["rebatched_worker_size"] = 1
    try:
        loader = poptorch.DataLoader(options(), rows, 2, mode=mode, **ahead)
        found = [(named.values.tolist(), named.name, numbers.tolist()) for named, numbers in loader]
        loader.terminate()
    finally:
        PARSERS.pop(Named)

    assert found == [([[0.0], [1.0]], "n", [0, 1]), ([[2.0], [3.0]], "n", [2, 3])]


def test_types_go_to_other_processes() -> None:
    """With what makes batches; those that cannot be pickled stay behind, and are in nobody's way."""

    class Local(NamedParser):
        pass

    poptorch.registerCustomArgParser(Named, NamedParser())
    poptorch.registerCustomArgParser(Local, Local())
    try:
        copied = pickle.dumps(poptorch.DataLoader(options(), Numbers(2)))
        PARSERS.clear()
        pickle.loads(copied)  # noqa: S301 - our own
        assert list(PARSERS) == [Named]
    finally:
        PARSERS.clear()


def test_a_loader_has_the_length_of_its_data() -> None:
    """One of data without a length has none; items that are batches need no size."""

    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.arange(3))

    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(poptorch.DataLoader(options(), Endless()))
    whole = poptorch.DataLoader(options(iterations=2), Numbers(3), batch_size=None)
    assert whole.combinedBatchSize is None
    assert whole._accessor is None
    assert [number.item() for number in whole] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize(("drop_last", "expected"), [(True, [2, 2]), (False, [1, 1, 2, 2])])
def test_each_worker_has_its_own_remainder(drop_last: bool, expected: list[int]) -> None:  # noqa: FBT001 - a row
    """Of an iterable dataset that is not rebatched; the length is torch's."""
    loader = poptorch.DataLoader(options(), Stream(6), 2, num_workers=2, drop_last=drop_last)
    found = sorted(map(len, read(loader)))
    loader.terminate()

    assert (found, len(loader)) == (expected, 3)


def test_an_interrupt_is_the_program_s(capfd: pytest.CaptureFixture[str]) -> None:
    """The reading process prints nothing and reads on."""
    accessor = poptorch.AsynchronousDataAccessor(Numbers(9), **FORK)
    numbers = iter(accessor)
    found = [next(numbers)]
    (reader,) = multiprocessing.active_children()
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGINT)
    assert torch.stack([*found, *numbers]).tolist() == list(range(9))
    accessor.terminate()
    assert capfd.readouterr() == ("", "")
