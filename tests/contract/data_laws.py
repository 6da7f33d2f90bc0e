"""The laws of data in a job, written once over instances and replicas; every instance runs all of them."""

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import popdist
import poptorch
from popdist.data.batch import Batch
from popdist.data.replica_loader import ReplicaLoader
from popdist.gradients.optimizer_steps import training_loop
from tests.contract.collective_laws import refused
from tests.contract.laws import TIMEOUT_SECONDS, run_laws


def is_last() -> bool:
    """Whether this is the instance that does what the others do not; false in a job of one."""
    return 0 < popdist.instance_index() == popdist.num_instances() - 1


def law_evaluation_is_that_of_one_process(_directory: Path) -> None:
    """Predictions in the order of the dataset without duplicates, and the exact metric, on every instance."""
    samples = torch.arange(53, dtype=torch.float64)
    for micro, shuffle in ((1, False), (3, False), (9, True)):
        rows, order, right, count = [], [], 0, 0
        for batch in popdist.data_loader(samples, micro, shuffle=shuffle):
            outputs = [(x * 3 + 1).unsqueeze(1) for x in batch]
            rows.append(popdist.gather(outputs))
            order.append(popdist.gather(torch.tensor(batch.indices, dtype=torch.int64)))
            right += sum(int((x % 7 == 2).sum()) for x in batch)
            count += batch.num_samples
        found = torch.cat(rows)
        assert shuffle or torch.equal(found, (samples * 3 + 1).unsqueeze(1))
        assert torch.equal(found[torch.cat(order).argsort()], (samples * 3 + 1).unsqueeze(1))
        assert popdist.weighted_mean(right, count) == sum(i % 7 == 2 for i in range(53)) / 53


def law_poptorch_s_loaders_share_the_data(_directory: Path) -> None:
    """The options know process and replicas; each sample is read once, in one order that is shuffled alike."""
    for shuffle in (False, True):
        options = popdist.poptorch.Options().randomSeed(3)
        assert options.replication_factor == popdist.num_local_replicas()
        assert options.Distributed.processId == poptorch.Options().Distributed.processId
        loader = poptorch.DataLoader(options, TensorDataset(torch.arange(50)), 2, shuffle=shuffle, drop_last=False)
        assert loader.combinedBatchSize == 2 * popdist.num_local_replicas()
        found = popdist.gather(torch.cat([numbers for (numbers,) in loader]))
        assert shuffle or torch.equal(found, torch.arange(50))
        assert torch.equal(found.sort().values, torch.arange(50))


def law_poptorch_s_options_agree_with_the_job(_directory: Path) -> None:
    """A number of IPUs that contradicts poprun's is an error that names both; one like it is none."""
    assert popdist.poptorch.Options(popdist.ipus_per_replica()).replication_factor == popdist.num_local_replicas()
    if popdist.isPopdistEnvSet():
        with pytest.raises(popdist.ContractError, match=r"ipus_per_replica=7\), and poprun gave each replica 1 "):
            popdist.poptorch.Options(ipus_per_replica=7)


def law_gather_takes_any_number_of_rows(_directory: Path) -> None:
    """Ragged, none on some instances, none anywhere; of every dtype."""
    index, size = popdist.instance_index(), popdist.num_instances()
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        mine = torch.full((index, 2), index, dtype=dtype)
        expected = torch.cat([torch.full((i, 2), i, dtype=dtype) for i in range(size)])
        assert torch.equal(popdist.gather(mine), expected)
    assert popdist.gather([torch.ones(3)] if index == size - 1 else []).tolist() == [1, 1, 1]
    assert popdist.gather([]).shape == (0,)


def law_rows_that_do_not_fit_are_refused(_directory: Path) -> None:
    """On every instance, naming who brought what."""
    with refused(popdist.CollectiveError, r"shape \(\) has no rows|refused its rows"):
        popdist.gather(torch.tensor(1.0) if is_last() or popdist.num_instances() == 1 else torch.ones(1))
    if popdist.num_instances() > 1:
        with refused(popdist.CollectiveError, r"float32\[2\] on instance .*float32\[3\] on instance"):
            popdist.gather(torch.ones(1, 3 if is_last() else 2))
    popdist.barrier()


