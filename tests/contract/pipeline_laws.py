"""What holds for `ReplicatedModel.pipeline_step`: run on every instance of jobs whose replicas are pipelines.

A law is a function ``law_...``. What it expects it computes alone, from the samples of all replicas.
"""

import operator
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import popdist
from popdist.errors import BatchError, GradientError, MicroBatchError, OptimizerError, PopdistError
from popdist.job import context
from tests.contract.laws import laws_of
from tests.tree_sums import tree_sum

WIDTH = 16
NUM_MICRO_BATCHES = 8
MICRO_BATCH_SIZE = 2
NUM_SAMPLES = NUM_MICRO_BATCHES * MICRO_BATCH_SIZE
"""Of each replica in a step."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """One of torch's schedules, and which stages an instance has: in a V the second row runs back."""

    name: str
    num_local_stages: int = 2
    is_v: bool = False
    order: int = 1  # of the backward passes; -1: the last micro batch first

    def stages_of(self, place: int, num_places: int) -> list[int]:
        """The stages of instance ``place`` of a pipeline."""
        if self.is_v:
            return [place, 2 * num_places - 1 - place]
        return [place + row * num_places for row in range(self.num_local_stages)]


GPIPE = Kind("ScheduleGPipe", 1)
KINDS = [
    GPIPE,
    Kind("Schedule1F1B", 1),
    Kind("ScheduleLoopedBFS", order=-1),
    Kind("ScheduleInterleaved1F1B"),
    Kind("ScheduleInterleavedZeroBubble"),
    Kind("ScheduleZBVZeroBubble", is_v=True),
    Kind("ScheduleDualPipeV", is_v=True),
]


def run_all() -> int:
    """Every law of this file, in their order; how many there are."""
    popdist.init(torch_distributed=True)
    laws = laws_of(sys.modules[__name__])
    for law in laws:
        law()
    return len(laws)


def digests_of_training() -> list[str]:
    """The checksums of this instance's stage after steps with dropout, of a plain optimizer and a sharded one."""
    popdist.init(torch_distributed=True)
    digests = []
    for is_sharded in (False, True):
        schedule, modules = make_schedule(
            GPIPE, layers=lambda number: nn.Sequential(layer(number), nn.Dropout(0.25))
        )
        model = popdist.ReplicatedModel(modules)
        optimizer: torch.optim.Optimizer
        if is_sharded:
            optimizer = popdist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model.pipeline_step(schedule, samples(popdist.replica_index()))
            optimizer.step()
        digests.append(popdist.checksum(model))
    return digests


def gradients_of_shards() -> None:
    """Stages that are cut into shards, one by columns and one by rows, have the gradients of one process."""
    popdist.init(torch_distributed=True)
    mesh = init_device_mesh(
        "cpu", (popdist.num_replicas(), 2, 2), mesh_dim_names=("replica", "pipeline", "tensor")
    )

    def cut(number: int) -> nn.Module:
        inner = nn.Sequential(layer(2 * number), layer(2 * number + 1))
        plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
        return parallelize_module(inner, mesh["tensor"], plan)

    for kind in (KINDS[1], KINDS[4]):
        schedule, modules = make_schedule(kind, mesh["pipeline"].get_group(), cut)
        model = popdist.ReplicatedModel(modules)
        model.pipeline_step(schedule, samples(popdist.replica_index()))
        numbers = kind.stages_of(mesh["pipeline"].get_local_rank(), 2)
        layers = [2 * number + i for number in numbers for i in range(2)]
        wanted = mean_gradients(4 * kind.num_local_stages, layers)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


def whole_replicas() -> None:
    """A pipeline of one stage, and one with all stages on this instance, which has several replicas."""
    popdist.init(torch_distributed=True)
    group, _ = dist.new_subgroups(1)
    batch = [torch.cat(parts) for parts in zip(*map(samples, popdist.local_replicas()), strict=True)]
    for kind in (GPIPE, KINDS[3]):
        schedule, modules = make_schedule(kind, group)
        model = popdist.ReplicatedModel(modules)
        losses = model.pipeline_step(schedule, batch)
        check_gradients(model, mean_gradients(kind.num_local_stages, range(kind.num_local_stages)), kind)
        assert losses is not None
        assert len(losses) == NUM_MICRO_BATCHES * popdist.num_local_replicas()


