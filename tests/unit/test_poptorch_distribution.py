"""What options and loaders of poptorch take from a job: one process poses as each of its instances in turn.

Holds popdist.poptorch, poptorch.options.job_options, poptorch.environment and poptorch.data.combined_batches.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import popdist
import poptorch
from popdist.ground.contract import Contract
from poptorch.executor.compiled_model import reduction_of

OTHER_LAUNCHERS: list[dict[str, str]] = [
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    {"PMI_RANK": "1", "PMI_SIZE": "4"},
    {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
]

MakeOptions = Callable[[], poptorch.Options]


class Squares(Dataset[torch.Tensor]):
    """Sample i is i squared."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


class Loss(torch.nn.Linear):
    """A line, and the mean of its results for a loss."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean."""
        return poptorch.identity_loss(super().forward(x), reduction="mean")


def pose(patch: pytest.MonkeyPatch, instance: int, num_instances: int, num_replicas: int, ipus: int = 1) -> None:
    """Have the environment of an instance under poprun."""
    contract = Contract(
        num_instances=num_instances,
        instance_index=instance,
        num_local_instances=num_instances,
        local_instance_index=instance,
        num_replicas=num_replicas,
        ipus_per_replica=ipus,
    )
    for name, value in contract.to_env().items():
        patch.setenv(name, value)


def read(loader: poptorch.DataLoader) -> list[int]:
    """The samples of an epoch, in order."""
    return [round(float(value) ** 0.5) for batch in loader for value in batch]


@pytest.mark.parametrize("make", [popdist.poptorch.Options, poptorch.Options])
@pytest.mark.parametrize("instance", range(4))
def test_options_know_the_job(monkeypatch: pytest.MonkeyPatch, instance: int, make: MakeOptions) -> None:
    """Both kinds know the process, popdist's the local replicas too; the job's replicas are numbered in order."""
    pose(monkeypatch, instance, 4, 8)
    options = make()
    if make is poptorch.Options:
        options.replicationFactor(popdist.getNumLocalReplicas())

    assert (options.Distributed.processId, options.Distributed.numProcesses) == (instance, 4)
    assert options.toDict()["replication_factor"] == options.replication_factor == 2
    assert options.Distributed.numProcesses * options.replication_factor == popdist.getNumTotalReplicas()
    assert options.Distributed.processId * options.replication_factor == popdist.getReplicaIndexOffset()
    assert not popdist.is_initialized()