def law_an_object_is_that_of_the_root(_directory: Path) -> None:
    """Any JSON value, as JSON gives it back; what is none is refused everywhere."""
    root = popdist.num_instances() - 1
    for value in (None, 3, "näme", {"a": [1, 2.5, None], "b": {"c": True}}, "x" * 100_000, ""):
        assert popdist.broadcast_object(value if popdist.instance_index() == root else "other", root) == value
    assert popdist.broadcast_object((1, {2: 3})) == [1, {"2": 3}]
    for wrong in (object(), float("nan")):
        with refused(popdist.CollectiveError, r"what instance 0 brought is no JSON value"):
            popdist.broadcast_object(wrong if popdist.is_main() else 1)
    with refused(popdist.CollectiveError, "root is not one of"):
        popdist.broadcast_object(1, popdist.num_instances())
    popdist.barrier()


def download(runs: list[int]) -> None:
    """Fail, and tell that it was called."""
    runs.append(1)
    raise KeyError("no network")


def warned(read: Callable[[], object]) -> list[str]:
    """The warnings of a loop on this instance."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read()
    return [str(it.message) for it in found if issubclass(it.category, popdist.PopdistWarning)]


def law_a_loader_that_one_instance_reads_has_a_share_only(_directory: Path) -> None:
    """It says so in ``execute_on_instances``; elsewhere it is seen by the number of passes over loaders."""
    loader = popdist.data_loader(range(16), 1)
    found, num_passes = list[str](), training_loop.num_loader_passes

    def evaluate() -> None:
        found.extend(warned(lambda: list(loader)))

    evaluate()
    assert not found
    popdist.execute_on_instances({popdist.num_instances() - 1}, evaluate)
    assert len(found) == is_last()
    assert all("read in execute_on_instances" in text for text in found)
    has_read_twice = is_last() or popdist.num_instances() == 1
    assert training_loop.num_loader_passes - num_passes == 1 + has_read_twice


def law_the_first_of_a_host_goes_first(directory: Path) -> None:
    """It does the work, the others find it done; its failure is an error everywhere and hangs nobody."""
    with popdist.first_on_host():
        is_there = directory.exists()
        assert is_there == (popdist.local_instance_index() > 0)
        directory.mkdir(exist_ok=True)
    is_first = popdist.local_instance_index() == 0
    runs: list[int] = []
    expected = pytest.raises(KeyError) if is_first else refused(popdist.CollectiveError, "failed on instance 0")
    with expected, popdist.first_on_host():
        download(runs)
    assert len(runs) == is_first
    popdist.barrier()


def law_the_job_has_a_name(_directory: Path) -> None:
    """The same on all instances, and the launcher's."""
    assert popdist.broadcast_object(popdist.job_id()) == popdist.job_id() == os.environ["POPDIST_JOB_ID"] != ""