@cache
def group_of_stages(backend: str = "popdist") -> dist.ProcessGroup:
    """The group of this replica's pipeline, over this backend of torch.distributed."""
    shape = context.environment().contract.parallelism
    num_ranks = popdist.num_replicas() * shape.pipeline * shape.tensor
    ranks = torch.arange(num_ranks, dtype=torch.int64).reshape(-1, shape.pipeline, shape.tensor)
    lines = ranks.transpose(1, 2).flatten(0, 1).tolist()
    groups: list[Any] = [dist.new_group(line, backend=backend) for line in lines]
    (own,) = (group for line, group in zip(lines, groups, strict=True) if popdist.instance_index() in line)
    return cast("dist.ProcessGroup", own)


def loss_fn(found: Tensor, wanted: Tensor) -> Tensor:
    """A mean over samples."""
    return nn.functional.mse_loss(found, wanted)


def layer(number: int) -> nn.Module:
    """Layer ``number`` of the model, the same wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def samples(replica: int) -> tuple[Tensor, Tensor]:
    """The samples of a replica, and their targets."""
    generator = torch.Generator().manual_seed(100 + replica)
    shape = (NUM_SAMPLES, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def make_schedule(
    kind: Kind,
    group: dist.ProcessGroup | None = None,
    layers: Callable[[int], nn.Module] = layer,
    num_micro_batches: int = NUM_MICRO_BATCHES,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> tuple[Any, nn.ModuleList]:
    """A schedule of this kind with one layer in each stage, and the modules of this instance's stages."""
    group = group or group_of_stages()
    size = dist.get_world_size(group)
    numbers = kind.stages_of(dist.get_rank(group), size)
    modules = nn.ModuleList(map(layers, numbers))
    num_stages = size * kind.num_local_stages
    stages = [
        PipelineStage(module, number, num_stages, CPU, group=group)
        for number, module in zip(numbers, modules, strict=True)
    ]
    make = getattr(schedules, kind.name)
    losses = lambda found, wanted: scale(loss_fn(found, wanted))  # noqa: E731 - that of one schedule
    return make(stages if len(stages) > 1 else stages[0], num_micro_batches, loss_fn=losses), modules


def one_process(num_layers: int, replica: int, order: int) -> tuple[list[Tensor], list[float]]:
    """What the whole model gives in one process that adds the micro batches in this order: gradients, losses."""
    model = nn.Sequential(*map(layer, range(num_layers)))
    pairs = zip(*(it.tensor_split(NUM_MICRO_BATCHES) for it in samples(replica)), strict=True)
    losses = [loss_fn(model(x), y) for x, y in pairs]
    for loss in losses[::order]:
        loss.backward()
    gradients = [it.grad for it in model.parameters() if it.grad is not None]
    return [it / NUM_MICRO_BATCHES for it in gradients], [loss.item() for loss in losses]


def mean_gradients(num_layers: int, numbers: Sequence[int], order: int = 1) -> list[Tensor]:
    """The mean over the replicas of what one process gives, for the weights and biases of some layers."""
    found = [one_process(num_layers, replica, order)[0] for replica in range(popdist.num_replicas())]
    means = [tree_sum(parts, operator.add) / len(found) for parts in zip(*found, strict=True)]
    return [it for number in numbers for it in means[2 * number : 2 * number + 2]]


def check_gradients(model: nn.Module, wanted: Iterable[Tensor], what: object) -> None:
    """Check that the model's gradients have these bits."""
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None, what
        assert torch.equal(parameter.grad, gradient), (what, (parameter.grad - gradient).abs().max())