def test_the_job_gives_a_replica_its_ipus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may say as many, by name or position, and no other number; without poprun any."""
    assert popdist.poptorch.Options(8).replication_factor == 1
    pose(monkeypatch, 0, 1, 2, ipus=4)
    for options in (
        popdist.poptorch.Options(),
        popdist.poptorch.Options(4),
        popdist.poptorch.Options(ipus_per_replica=4),
    ):
        assert (options.replication_factor, options.Distributed.numProcesses) == (2, 1)
    with pytest.raises(popdist.ContractError, match=r"ipus_per_replica=2.*each replica 4.*--ipus-per-replica 2"):
        popdist.poptorch.Options(2)


def test_a_model_that_is_whole_trains_in_no_shared_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """PopTorch's own pipelines are inside of a process: instances that share a replica would all hold it whole."""
    pose(monkeypatch, 0, 1, 1, ipus=2)
    monkeypatch.setenv("POPDIST_NUM_INSTANCES_PER_REPLICA", "2")
    monkeypatch.setenv("POPDIST_INSTANCE_INDEX_IN_REPLICA", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(poptorch.Error, match=r"2 instances share 1 replicas .* start it without --parallelism"):
        reduction_of(popdist.poptorch.Options())


@pytest.mark.parametrize("env", OTHER_LAUNCHERS)
def test_any_launcher_s_processes_divide_the_data(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    """As popdist joins their jobs; a model of one process leaves the job by ``disable``."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for options in (poptorch.Options(), popdist.poptorch.Options()):
        assert (options.Distributed.processId, options.Distributed.numProcesses) == (1, 4)
        assert read(poptorch.DataLoader(options, Squares(8))) == [2, 3]
    local = poptorch.Options()
    local.Distributed.disable()
    assert read(poptorch.DataLoader(local, Squares(8))) == list(range(8))


def test_replicas_that_are_not_those_of_the_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers and what to do; an inference has as many as it says."""
    pose(monkeypatch, 0, 1, 2)
    model, samples = torch.nn.Linear(1, 1), torch.ones(3, 1)
    with pytest.raises(
        poptorch.Error, match=r"replicationFactor\(3\).*instance 2 replicas.*Options\(\).*replicas 3"
    ):
        poptorch.trainingModel(Loss(), poptorch.Options().replicationFactor(3))(samples)
    assert poptorch.inferenceModel(model, poptorch.Options().replicationFactor(3))(samples).shape == (3, 1)


def test_poprun_comes_before_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its variables still say."""
    pose(monkeypatch, 2, 4, 4)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert poptorch.Options().Distributed.processId == 2


@settings(max_examples=30, deadline=None)
@given(
    counts=st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 4), (4, 4), (4, 8)]),
    iterations=st.integers(1, 2),
    accumulation=st.integers(1, 2),
    extra=st.integers(0, 70),
    seed=st.none() | st.integers(0, 9),
    drop_last=st.booleans(),
)
def test_instances_read_each_sample_once(
    counts: tuple[int, int],
    iterations: int,
    accumulation: int,
    extra: int,
    seed: int | None,
    drop_last: bool,  # noqa: FBT001 - drawn
) -> None:
    """Blocks in the order of the instances, of the dataset or of one permutation, in combined batches."""
    num_instances, num_replicas = counts
    combined = 2 * iterations * accumulation * num_replicas // num_instances
    num_samples, blocks = combined * num_instances + extra, []
    for instance in range(num_instances):
        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
            pose(patch, instance, num_instances, num_replicas)
            options = popdist.poptorch.Options().deviceIterations(iterations)
            options.Training.gradientAccumulation(accumulation)
            if seed is not None:
                options.randomSeed(seed)
            loader = poptorch.DataLoader(
                options, Squares(num_samples), batch_size=2, shuffle=seed is not None, drop_last=drop_last
            )
            assert loader.combinedBatchSize == combined
            assert options.isFrozen()
            blocks.append(read(loader))
    joined = [sample for block in blocks for sample in block]

    assert len(joined) == len(set(joined))
    if drop_last:
        assert {len(block) for block in blocks} == {combined * (num_samples // (combined * num_instances))}
    else:
        assert sorted(joined) == list(range(num_samples))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert seed is not None or joined == list(range(len(joined)))


def test_a_loader_freezes_the_options_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts, too; a copy is another's."""
    pose(monkeypatch, 1, 2, 2)
    options = popdist.poptorch.Options()
    poptorch.DataLoader(options, Squares(4))
    changes: list[Callable[[Any], object]] = [
        lambda it: it.deviceIterations(2),
        lambda it: it.Training.gradientAccumulation(2),
        lambda it: it.set(replication_factor=2),
        lambda it: it.randomSeed(1),
    ]
    for change in changes:
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change(options)
    clone = options.clone().deviceIterations(2)
    assert (clone.device_iterations, clone.Distributed.processId) == (2, 1)
    assert not clone.isFrozen()


def test_a_loader_s_defaults_are_poptorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incomplete batches are dropped, and workers stay where there are any."""
    pose(monkeypatch, 0, 2, 2)
    loader = poptorch.DataLoader(popdist.poptorch.Options(), Squares(11), batch_size=2)
    assert (len(loader), loader.drop_last, loader.persistent_workers) == (2, True, False)
    assert poptorch.DataLoader(popdist.poptorch.Options(), Squares(11), num_workers=1).persistent_workers
    whole = poptorch.DataLoader(popdist.poptorch.Options(), Squares(11), auto_distributed_partitioning=False)
    assert read(whole) == list(range(11))


def test_iterable_data_of_several_instances_are_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one process may leave them to the loader."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    assert len(list(poptorch.DataLoader(popdist.poptorch.Options(), Stream(), batch_size=2))) == 2
    pose(monkeypatch, 0, 2, 2)
    with pytest.raises(AssertionError):
        poptorch.DataLoader(popdist.poptorch.Options(), Stream())
