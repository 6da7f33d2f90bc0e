"""A transformer's block whose weights are cut over instances learns what one process does; a law for each way."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention

import popdist
from popdist.ground.layout import Parallelism
from popdist.job import context
from popdist.optim import LAMB, LARS, LowPrecision
from tests.running import DEADLINE_SECONDS

NUM_TOKENS, LENGTH, WIDTH, HEADS = 17, 8, 16, 4
NUM_STEPS, NUM_SAMPLES = 5, 8


class Attention(nn.Module):
    """Heads that each instance may have some of."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        """Mix the rows of each sequence."""
        query, key, value = (
            linear(rows).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.as_tensor(self.out(mixed.transpose(1, 2).flatten(2))).clone()  # FSDP wants no views


class Block(nn.Module):
    """A whole small transformer, with one buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each token's next one."""
        if self.training:
            self.steps += 1
        rows = self.embedding(tokens)
        rows = rows + self.attention(self.first_norm(rows))
        rows = rows + self.down(gelu(self.up(self.second_norm(rows))))
        return torch.as_tensor(self.head(rows)).clone()


def plain_styles() -> dict[str, ParallelStyle]:
    """Attention and the layers after it cut, all that is between them copied."""
    cut = dict.fromkeys(("attention.query", "attention.key", "attention.value", "up"), ColwiseParallel())
    return {
        **cut,
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "attention.out": RowwiseParallel(),
        "down": RowwiseParallel(),
    }