class Augmented(Dataset[Tensor]):
    """Samples that hold their index and what was drawn for it."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), torch.rand(()).item(), np.random.rand()]  # noqa: S311 - what programs use
        return torch.tensor([index, *drawn], dtype=torch.float64)


def law_samplers_are_the_same_everywhere(_directory: Path) -> None:
    """As loaders are; both, made before ``init()``, find out when they are first iterated over."""
    if popdist.num_instances() == 1:
        return
    last = popdist.num_instances() - 1
    with refused(popdist.CollectiveError, rf"instance {last}: ReplicaSampler of 61 samples.* seed=1"):
        popdist.ReplicaSampler(61, 2, seed=int(is_last()))
    popdist.finalize()
    sampler, loader = popdist.ReplicaSampler(60 + is_last(), 2), popdist.data_loader(range(60 + is_last()), 2)
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    with refused(popdist.CollectiveError, rf"instance {last}: ReplicaSampler of 61 samples"):
        iter(sampler)
    with refused(popdist.CollectiveError, rf"instance {last}: data_loader of 61 samples"):
        iter(loader)
    assert sum(len(indices) for indices in sampler) > 0


def law_loaders_are_the_same_everywhere(_directory: Path) -> None:
    """Instances with other data, seeds or sizes would lose samples or see them twice; each hears who differs."""
    if popdist.num_instances() == 1:
        return
    last = popdist.num_instances() - 1
    with refused(popdist.CollectiveError, rf"instance {last}: data_loader of 61 samples.* seed=1"):
        popdist.data_loader(Augmented(), 2, seed=int(is_last()))
    with refused(popdist.CollectiveError, rf"instance {last}: data_loader of 61 samples.* accumulation=2"):
        popdist.data_loader(Augmented(), 2, 1 + is_last())
    with refused(
        popdist.CollectiveError, rf"(?s)data_loader of 61 samples.*instance {last}: data_loader of 9 samp"
    ):
        popdist.data_loader(range(9) if is_last() else Augmented(), 1)
    popdist.barrier()


def law_the_state_is_that_of_the_loop(_directory: Path) -> None:
    """Whatever workers have read ahead, persistent ones too; with any number of them the samples are the same."""
    whole = received(list(popdist.data_loader(Augmented(), 2, shuffle=True)))
    kinds: list[dict[str, Any]] = [{}, {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}]
    if popdist.num_instances() == 1:
        kinds.append({"num_workers": 4, "prefetch_factor": 4})
    for options in kinds:
        loader = popdist.data_loader(Augmented(), 2, shuffle=True, **options)
        first = list(itertools.islice(loader, 2))
        rest = popdist.data_loader(Augmented(), 2, shuffle=True, **options)
        rest.load_state_dict(loader.state_dict())
        assert received(first) + received(list(rest)) == whole
        assert received(list(loader)) == received(list(rest))
        assert loader.state_dict() == rest.state_dict() == {**loader.state_dict(), "epoch": 2, "position": 0}


def law_the_loader_keeps_nothing_of_a_batch(_directory: Path) -> None:
    """What the loop has dropped is gone when the next one is made; of a dataset and of a stream."""
    made, num_kept = WeakSet[Tensor](), list[int]()

    def collate(samples: list[int]) -> Tensor:
        num_kept.append(len(made))
        content = torch.tensor(samples)
        made.add(content)
        return content

    for data in (range(60), popdist.shard_iterable(range(60))):
        for batch in popdist.data_loader(data, 2, collate_fn=collate):
            del batch
        assert max(num_kept) == popdist.num_local_replicas() - 1


class Repeated:
    """A sampler that gives each index three times, in an order drawn for each epoch; or the mistake it is told."""

    def __init__(self, wrong: Any = None) -> None:
        self.wrong = wrong

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.wrong, Exception):
            raise self.wrong
        order = [number for number in torch.randperm(61).tolist() for _ in range(3)]
        return iter(order if self.wrong is None else [*order[:-1], self.wrong])


def weighted() -> WeightedRandomSampler:
    """Draws 80 times, some samples more often than others."""
    return WeightedRandomSampler([1.0 + number for number in range(61)], 80)


def run_sampler_laws(directory: Path) -> tuple[int, list[float]]:
    """How many laws of samplers there were, and two epochs, which are the same for any split."""
    num_laws = run_laws(__name__, directory, "law_sampled_")
    loader = popdist.data_loader(Augmented(), 2, 2, sampler=weighted())
    return num_laws, received(list(loader)) + received(list(loader))


def law_sampled_epochs_are_resumed(_directory: Path) -> None:
    """In the middle, in steps of other sizes, with workers as well; each index as often as it was given."""
    for make, length, num_workers in ((weighted, 80, 1), (Repeated, 183, 0)):
        loader = popdist.data_loader(Augmented(), 2, sampler=make())
        first = received(list(itertools.islice(loader, 2)))
        rest = popdist.data_loader(Augmented(), 3, 2, sampler=make(), num_workers=num_workers)
        rest.load_state_dict(loader.state_dict())
        found = first + received(list(rest))
        assert len(found) == 4 * length
        whole = popdist.data_loader(Augmented(), 4, sampler=make())
        assert found == received(list(whole))
        assert received(list(rest)) == received(list(whole)) != found


def law_sampled_indices_are_the_same_everywhere(_directory: Path) -> None:
    """Each hears who has others, or that one has failed; the one that failed has its own error."""
    if popdist.num_instances() == 1:
        return
    last = popdist.num_instances() - 1
    generator = torch.Generator().manual_seed(int(is_last()))
    loader = popdist.data_loader(Augmented(), 2, sampler=RandomSampler(range(61), generator=generator))
    with refused(
        popdist.CollectiveError, rf"RandomSampler gave other indices in epoch 0 on.* on instance {last}:"
    ):
        iter(loader)
    loader = popdist.data_loader(Augmented(), 2, sampler=Repeated(KeyError("weights") if is_last() else None))
    others = refused(popdist.CollectiveError, rf"Repeated failed on instance {last} in epoch 0")
    with pytest.raises(KeyError, match="weights") if is_last() else others:
        iter(loader)
    loader = popdist.data_loader(Augmented(), 2, sampler=Repeated(61))
    with refused(popdist.DatasetError, "Repeated gave 61 at position 182"):
        iter(loader)
    with refused(popdist.CollectiveError, rf"data_loader of 61 samples with a (list|range).*instance {last}: "):
        popdist.data_loader(Augmented(), 2, sampler=[1] * 9 if is_last() else range(9))
    popdist.barrier()


class Scaled(Dataset[float]):
    """Another dataset's samples, as programs wrap a part to transform it."""

    def __init__(self, part: Dataset[float]) -> None:
        self.part = part

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return 2 * self.part[index]