def law_gradients_and_losses_of_each_schedule_are_those_of_one_process() -> None:
    """To the bit, over gloo and over popdist; LoopedBFS begins its backward passes with the last micro batch."""
    for kind in KINDS:
        for backend in ("gloo", "popdist"):
            group = group_of_stages(backend)
            size, replica = dist.get_world_size(group), popdist.replica_index()
            schedule, modules = make_schedule(kind, group)
            model = popdist.ReplicatedModel(modules)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for share in (False, True):  # the second step begins with gradients that were used
                losses = model.pipeline_step(schedule, samples(replica), share_losses=share)
                has_last = size * kind.num_local_stages - 1 in kind.stages_of(dist.get_rank(group), size)
                assert (losses is not None) == (has_last or share)
                optimizer.step()
            num_layers = size * kind.num_local_stages
            numbers = kind.stages_of(dist.get_rank(group), size)
            check_gradients(model, mean_gradients(num_layers, numbers, kind.order), (kind, backend))
            check_evaluation(model, schedule, kind, num_layers)
            optimizer.zero_grad()
            losses = model.pipeline_step(schedule, samples(replica), share_losses=True)
            check_gradients(model, mean_gradients(num_layers, numbers, kind.order), (kind, backend))
            assert losses is not None
            assert losses.tolist() == one_process(num_layers, replica, kind.order)[1]