def sequence_styles() -> dict[str, ParallelStyle]:
    """As above, and what is between them cut along the sequence; the gradients of norms are partial sums."""
    cut = dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel())
    whole: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return {
        **cut,
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "first_norm": SequenceParallel(use_local_output=True),
        "second_norm": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(**whole),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def mesh() -> DeviceMesh:
    """Of the job: its replicas, and the instances of each."""
    shared = popdist.num_instances() // popdist.num_replicas()
    return init_device_mesh("cpu", (popdist.num_replicas(), shared), mesh_dim_names=("replica", "tensor"))


def hybrid_mesh() -> DeviceMesh:
    """Of a job without shared replicas: half of these have shards of one copy."""
    return init_device_mesh("cpu", (2, popdist.num_instances() // 2), mesh_dim_names=("copy", "shard"))


def plain(module: Block) -> nn.Module:
    """Cut by columns and rows."""
    return parallelize_module(module, mesh()["tensor"], plain_styles())


def sequence(module: Block) -> nn.Module:
    """Cut by columns, rows and sequences."""
    return parallelize_module(module, mesh()["tensor"], sequence_styles())


def fully_sharded(module: Block) -> nn.Module:
    """Sharded within the replica, whose instances all compute the same."""
    for part in (module.attention, module.up, module):
        fully_shard(part, mesh=mesh()["tensor"])
    return module


def whole(module: Block) -> nn.Module:
    """As it is."""
    return module


WAYS: dict[str, Callable[[Block], nn.Module]] = {
    "plain": plain,
    "sequence": sequence,
    "fully sharded": fully_sharded,
    "whole": whole,
}


def full(tensor: Tensor) -> Tensor:
    """A copy of all of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(way: str, accumulation: int = 1) -> tuple[list[Any], str]:
    """What each step makes of gradients, and the weights in the end; and a digest of what is here."""
    torch.manual_seed(3)
    model = popdist.ReplicatedModel(WAYS[way](Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    found = list[Any]()
    for mine in batches():
        for micro in model.micro_batches(mine, accumulation):
            loss_of(model, micro).backward()
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                assert isinstance(parameter.grad, DTensor)
                assert parameter.grad.placements == parameter.placements
        found.append(clipped(model))
        optimizer.step()
    found.append([full(it) for it in model.state_dict().values()])
    return found, popdist.checksum(model)


def batches() -> Iterator[Tensor]:
    """Of this instance's replicas, for each step."""
    numbers = torch.Generator().manual_seed(5)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(NUM_TOKENS, (NUM_SAMPLES, LENGTH + 1), generator=numbers)
        yield tokens.chunk(popdist.num_replicas())[popdist.replica_index()]


def loss_of(model: nn.Module, micro: Tensor) -> Tensor:
    """Of the tokens after the first."""
    return cross_entropy(model(micro[:, :-1]).flatten(0, 1), micro[:, 1:].flatten())


def clipped(model: nn.Module) -> list[Tensor]:
    """The norm of all gradients, and what they are after they were clipped."""
    norm = popdist.clip_grad_norm_(model.parameters(), 0.5)
    return [norm, *(full(it.grad) for it in model.parameters() if it.grad is not None)]


def train_alone(mesh: DeviceMesh, cut: DeviceMesh | None = None) -> list[Any]:
    """As :func:`train`, by ``fully_shard`` over replicas, which adds gradients itself; perhaps of cut layers."""
    torch.manual_seed(3)
    model = Block()
    if cut is not None:
        parallelize_module(model, cut, plain_styles())
    for part in (model.attention, model):
        fully_shard(part, mesh=mesh)
    with pytest.raises(popdist.WeightsError, match="fully_shard adds the gradients of these replicas itself"):
        popdist.ReplicatedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    found = list[Any]()
    for mine in batches():
        optimizer.zero_grad()
        loss_of(model, mine).backward()
        found.append(clipped(model))
        optimizer.step()
    found.append([full(it) for it in model.state_dict().values()])
    return found


def start(backend: str = "popdist") -> None:
    """Join the job, with torch's collectives of a backend."""
    if backend != "popdist":
        distributed.init_process_group(backend)
    popdist.init(timeout_seconds=DEADLINE_SECONDS, torch_distributed=True)


def run_ways(*ways: str) -> dict[str, tuple[list[Any], str]]:
    """What training comes to, in each way."""
    start()
    return {way: train(way) for way in ways} | {f"{way}, 2 micro batches": train(way, 2) for way in ways[:2]}


def run_crossed() -> list[Any]:
    """What training comes to over replicas whose instances have parts of layers."""
    start()
    both = mesh()
    return train_alone(both["replica"], both["tensor"])


def run_refusals() -> None:
    """What several instances cannot share, and what one of them finds."""
    start()
    model = popdist.ReplicatedModel(sequence(Block()), check_finite=True)
    for make in (LAMB, LARS, partial(LowPrecision, optimizer_class=torch.optim.SGD)):
        with pytest.raises(popdist.OptimizerError, match="of a DTensor of shape"):
            make(model.parameters(), lr=0.1)
    with pytest.raises(popdist.OptimizerError, match="ShardedOptimizer of a DTensor of shape"):
        popdist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    spanning = nn.Module()
    spanning.weight = nn.Parameter(DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (4,)), [Shard(0)]))
    with pytest.raises(popdist.WeightsError, match="weight is a DTensor on the mesh"):
        popdist.ReplicatedModel(spanning)
    for wrong in ({"max_norm": "1"}, {"max_norm": 1, "norm_type": 0}):
        with pytest.raises(popdist.GradientError, match="clip_grad_norm_"):
            popdist.clip_grad_norm_(model.parameters(), **wrong)
    cut = next(it for it in model.parameters() if isinstance(it, DTensor) and it.placements[0].is_shard())
    spoiled = cut if popdist.instance_index() == 2 else None
    with pytest.raises(popdist.GradientError, match="NaN or infinity"):
        step_with_nan(model, spoiled, is_outside=False)
    step_with_nan(model, None, is_outside=False)
    before = popdist.clip_grad_norm_(model.parameters(), 0.1)
    assert before > 0.2
    torch.testing.assert_close(model.clip_grad_norm_(10.0), torch.tensor(0.1))
    with pytest.raises(popdist.GradientError, match="NaN or infinity"):
        step_with_nan(model, spoiled, is_outside=True)


def differ() -> None:
    """A layer that each instance has made for itself is found before the first step; the shards' own is not."""
    start()
    for is_cut in (True, False):
        torch.manual_seed(popdist.instance_index())
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if is_cut:
            parallelize_module(module, mesh()["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model = popdist.ReplicatedModel(module)
        with (
            nullcontext()
            if is_cut
            else pytest.raises(popdist.WeightsError, match=r"0\.weight of instance 1 is not")
        ):
            for micro in model.micro_batches(torch.ones(2, 4)):
                model(micro).sum().backward()
    part = DTensor.from_local(torch.ones(2 + popdist.instance_index(), 4), mesh()["tensor"], [Shard(0)])
    longer = nn.ParameterDict({"alike": torch.ones(4), "longer": nn.Parameter(part)})
    with pytest.raises(popdist.WeightsError, match=r"fit together: longer of instance 1 is not that"):
        next(iter(popdist.ReplicatedModel(longer).micro_batches(torch.ones(2, 4))))


def step_with_nan(model: popdist.ReplicatedModel, spoiled: DTensor | None, *, is_outside: bool) -> None:
    """A step in which this instance has a gradient that is not finite, or None of them."""
    handle = None if spoiled is None else spoiled.register_hook(lambda gradient: gradient * math.nan)
    try:
        if is_outside:
            loss_of(model, next(batches())).backward()
            return
        for micro in model.micro_batches(next(batches())):
            loss_of(model, micro).backward()
    finally:
        if handle is not None:
            handle.remove()


def clip_without_mesh() -> None:
    """Whether a plain parameter is a copy is not known, where the program makes the mesh; a DTensor says it."""
    contract = replace(
        context.environment().contract, num_replicas=1, parallelism=Parallelism(instances_per_replica=2)
    )
    os.environ.update(contract.to_env())
    start()
    over = init_device_mesh("cpu", (2,))
    for placement, norm in ((Replicate(), 2.0), (Shard(0), 8**0.5)):
        parameter = nn.Parameter(DTensor.from_local(torch.ones(4), over, [placement]))
        parameter.grad = torch.ones_like(parameter)
        assert popdist.clip_grad_norm_(parameter, 1.0) == torch.tensor(norm)
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.ones(4)
    with pytest.raises(popdist.GradientError, match=r"shape \(4,\) is no DTensor"):
        popdist.clip_grad_norm_(plain, 1.0)


def clip_stages() -> list[tuple[Tensor, Tensor]]:
    """Norms and gradients of two stages with two shards: here, and as torch finds them in one process."""
    start()
    numbers = torch.Generator().manual_seed(1)
    gradients = [torch.randn(4, 6, generator=numbers, dtype=torch.float64) for _ in range(4)]
    shared = popdist.job.context.environment().contract.replica_part
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))["tensor"]
    cut, copied = (
        nn.Parameter(distribute_tensor(gradients[0], over, [Shard(0)])),
        nn.Parameter(gradients[0].clone()),
    )
    found = []
    for norm_type in (2.0, 3.0, math.inf):
        cut.grad = distribute_tensor(gradients[2 * shared.stage], over, [Shard(0)])
        copied.grad = gradients[2 * shared.stage + 1].clone()
        norm = popdist.clip_grad_norm_((it for it in (cut, copied)), 0.5, norm_type)
        expected = [nn.Parameter(torch.zeros_like(it)) for it in gradients]
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.clone()
        found.append((norm, nn.utils.clip_grad_norm_(expected, 0.5, norm_type)))
        for own, whole in ((cut, expected[2 * shared.stage]), (copied, expected[2 * shared.stage + 1])):
            assert own.grad is not None
            assert whole.grad is not None
            found.append((full(own.grad), whole.grad))
    return found


def draw() -> dict[str, Tensor]:
    """What a replica draws in a micro batch: numbers of 1 are kept; and again, from the states of before."""
    start()
    over = mesh()["tensor"]
    model = popdist.ReplicatedModel(
        parallelize_module(nn.Sequential(nn.Linear(4, 4)), over, {"0": ColwiseParallel()})
    )
    ones = torch.ones(4, 64)
    found = {}
    for micro in model.micro_batches(torch.ones(popdist.num_local_replicas(), 4)):
        model(micro).sum().backward()
        states = torch.get_rng_state()
        for again in ("", " again"):
            torch.set_rng_state(states)
            found["plain" + again] = dropout(ones)
            with popdist.parallel.sharded_randomness():
                found["in its region" + again] = dropout(ones)
            for name, placement in (("cut", Shard(0)), ("copied", Replicate())):
                given: Any = dropout(DTensor.from_local(ones, over, [placement]))
                found[name + again] = given.to_local()
            generator = torch.Generator().manual_seed(7)
            given = DTensor.from_local(ones.clone(), over, [Shard(0)]).uniform_(generator=generator)
            found["generator" + again] = given.to_local()
            found["plain, after all" + again] = dropout(ones)
    return found


def run_alone(backend: str) -> list[list[Any]]:
    """What training comes to over all instances, and over copies of shards."""
    start(backend)
    return [train_alone(mesh()["replica"]), train_alone(hybrid_mesh())]