def law_sampled_subsets_are_the_same_everywhere(_directory: Path) -> None:
    """Each hears who has others, wherever the Subset is; a state of one goes on with the same one only."""

    def split(seed: int) -> Subset[float]:
        return random_split(range(50), [40, 10], torch.Generator().manual_seed(seed))[0]  # type: ignore[arg-type]

    makers: list[Callable[[int], Any]] = [
        lambda seed: popdist.data_loader(split(seed), 2),
        lambda seed: popdist.data_loader(split(seed), 2, sampler=range(40)),
        lambda seed: popdist.data_loader(Scaled(split(seed)), 2),
        lambda seed: popdist.ReplicaSampler(ConcatDataset([Scaled(split(0)), split(seed)]), 2),
        lambda seed: popdist.data_loader(
            split(seed), 2, packing=popdist.packing.Packing(max_length=8, lengths=[4] * 40), collate_fn=list
        ),
    ]
    for make in makers:
        state = make(1).state_dict()
        make(1).load_state_dict(state)
        with refused(popdist.DatasetError, r"the state was taken with \{'subsets': -?\d+\}"):
            make(2).load_state_dict(state)
        if popdist.num_instances() > 1:
            with refused(
                popdist.CollectiveError,
                rf"the Subset in its dataset has other indices on .*instance {popdist.num_instances() - 1}, so sa",
            ):
                make(int(is_last()))


def law_data_that_differs_between_instances_is_named(_directory: Path) -> None:
    """The warning is of instance 0, and comes wherever the samples stand in memory; equal data has no warning."""

    def data(seed: int) -> Tensor:
        return torch.rand(40, 3, generator=torch.Generator().manual_seed(seed))

    makers: list[Callable[[int], Any]] = [
        lambda seed: popdist.data_loader(TensorDataset(torch.zeros(40, 1), data(seed)), 2),
        lambda seed: popdist.data_loader(list(data(seed)), 2),
        lambda seed: popdist.data_loader(Scaled(TensorDataset(data(seed))), 2),  # type: ignore[arg-type]
        lambda seed: popdist.ReplicaSampler(ConcatDataset([TensorDataset(data(seed))]), 2),
    ]
    for make in makers:
        make(0)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make(int(is_last()))
        is_told = popdist.num_instances() > 1 and popdist.is_main()
        assert [it for it in found if "the first samples of its dataset" in str(it.message)] == found
        assert len(found) == is_told