@torch.no_grad()
def check_evaluation(model: popdist.ReplicatedModel, schedule: object, kind: Kind, num_layers: int) -> None:
    """Check the losses of the first half of the samples, so of micro batches of another shape."""
    half = [it[: NUM_SAMPLES // 2] for it in samples(popdist.replica_index())]
    if kind.is_v:
        with pytest.raises(BatchError, match="torch cannot evaluate with"):
            model.pipeline_step(schedule, half)
        return
    losses = model.pipeline_step(schedule, half, share_losses=True)
    assert losses is not None
    whole = nn.Sequential(*map(layer, range(num_layers)))
    assert losses.mean().item() == pytest.approx(loss_fn(whole(half[0]), half[1]).item())


class Noisy(nn.Module):
    """A layer with statistics, a counter that is replaced, and random numbers of Python's, numpy's and torch's."""

    calls: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.norm = layer(number), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Torch calls it once more than there are micro batches, on memory that nothing has written."""
        if not self.training:
            return torch.as_tensor(self.norm(self.inner(x)))
        self.calls = self.calls + 1
        noise = random.random() + np.random.random() + torch.rand(())  # noqa: S311 - what layers draw from
        return torch.as_tensor(self.norm(self.inner(x)) * noise)


def law_an_evaluation_changes_no_training() -> None:
    """At any place of the loop, for gradients, statistics and random numbers."""
    for kind in (GPIPE, KINDS[3]):
        wanted = trained_with_evaluations(kind, "")
        for place in ("begin", "between", "before", "after", "begin between before after"):
            assert trained_with_evaluations(kind, place) == wanted, (kind, place)


def trained_with_evaluations(kind: Kind, places: str) -> str:
    """The checksum of a model that was evaluated at these places of each step."""
    schedule, modules = make_schedule(kind, layers=Noisy)
    model, batch = popdist.ReplicatedModel(modules), samples(popdist.replica_index())
    optimizer = torch.optim.AdamW(model.parameters())

    def evaluate(place: str) -> None:
        if place in places.split():
            model.eval()
            with torch.no_grad():
                model.pipeline_step(schedule, [it[: NUM_SAMPLES // 2] for it in batch])
            model.train()

    for _ in range(3):
        evaluate("begin")
        model.pipeline_step(schedule, batch)
        evaluate("between")
        model.pipeline_step(schedule, batch, add=True)
        evaluate("before")
        optimizer.step()
        evaluate("after")
    return popdist.checksum(model)


def law_statistics_are_those_of_the_micro_batches() -> None:
    """Of batch norm in each stage: the pass by which torch learns shapes is not among them."""
    schedule, modules = make_schedule(GPIPE, layers=Normed)
    model = popdist.ReplicatedModel(modules)
    place, size = dist.get_rank(group_of_stages()), dist.get_world_size(group_of_stages())
    model.pipeline_step(schedule, samples(popdist.replica_index()))
    found: list[dict[str, Tensor]] = []
    for replica in range(popdist.num_replicas()):
        whole = nn.Sequential(*map(Normed, range(size)))
        for x in samples(replica)[0].tensor_split(NUM_MICRO_BATCHES):
            whole(x)
        found.append(dict(whole[place].named_buffers()))
    for name, buffer in modules[0].named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(buffer, torch.stack([it[name] for it in found]).mean(0))
        else:
            assert buffer == NUM_MICRO_BATCHES, name


def law_a_scaler_steps_or_skips_on_all_stages() -> None:
    """In each of five steps, of which one stage finds infinity in two; weights are those without these two."""
    for clips, is_fused, is_first in product((False, True), repeat=3):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        schedule, modules = make_schedule(GPIPE, scale=scaler.scale)
        model, batch = popdist.ReplicatedModel(modules), samples(popdist.replica_index())
        optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
        twin_schedule, twin_modules = make_schedule(GPIPE)
        twin = popdist.ReplicatedModel(twin_modules)
        twin_optimizer = torch.optim.AdamW(twin.parameters(), fused=is_fused)
        group = group_of_stages()
        is_at_fault = dist.get_rank(group) == (0 if is_first else dist.get_world_size(group) - 1)
        scales = []
        for number in range(5):
            model.pipeline_step(schedule, batch)
            if number in (1, 2) and is_at_fault:
                next(model.parameters()).grad[0] = torch.inf  # type: ignore[index]
            if clips:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if number not in (1, 2):
                twin.pipeline_step(twin_schedule, batch)
                twin_optimizer.step()
        assert scales == [64.0, 32.0, 16.0, 16.0, 32.0], (clips, is_fused, is_first)
        for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(found, wanted)


def law_closures_are_refused() -> None:
    """LBFGS, and others with a closure, before a weight has changed; an evaluation in one is none of training."""
    schedule, modules = make_schedule(GPIPE)
    model, batch = popdist.ReplicatedModel(modules), samples(popdist.replica_index())
    before = popdist.checksum(model)
    step: Any = partial(model.pipeline_step, schedule, batch)
    for kind in (torch.optim.LBFGS, torch.optim.SGD):
        optimizer: Any = kind(model.parameters(), lr=0.1)
        with pytest.raises(OptimizerError, match=rf"closure of {kind.__name__}\.step\(closure\)"):
            optimizer.step(step)
    assert popdist.checksum(model) == before
    step()
    optimizer.step(torch.no_grad()(step))
    assert popdist.checksum(model) != before


class Normed(nn.Sequential):
    """A layer with batch norm."""

    def __init__(self, number: int) -> None:
        super().__init__(layer(number), nn.BatchNorm1d(WIDTH))


def law_a_loader_s_micro_batches_are_those_of_the_schedule() -> None:
    """One by one, several runs of a schedule that takes fewer, or cut out of one."""
    size = dist.get_world_size(group_of_stages())
    numbers = GPIPE.stages_of(dist.get_rank(group_of_stages()), size)
    rows = [torch.cat(parts) for parts in zip(*map(samples, range(popdist.num_replicas())), strict=True)]
    wanted = mean_gradients(size, numbers)
    for accumulation, num_micro_batches in ((8, 8), (1, 8), (8, 4)):
        schedule, modules = make_schedule(GPIPE, num_micro_batches=num_micro_batches)
        model = popdist.ReplicatedModel(modules)
        loader = popdist.data_loader(
            TensorDataset(*rows), NUM_SAMPLES // accumulation, accumulation=accumulation, drop_last=True
        )
        (batch,) = loader
        losses = model.pipeline_step(schedule, batch, share_losses=True)
        assert losses is not None
        assert losses.tolist() == one_process(size, popdist.replica_index(), 1)[1]
        if num_micro_batches == NUM_MICRO_BATCHES:
            check_gradients(model, wanted, accumulation)
        else:
            found = [it.grad for it in model.parameters()]
            torch.testing.assert_close(found, wanted)
    loader = popdist.data_loader(TensorDataset(*rows), NUM_SAMPLES // 4, accumulation=4, drop_last=True)
    with pytest.raises(BatchError, match="accumulation=8 or a multiple of it"):
        make_and_step(next(iter(loader)))


def make_and_step(batch: object) -> Tensor | None:
    """Make a step of a new model."""
    schedule, modules = make_schedule(GPIPE)
    return popdist.ReplicatedModel(modules).pipeline_step(schedule, batch)


def law_stages_and_replicas_draw_numbers_of_their_own() -> None:
    """And the program's own states are those of before."""
    drawn: list[float] = []

    class Draw(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.inner = layer(number)

        def forward(self, x: Tensor) -> Tensor:
            drawn.append(torch.rand(()).item())
            return torch.as_tensor(self.inner(x))

    before = torch.get_rng_state()
    schedule, modules = make_schedule(GPIPE, layers=Draw)
    model = popdist.ReplicatedModel(modules)
    for _ in range(2):
        model.pipeline_step(schedule, samples(popdist.replica_index()))
        model.zero_grad()
    del drawn[0]  # torch runs a stage once more before its first step, to learn shapes, and drops what that drew
    assert torch.equal(torch.get_rng_state(), before)
    everyone: list[Any] = [None] * popdist.num_instances()
    dist.all_gather_object(everyone, drawn)
    numbers = [number for of_one in everyone for number in of_one]
    assert len(set(numbers)) == len(numbers) == 2 * NUM_MICRO_BATCHES * popdist.num_instances()


def law_a_batch_that_cannot_be_cut_is_refused_on_all_instances() -> None:
    """Before the schedule runs where it is; the next step works."""
    schedule, modules = make_schedule(GPIPE)
    model = popdist.ReplicatedModel(modules)
    replica, is_last = popdist.replica_index(), popdist.replica_index() == popdist.num_replicas() - 1
    x, y = samples(replica)
    for wrong in ((x[:13], y[:13]), (x[:0], y[:0]), (x[:8], y[:8])):
        model.pipeline_step(schedule, (x, y))
        model.zero_grad()
        error = (
            (BatchError, "micro batches of one size|take one shape") if is_last else (MicroBatchError, "could not")
        )
        with pytest.raises(error[0], match=error[1]):
            model.pipeline_step(schedule, wrong if is_last else (x, y))
    model.pipeline_step(schedule, (x, y))
    size = dist.get_world_size(group_of_stages())
    check_gradients(model, mean_gradients(size, [dist.get_rank(group_of_stages())]), "after refusals")


def law_batches_of_any_form_are_taken_with_arguments() -> None:
    """Keyword arguments go to all stages."""
    seen: list[Any] = []

    class Scaled(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.inner = layer(number)

        def forward(self, x: Tensor, *, scale: Tensor, is_loud: bool) -> Tensor:
            seen.append((len(scale), is_loud))
            return torch.as_tensor(self.inner(x) * scale)

    schedule, modules = make_schedule(GPIPE, layers=Scaled)
    x, y = samples(popdist.replica_index())
    batch = {"ids": x, "labels": y, "scale": torch.ones(len(x), 1)}
    model = popdist.ReplicatedModel(modules)
    with pytest.raises(BatchError, match="the batch is a dict"):
        model.pipeline_step(schedule, batch)
    model.pipeline_step(
        schedule,
        batch,
        arguments=lambda batch: ((batch["ids"],), {"scale": batch["scale"], "is_loud": True}, batch["labels"]),
    )
    assert set(seen) == {(MICRO_BATCH_SIZE, True)}
    size = dist.get_world_size(group_of_stages())
    check_gradients(model, mean_gradients(size, [dist.get_rank(group_of_stages())]), "arguments")


def law_sums_are_not_divided() -> None:
    """For losses that are sums; gradients of before are added where the program says so."""
    schedule, modules = make_schedule(GPIPE)
    schedule.scale_grads = False
    model, batch = popdist.ReplicatedModel(modules), samples(popdist.replica_index())
    model.pipeline_step(schedule, batch, reduction="sum")
    first = [it.grad.clone() for it in model.parameters() if it.grad is not None]
    size = dist.get_world_size(group_of_stages())
    wanted = mean_gradients(size, [dist.get_rank(group_of_stages())])
    torch.testing.assert_close(first, [it * NUM_MICRO_BATCHES * popdist.num_replicas() for it in wanted])
    model.pipeline_step(schedule, batch, reduction="sum", add=True)
    check_gradients(model, [it * 2 for it in first], "add")


def law_what_is_not_finite_on_one_stage_is_raised_on_all() -> None:
    """Also on stages whose gradients are finite; the next step works."""
    schedule, modules = make_schedule(GPIPE)
    model, is_first = popdist.ReplicatedModel(modules, check_finite=True), popdist.instance_index() == 0
    batch = samples(popdist.replica_index())
    weight = next(modules.parameters())
    hook = weight.register_hook(lambda gradient: gradient * torch.inf if is_first else gradient)
    with pytest.raises(GradientError, match=r"0\.0\.weight on replica 0 holds NaN .*found on instance 0\)"):
        model.pipeline_step(schedule, batch)
    hook.remove()
    model.pipeline_step(schedule, batch)
    size = dist.get_world_size(group_of_stages())
    check_gradients(model, mean_gradients(size, [dist.get_rank(group_of_stages())]), "finite again")


def law_stages_elsewhere_are_refused() -> None:
    """Over all instances where they are of several replicas, or as many as the pipeline does not have."""
    batch = samples(popdist.replica_index())
    module, size = layer(0), dist.get_world_size(group_of_stages())
    if popdist.num_replicas() > 1:
        stage = PipelineStage(module, dist.get_rank(), dist.get_world_size(), CPU)
        refused(stage, module, r"stages lie on instances .*group=popdist.device_mesh\(\)\['pipeline'\]", batch)
    stage = PipelineStage(module, dist.get_rank(group_of_stages()), size + 1, CPU, group=group_of_stages())
    refused(stage, module, rf"num_stages={size + 1}.*make them with num_stages={size}", batch)


def law_weights_of_other_stages_and_models_are_refused() -> None:
    """Those tied over stages that one instance sees, none at all, and those that the model does not have."""
    group = group_of_stages()
    place, size = dist.get_rank(group), dist.get_world_size(group)
    module, batch = layer(0), samples(popdist.replica_index())

    def stage(module: nn.Module, number: int = place, num_stages: int = size) -> PipelineStage:
        return PipelineStage(module, number, num_stages, CPU, group=group)

    head = layer(1)
    next(iter(head.children())).weight = next(iter(module.children())).weight
    whole = nn.ModuleDict({"embedding": module, "head": head})
    refused(
        stage(module), whole, r"embedding\.0\.weight of stage .* is also the weight of a Linear outside", batch
    )
    refused(stage(nn.Tanh()), module, rf"stage {place} of {size} has no parameters: .* take fewer stages", batch)
    refused(stage(layer(1)), module, r"parameters that the model does not have: .*ReplicatedModel\(stage", batch)
    model = popdist.ReplicatedModel(module)
    for wrong in (7, schedules.ScheduleGPipe(stage(module), NUM_MICRO_BATCHES)):
        with pytest.raises(BatchError, match=r"loss_fn=loss_fn\)"):
            model.pipeline_step(wrong, batch)


def law_a_norm_is_that_of_the_whole_model() -> None:
    """On all instances, where the stage is the wrapped model itself."""
    group = group_of_stages()
    size = dist.get_world_size(group)
    model = popdist.ReplicatedModel(layer(dist.get_rank(group)))
    stage = PipelineStage(model, dist.get_rank(group), size, CPU, group=group)
    schedule = schedules.Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=loss_fn)
    model.pipeline_step(schedule, samples(popdist.replica_index()))
    wanted = nn.utils.get_total_norm(mean_gradients(size, range(size)))
    torch.testing.assert_close(model.clip_grad_norm_(1e-3), wanted)


def refused(stage: PipelineStage, module: nn.Module, match: str, batch: object) -> None:
    """Check that a step is refused."""
    schedule = schedules.ScheduleGPipe(stage, NUM_MICRO_BATCHES, loss_fn=loss_fn)
    with pytest.raises(PopdistError, match=match):
        popdist.ReplicatedModel(module).pipeline_step(schedule, batch)
