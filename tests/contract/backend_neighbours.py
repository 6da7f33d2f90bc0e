"""What torch builds on process groups runs on the backend, and gives what one process alone would give."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.contract.forked_ranks import Rank
from tests.torch_names import HAS_FSDP_ON_CPU

NUM_STEPS = 3
FULLY_SHARDED = ("neighbour_fully_shard", "neighbour_distributed_checkpoint")


def run_all(rank: Rank) -> None:
    """Every neighbour, in the order of this file."""
    warnings.simplefilter("ignore")
    for name, neighbour in list(globals().items()):
        if name.startswith("neighbour_"):
            distributed.barrier()
            is_refused = not HAS_FSDP_ON_CPU and name in FULLY_SHARDED
            with pytest.raises(AttributeError, match="record_event") if is_refused else nullcontext():
                neighbour(rank)


def network() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 1))


def batches(rank: Rank) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each step: the samples of all ranks, and this rank's."""
    for step in range(NUM_STEPS):
        whole = torch.randn(4 * rank.num_ranks, 6, generator=torch.Generator().manual_seed(step))
        yield whole, whole[4 * rank.rank : 4 * (rank.rank + 1)]


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """What all are trained with."""
    return torch.optim.Adam(parameters, lr=0.02)


def trained_alone(rank: Rank, max_norm: float = 1e9) -> nn.Module:
    """What one process makes of the whole batches."""
    model = network()
    optimizer = adam(model.parameters())
    for whole, _ in batches(rank):
        optimizer.zero_grad()
        model(whole).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def train(
    model: nn.Module,
    rank: Rank,
    optimizer: torch.optim.Optimizer | None = None,
    clip: Callable[[], object] = lambda: None,
) -> nn.Module:
    """Some steps with each rank's own part of the batches."""
    optimizer = optimizer or adam(model.parameters())
    for _, mine in batches(rank):
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        clip()
        optimizer.step()
    return model


def assert_close(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Equal but for the order of additions."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (one - other).abs().max()


def whole(tensor: object) -> Tensor:
    """All of a tensor whose parts the ranks hold."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert isinstance(full, Tensor)
    return full.detach()


def mesh(rank: Rank) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (rank.num_ranks,))


@contextmanager
def shared_folder(rank: Rank) -> Iterator[Path]:
    """A folder of rank 0's, until all have left it."""
    with TemporaryDirectory(prefix="popdist-dcp-") as mine:
        name = [mine]
        distributed.broadcast_object_list(name)
        yield Path(name[0])
        distributed.barrier()


def neighbour_distributed_data_parallel(rank: Rank) -> None:
    """As over gloo, whose bits are the same with two ranks; with small buckets, so that there are several."""
    ours = train(DistributedDataParallel(network(), bucket_cap_mb=1 / 1024), rank)
    theirs = train(DistributedDataParallel(network(), process_group=rank.gloo, bucket_cap_mb=1 / 1024), rank)
    assert_close(ours.parameters(), trained_alone(rank).parameters())
    assert_close(ours.parameters(), theirs.parameters())
    if rank.num_ranks == 2:
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def neighbour_data_parallel_hooks(rank: Rank) -> None:
    """One that reduces in half precision chains futures; PowerSGD's waits for further rounds in callbacks."""
    powers = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    hooks: list[tuple[object, Callable[..., Any]]] = [
        (None, default_hooks.fp16_compress_hook),
        (powers, power_sgd.powerSGD_hook),
    ]
    for state, hook in hooks:
        model = DistributedDataParallel(network(), bucket_cap_mb=1 / 1024)
        model.register_comm_hook(state, hook)
        (weight, *_) = train(model, rank).parameters()
        summed = weight.detach().clone()
        distributed.all_reduce(summed)
        assert torch.allclose(summed / rank.num_ranks, weight)


def neighbour_fully_shard(rank: Rank) -> None:
    """FSDP2, with gradients clipped by the norm of all shards."""
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh(rank))
    fully_shard(model, mesh=mesh(rank))
    train(model, rank, clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert_close(map(whole, model.parameters()), trained_alone(rank, max_norm=0.01).parameters())


def neighbour_dtensor(rank: Rank) -> None:
    """Tensors that are dealt out, added up, dealt out another way, and put together."""
    numbers = torch.arange(24.0).reshape(8, 3)
    dealt = distribute_tensor(numbers, mesh(rank), [Shard(0)])
    assert torch.equal(whole(dealt), numbers)
    assert torch.equal(whole(dealt.redistribute(placements=[Shard(1)])), numbers)
    assert torch.equal(whole(dealt.redistribute(placements=[Replicate()])), numbers)
    assert whole(dealt.sum()).item() == numbers.sum().item()
    partial = DTensor.from_local(numbers.clone(), mesh(rank), [Partial()])
    assert torch.equal(whole(partial.redistribute(placements=[Shard(0)])), numbers * rank.num_ranks)


def neighbour_distributed_checkpoint(rank: Rank) -> None:
    """Shards are saved by all ranks and loaded into another model's; whole tensors, too."""
    with shared_folder(rank) as path:
        saved, loaded = network(), network()
        for model in (saved, loaded):
            fully_shard(model, mesh=mesh(rank))
        train(saved, rank)
        save(get_model_state_dict(saved), checkpoint_id=path)
        state = get_model_state_dict(loaded)
        load(state, checkpoint_id=path)
        loaded.load_state_dict(state)
        assert all(map(torch.equal, map(whole, loaded.parameters()), map(whole, saved.parameters())))


def neighbour_zero_redundancy_optimizer(rank: Rank) -> None:
    """Each rank updates its part and sends it to the others; its state is put together on one."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.02)
    train(model, rank, optimizer)
    assert_close(model.parameters(), trained_alone(rank).parameters())
    optimizer.consolidate_state_dict(to=rank.num_ranks - 1)
    if rank.is_last:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def neighbour_compiled_functional_collectives(rank: Rank) -> None:
    """In a graph of torch.compile, whole: the graph's own calls reach the backend, and have gradients."""
    group = distributed.group.WORLD
    assert group is not None

    def step(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = functional.all_reduce(tensor, "sum", group)
        rows = functional.all_gather_tensor(tensor * 2, 0, group)
        part = functional.reduce_scatter_tensor(rows, "sum", 0, group)
        return total + 1, rows, part

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    mine = torch.arange(4.0) + rank.rank
    total, rows, part = compiled(mine)
    everyone = [torch.arange(4.0) + other for other in range(rank.num_ranks)]
    assert torch.equal(total, sum(everyone, torch.ones(4)))
    assert torch.equal(rows, 2 * torch.cat(everyone))
    assert torch.equal(part, 2 * rank.num_ranks * everyone[rank.rank])


def neighbour_compiled_data_parallel(rank: Rank) -> None:
    """torch.compile around DistributedDataParallel."""
    model = DistributedDataParallel(network())
    train(torch.compile(model, backend="aot_eager"), rank)  # type: ignore[arg-type] # it is a module
    assert_close(model.parameters(), trained_alone(rank).parameters())