class Stream:
    """Items that hold their number and what was drawn for it; the last instance's may be cut off."""

    def __init__(self, length: int, cut: int = 0) -> None:
        self.length = length - cut * is_last()

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.length):
            drawn = random.random()  # noqa: S311 - what programs use
            yield torch.tensor([index, drawn, torch.rand(()).item()], dtype=torch.float64)


def received(batches: list[Batch]) -> list[float]:
    """All rows of all instances, step by step and replica by replica."""
    rows = [popdist.gather(list(batch)) for batch in batches]
    return [value for step in rows for value in step.flatten().tolist()]


def stream_loader(
    length: int, cut: int = 0, num_workers: int = 0, *, drop_last: bool = False, persistent_workers: bool = False
) -> ReplicaLoader:
    """A loader over a stream."""
    return popdist.data_loader(
        popdist.shard_iterable(Stream(length, cut)),
        2,
        accumulation=2,
        drop_last=drop_last,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )


def law_a_stream_is_dealt_item_by_item(_directory: Path) -> None:
    """Item i goes to replica i mod n, each comes once, the epochs differ, workers or not."""
    replicas = popdist.num_replicas()
    for length in (0, 1, replicas + 1, 4 * replicas, 11 * replicas + 3):
        loader = stream_loader(length)
        batches = list(loader)
        for batch in batches:
            for micro in batch.micro_batches:
                if micro.num_samples:
                    assert {int(row[0]) % replicas for row in micro.content} == {micro.replica}
                else:
                    assert micro.content is None
        found = received(batches)
        assert sorted(found[::3]) == list(range(length))
        assert sum(batch.num_samples_job for batch in batches) == length
        assert not length or received(list(loader)) != found
        if length == 11 * replicas + 3:
            workers = stream_loader(length, num_workers=2, persistent_workers=True)
            assert received(list(workers)) == found
            loader.set_epoch(1)
            assert received(list(workers)) == received(list(loader))


def law_a_stream_is_resumed_where_the_loop_stood(_directory: Path) -> None:
    """Nothing lost, nothing twice, the same random numbers."""
    length = 11 * popdist.num_replicas() + 3
    whole = received(list(stream_loader(length)))
    loader = stream_loader(length, num_workers=2)
    first = received(list(itertools.islice(loader, 2)))
    rest = stream_loader(length)
    rest.load_state_dict(loader.state_dict())

    assert first + received(list(rest)) == whole
    with refused(popdist.DatasetError, "the state was taken with {'seed': 0}"):
        popdist.data_loader(popdist.shard_iterable(Stream(3)), 1, seed=1).load_state_dict(loader.state_dict())
    with refused(popdist.DatasetError, "a stream has no indices to shuffle"):
        popdist.data_loader(popdist.shard_iterable(Stream(3)), 1, shuffle=True)


def law_the_epoch_of_a_stream_ends_together(_directory: Path) -> None:
    """An instance whose stream was cut off gets empty batches, or with drop_last ends the epoch for all."""
    replicas = popdist.num_replicas()
    length = 12 * replicas
    batches = list(stream_loader(length, cut=6 * replicas))
    assert len(batches) == 3
    if is_last():
        assert [batch.num_samples > 0 for batch in batches] == [True, True, False]
    dropped = list(stream_loader(length, cut=6 * replicas, drop_last=True))
    assert len(dropped) == (3 if popdist.num_instances() == 1 else 1)
    assert (
        len({tuple(row) for row in popdist.all_gather(torch.tensor([len(batches), len(dropped)])).tolist()}) == 1
    )


def law_a_stream_alone_is_this_instances_items(_directory: Path) -> None:
    """Without data_loader it gives the items of the local replicas; torch's own workers share them."""
    items = popdist.shard_iterable(Stream(3 * popdist.num_replicas() + 1))
    own = [int(item[0]) for item in items]
    assert {number % popdist.num_replicas() for number in own} <= set(popdist.local_replicas())
    assert popdist.weighted_mean(len(own), 1) * popdist.num_instances() == 3 * popdist.num_replicas() + 1
    plain = torch.utils.data.DataLoader(items, batch_size=None, num_workers=2)
    assert sorted(int(item[0]) for item in plain) == own
