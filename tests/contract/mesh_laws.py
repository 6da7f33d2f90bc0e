"""The laws of replicas that several instances share: their mesh, their samples, and what counts once for each."""

import gc
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

import popdist
from popdist import packing
from popdist.ground.layout import ReplicaPart
from popdist.job import context
from poptorch.stubs import horovod_torch
from tests.contract import training_recipes
from tests.contract.collective_laws import refused
from tests.contract.laws import TIMEOUT_SECONDS

NUM_SAMPLES = 22


def train_copies() -> dict[str, str]:
    """The digests of what `training_recipes` trains, and a ShardedOptimizer: each instance has a whole copy."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    digests = {}
    for recipe in (*RECIPES, train_sharded):
        torch.manual_seed(0)
        digests[recipe.__name__] = popdist.checksum(recipe())
    return digests


RECIPES = (
    training_recipes.recipe_forwarded_methods_and_a_moving_average,
    training_recipes.recipe_adversaries,
    training_recipes.recipe_closure,
    training_recipes.recipe_batch_norm_groups,
)


def lose_one() -> list[str]:
    """The last instance is killed; what the others hear of it in a step, and in a barrier of the job."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, checks="off")
    model = popdist.ReplicatedModel(nn.Linear(1, 1))
    popdist.barrier()
    if popdist.instance_index() == popdist.num_instances() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    messages = []
    try:
        train_on_ones(model)
    except popdist.BackendError as error:
        messages.append(str(error))
    with pytest.raises(popdist.BackendError) as raised:
        popdist.barrier()
    return [*messages, str(raised.value)]


def train_on_ones(model: popdist.ReplicatedModel) -> None:
    """One step's gradient."""
    for x in model.micro_batches(torch.ones(1, 1)):
        loss: Tensor = model(x).sum()
        loss.backward()


def train_sharded() -> nn.Module:
    """Dropout, statistics of batches, and an optimizer whose state the replicas share."""
    module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
    model = popdist.ReplicatedModel(module)
    optimizer = popdist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(3):
        for x, y in model.micro_batches(training_recipes.batch()):
            cross_entropy(model(x), y).backward()
        optimizer.step()
    return module


def part() -> ReplicaPart:
    """What this instance holds."""
    return context.environment().contract.replica_part


def size() -> int:
    """The instances of a replica."""
    return context.environment().contract.parallelism.instances_per_replica


def noun() -> str:
    """What the members of the group are called that adds gradients."""
    return "replica" if size() > 1 else "instance"


def law_the_mesh_is_that_of_the_job() -> None:
    """It has all dimensions, the ranks of torch are the instances, and it is made once."""
    mesh, own = popdist.device_mesh(), part()
    parallelism = context.environment().contract.parallelism
    assert mesh.mesh_dim_names == ("replica", "pipeline", "tensor")
    assert mesh.shape == (popdist.num_replicas(), parallelism.pipeline, parallelism.tensor)
    assert tuple(mesh.get_coordinate() or ()) == (own.replica, own.stage, own.shard)
    assert mesh.mesh.flatten().tolist() == list(range(popdist.num_instances()))
    assert popdist.device_mesh() is mesh
    assert (dist.get_rank(), dist.get_backend()) == (popdist.instance_index(), "popdist")
    for dimension in mesh.mesh_dim_names:
        total = torch.tensor([popdist.instance_index()])
        dist.all_reduce(total, group=mesh[dimension].get_group())
        assert total.item() == sum(mesh[dimension].mesh.tolist())


def law_counts_are_those_of_replicas() -> None:
    """The numbers that programs deal by do not know of a replica's instances."""
    assert popdist.num_instances() == popdist.num_replicas() * size()
    assert popdist.replica_index() == popdist.instance_index() // size()
    assert popdist.local_replicas() == range(popdist.replica_index(), popdist.replica_index() + 1)
    assert popdist.is_main() == (popdist.instance_index() == 0)
    if size() > 1:
        numbers_of_page = context.data_parallel_group().job_numbers
        assert numbers_of_page == tuple(range(part().index, popdist.num_instances(), size()))
        with refused(popdist.ContractError, "averages over all ranks, and . instances share . replicas"):
            horovod_torch.init()
        with refused(popdist.ContractError, "num_local_replicas=2, and in this job . instances share"):
            popdist.ReplicatedModel(nn.Linear(1, 1), num_local_replicas=2)


def numbers(loader: Any) -> list[int]:
    """All numbers that this instance reads, in their order."""
    return [int(number) for batch in loader for x in batch for number in torch.as_tensor(x).flatten()]


def law_a_replica_s_instances_get_its_samples() -> None:
    """All the same ones, whatever deals them; over the replicas each sample comes once."""
    data = torch.arange(NUM_SAMPLES)
    lengths = [1 + number % 4 for number in range(NUM_SAMPLES)]
    rows = [{"input_ids": torch.full((length,), number)} for number, length in enumerate(lengths)]
    packed = packing.Packing(max_length=4, lengths=lengths, padding={"input_ids": 0})
    for own in (
        numbers(popdist.data_loader(data, 2, shuffle=True, seed=3)),
        numbers(popdist.data_loader(data, 2, sampler=SequentialSampler(data))),
        numbers(popdist.data_loader(popdist.shard_iterable(range(NUM_SAMPLES)), 2)),
        [it for step in popdist.ReplicaSampler(NUM_SAMPLES, 2, shuffle=True) for it in step],
        [it for batch in popdist.data_loader(rows, 1, packing=packed) for it in batch.indices],
    ):
        told = torch.tensor([len(own), *own, *[-1] * (NUM_SAMPLES - len(own))])
        everybody = popdist.all_gather(told).view(popdist.num_replicas(), size(), -1)
        assert (everybody == everybody[:, :1]).all()
        assert sorted(popdist.gather(torch.tensor(own)).tolist()) == list(range(NUM_SAMPLES))


def law_a_replica_counts_once() -> None:
    """Where all of its instances count, and where its last alone does, as that of a pipeline."""
    replicas = popdist.num_replicas()
    expected = sum(range(1, replicas + 1)) / replicas
    assert popdist.weighted_mean(1 + popdist.replica_index(), 1) == expected
    mean = popdist.Mean()
    if part().index == size() - 1:
        mean.add(1 + popdist.replica_index(), 1)
    assert mean.compute() == expected
    rows = torch.tensor([popdist.replica_index()])
    assert popdist.gather(rows if part().index == size() - 1 else []).tolist() == list(range(replicas))


def law_work_for_some_replicas_is_that_of_their_instances() -> None:
    """All instances of a replica that is listed run it, and its collectives are theirs."""
    last = popdist.num_replicas() - 1

    def work() -> int:
        popdist.barrier()
        assert popdist.weighted_mean(popdist.replica_index(), 1) == last
        popdist.broadcast_weights(nn.Linear(1, 1), root=last)
        return len(popdist.all_gather(torch.zeros(1)))

    done = popdist.execute_on_instances({last}, work)
    assert done == (size() if popdist.replica_index() == last else None)
    with refused(popdist.CollectiveError, f"expected one or several of {noun()}s? .*{last}"):
        popdist.execute_on_instances({popdist.num_replicas()}, work)
    if popdist.num_replicas() > 1:
        popdist.execute_on_instances({last}, _train_alone)


def _train_alone() -> None:
    with refused(popdist.CollectiveError, rf"over all \d {noun()}s of the job, but this code runs on {noun()} 1"):
        popdist.all_reduce_gradients(nn.Linear(1, 1))
    with refused(popdist.CollectiveError, "all instances of the job make it together"):
        popdist.device_mesh()


def law_other_weights_are_told_with_the_part() -> None:
    """The replica is named, and which part of it."""
    if popdist.num_replicas() > 1:
        place = rf" \(stage {part().stage}, shard {part().shard}\)" if size() > 1 else ""
        with refused(
            popdist.WeightsError, f"{noun()} 1{place} differ from those of {noun()} 0{place}: {noun()} 1"
        ):
            popdist.ReplicatedModel(nn.Linear(2, 3 if popdist.replica_index() else 2))


def law_another_mesh_is_refused() -> None:
    """A parameter over other instances than share it, and a model whose gradients DDP would mix, early or late."""
    popdist.finalize()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)
    early = DistributedDataParallel(nn.Linear(2, 2))
    if size() > 1:
        with refused(popdist.WeightsError, "DistributedDataParallel over instances 0 .* parts of a replica"):
            popdist.device_mesh()
    del early
    gc.collect()
    popdist.device_mesh()
    everybody = init_device_mesh("cpu", (popdist.num_instances(),))
    if size() > 1:
        with refused(popdist.WeightsError, "DistributedDataParallel over instances 0 .* parts of a replica"):
            DistributedDataParallel(nn.Linear(2, 2))
    DistributedDataParallel(nn.Linear(2, 2), device_mesh=popdist.device_mesh()["replica"])
    if popdist.device_mesh()["pipeline"].size() > 1:
        model = nn.Linear(4, 4, bias=False)
        across = popdist.device_mesh()["pipeline"]
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), across, [Shard(0)]))
        with refused(popdist.WeightsError, "weight is a DTensor on the mesh .* share the layers of this"):
            popdist.ReplicatedModel(model)
    if popdist.num_replicas() > 1:
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), everybody, [Shard(0)]))
        with refused(
            popdist.WeightsError,
            "weight is a DTensor on the mesh .* of instances 0 .*: gradients are added over repl",
        ):
            popdist.ReplicatedModel(model)


def law_all_instances_leave_after_the_same_step() -> None:
    """Whoever is asked: the headers of its steps reach a part of the job only."""
    for whom in range(popdist.num_instances()):
        model = popdist.ReplicatedModel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps, seen = list[int](), list[int]()
        popdist.on_preemption(lambda: seen.append(len(steps)))  # noqa: B023 - it is called in this round
        with pytest.raises(SystemExit):  # noqa: PT012 - a loop
            for batch in popdist.data_loader(torch.randn(64, 2), 2):
                if (len(steps), popdist.instance_index()) == (3, whom):
                    os.kill(os.getpid(), signal.SIGTERM)
                for x in model.micro_batches(batch):
                    model(x).sum().backward()
                optimizer.step()
                steps.append(0)
        assert seen == [4]


def law_the_job_can_be_made_again() -> None:
    """With another mesh, after a DDP model of an earlier job, and beside a default group of the program."""
    popdist.finalize()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)
    kept = DistributedDataParallel(nn.Linear(2, 2))
    popdist.finalize()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    mesh = popdist.device_mesh()
    del kept
    popdist.finalize()
    assert not dist.is_initialized()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    assert popdist.device_mesh() is not mesh
    popdist.finalize()
    dist.init_process_group("gloo")
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    popdist.device_mesh()
    popdist.finalize()
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    if popdist.num_instances() > 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        with refused(
            popdist.BackendError, r"device_mesh\(\): instance 0 of . is rank 0 of 1 in the default group"
        ):
            popdist.device_mesh()
        dist.destroy_process_group()
    popdist.device_mesh()
    popdist.barrier()  # instance 0 has the store that the others still ask
