"""What communication costs a training step, over gloo and over popdist, by DDP, FSDP2, tensors or pipelines.

    poprun --num-instances 2 python benchmarks/step.py --rounds 50    # and 4
    poprun --num-instances 2 python benchmarks/step.py --tiny

Each round times every loop for some steps, one right after the other, and the next round the other way round. A
loop's communication is the difference, within a round, to the same loop with the gradients in the same place and
the reduction replaced by nothing; of FSDP2, whose weights have to come from somewhere, to one over torch's
backend `fake`, which copies as much from the rank's own memory; of tensor parallel layers, whose instances wait
for each other's computing, to one over `fake` with barriers; and of a pipeline, whose stages wait for each other,
too, to one over popdist whose activations are cut to nothing. ReplicatedModel's is compared with DDP's over gloo.
Of a tiny model, where the gradients are no load, the steps a second of DDP and ReplicatedModel are compared in
place of that. Every instance has one thread.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from measuring import turns
from measuring.documents import put, table
from measuring.medians import CONFIDENCE, Median, median, ratio
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import popdist
from popdist.exchange.host_memory.addition import Reduction
from popdist.exchange.host_memory.messages import Messages, Sent
from popdist.step.checks.step_checks import CheckedSteps

Step = Callable[[], object]

WITHOUT = {
    "DDP, gloo": "DDP, none",
    "DDP, popdist": "DDP, none",
    "ReplicatedModel": "ReplicatedModel, none",
    "FSDP2, gloo": "FSDP2, none",
    "FSDP2, popdist": "FSDP2, none",
    "FSDP2, popdist's memory": "FSDP2, none",
    "tensor parallel, gloo": "tensor parallel, none",
    "tensor parallel, popdist": "tensor parallel, none",
    "pipeline, gloo": "pipeline, none",
    "pipeline, popdist": "pipeline, none",
}
"""Each loop, and the same without communication."""

GLOO, POPDIST, OURS, SHARDED_GLOO, SHARDED, SHARDED_POOL, TENSOR_GLOO, TENSOR, PIPELINE_GLOO, PIPELINE = WITHOUT
GLOOS = {WITHOUT[name]: name for name in (SHARDED_GLOO, TENSOR_GLOO, PIPELINE_GLOO)}
OF_TINY = (GLOO, POPDIST, OURS)
ADDITION = "add_"
"""The memory's own limit for a reduction."""

MOST = {
    2: {POPDIST: 0.25, OURS: 1 / 8, SHARDED: 0.16, TENSOR: 0.25, PIPELINE: 0.25},
    4: {POPDIST: 0.4},
}
"""For each number of instances on two cores: what share of gloo's communication theirs may be."""

LEAST = {GLOO: 5.0, POPDIST: 1.5}
"""How many times as long their steps of a tiny model have to take at least."""

NUM_RESAMPLES = 2000
LEAST_ACTIVATION_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained: a row of equal layers."""

    layers: int
    width: int
    batch_size: int

    def net(self) -> nn.Module:
        """The same on every instance."""
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))

    def batch(self) -> Tensor:
        """This instance's."""
        return torch.randn(
            self.batch_size, self.width, generator=torch.Generator().manual_seed(distributed.get_rank())
        )


TINY = Shape(layers=1, width=100, batch_size=8)
"""10,100 parameters."""


def loops(shape: Shape) -> dict[str, Step]:
    """One step of each."""
    groups = {"gloo": distributed.group.WORLD, "popdist": distributed.new_group(backend="popdist")}
    made = {
        f"DDP, {name}": ddp_step(shape, DistributedDataParallel(shape.net(), process_group=group))
        for name, group in groups.items()
    }
    silent = DistributedDataParallel(shape.net())
    silent.register_comm_hook(None, nothing)
    made["DDP, none"] = ddp_step(shape, silent)
    made[OURS] = replicated_step(shape)
    without = replicated_step(shape)

    def quiet() -> None:
        with mock.patch.object(Reduction, "run", return_value=None), drifting():
            without()

    made["ReplicatedModel, none"] = quiet
    sharded = {SHARDED_GLOO: groups["gloo"], SHARDED: groups["popdist"], SHARDED_POOL: groups["popdist"]}
    sharded["FSDP2, none"] = distributed.new_group(backend="fake")
    for name, group in sharded.items():
        made[name] = fully_sharded_step(shape, group, is_pooled=name == SHARDED_POOL)
    for name, group in {**groups, "none": sharded["FSDP2, none"]}.items():
        made[f"tensor parallel, {name}"] = tensor_parallel_step(name, group)
    made["tensor parallel, none"] = partial(with_barriers, groups["popdist"], made["tensor parallel, none"])
    pipelines = {name: pipeline_step(groups.get(name, groups["popdist"])) for name in (*groups, "none")}
    made |= {f"pipeline, {name}": step for name, step in pipelines.items()}
    made["pipeline, none"] = partial(without_data, pipelines["none"])
    made[ADDITION] = addition(shape)
    return made


def addition(shape: Shape) -> Step:
    """As many numbers as there are gradients, added to as many others, by each instance alone."""
    ours = torch.zeros(sum(parameter.numel() for parameter in shape.net().parameters()))
    return partial(ours.add_, torch.zeros_like(ours))


def drifting() -> AbstractContextManager[object]:
    """Within it no check looks at weights, which drift apart where gradients are not reduced."""
    return mock.patch.object(CheckedSteps, "is_next_checked", return_value=False)


def nothing(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A reduction of DDP's that is none."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def ddp_step(shape: Shape, model: nn.Module) -> Step:
    """As torch's own tutorials write it."""
    x, optimizer = shape.batch(), torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def fully_sharded_step(shape: Shape, group: distributed.ProcessGroup, *, is_pooled: bool) -> Step:
    """The same with each layer's weights in shards; its buffers from the group's own memory if ``is_pooled``."""
    model, mesh = shape.net(), DeviceMesh.from_group(group, "cpu")
    for module in [*model.children(), model]:
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_allocate_memory_from_process_group_for_comm(is_pooled)
    return ddp_step(shape, model)


class Block(nn.Module):
    """Attention and an MLP, as transformers have them."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self._head_width = head_width

    def forward(self, x: Tensor) -> Any:
        """Of shape (samples, tokens, width), as ``x``."""
        heads = [
            it(x).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for it in (self.query, self.key, self.value)
        ]
        x = x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


def tensor_parallel_step(name: str, group: distributed.ProcessGroup) -> Step:
    """A block with its matrices cut as Megatron-LM cuts them; all-reduces of 2 MiB."""
    torch.manual_seed(0)
    # torch takes meshes of the same ranks and names for one, and would use the first one's group for all
    model, mesh = Block(64, 16), DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
    columns = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    parallelize_module(model, mesh, {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(128, 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def with_barriers(group: distributed.ProcessGroup, step: Step) -> None:
    """The step, with a barrier before each all-reduce, as one waits for what the others compute longer, too."""
    all_reduce = _functional_collectives.all_reduce

    def wait_first(*arguments: Any, **named: Any) -> Any:
        distributed.barrier(group)
        return all_reduce(*arguments, **named)

    with mock.patch.object(_functional_collectives, "all_reduce", wait_first):
        step()


def pipeline_step(group: distributed.ProcessGroup) -> Step:
    """A stage of one layer in each instance, four micro batches, and activations of 4 MiB."""
    rank, size, rows = distributed.get_rank(), distributed.get_world_size(), torch.randn(4 * 16384, 64)
    net = Shape(layers=1, width=64, batch_size=16384).net()
    stage = PipelineStage(net, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    given = [rows] if rank == 0 else []
    target = rows if rank == size - 1 else None

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*given, target=target)
        optimizer.step()

    return step


def without_data(step: Step) -> None:
    """The step with activations that hold nothing, so that only the order of the stages' work is left."""
    send = Messages.send

    def cut(self: Messages, data: Tensor, rank: int, tag: int) -> Sent:
        return send(self, data if len(data) < LEAST_ACTIVATION_BYTES else data[:0], rank, tag)

    with mock.patch.object(Messages, "send", cut):
        step()


def replicated_step(shape: Shape, gradient_dtype: torch.dtype | None = None) -> Step:
    """The same with one replica in each instance."""
    model = popdist.ReplicatedModel(shape.net(), gradient_dtype=gradient_dtype)
    x, optimizer = shape.batch(), torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        for rows in model.micro_batches(x):
            model(rows).square().mean().backward()
        optimizer.step()

    return step


def measure(steps: Mapping[str, Step], rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each loop in each round, on the slowest instance."""
    for step in steps.values():
        seconds(step, 2)
    times = turns.by_turns({name: partial(seconds, step, num_steps) for name, step in steps.items()}, rounds)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def seconds(step: Step, num_steps: int) -> float:
    """Of one of ``num_steps`` steps, from when all instances are there."""
    distributed.barrier()
    return turns.seconds(step, num_steps)


def communication(times: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """What the reduction costs the loop in each round."""
    return [with_it - without for with_it, without in zip(times[name], times[WITHOUT[name]], strict=True)]


def share(ours: Sequence[float], theirs: Sequence[float]) -> Median:
    """The ratio of two medians of paired samples, with an interval that the bootstrap gives.

    A difference may be about nothing in a round, so ratios within a round would say little.
    """
    draw, rounds = Random(0), range(len(ours))  # noqa: S311 - resampling
    drawn = sorted(
        statistics.median(ours[it] for it in chosen) / statistics.median(theirs[it] for it in chosen)
        for chosen in (draw.choices(rounds, k=len(rounds)) for _ in range(NUM_RESAMPLES))
    )
    tail = int((1 - CONFIDENCE) / 2 * NUM_RESAMPLES)
    value = statistics.median(ours) / statistics.median(theirs)
    return Median(value=value, lower=drawn[tail], upper=drawn[-1 - tail])


def of_gloo(times: Mapping[str, Sequence[float]], name: str) -> Median:
    """A loop's communication over that of the same library over gloo; ReplicatedModel's over DDP's."""
    return share(communication(times, name), communication(times, GLOOS.get(WITHOUT[name], GLOO)))


def described(times: Mapping[str, Sequence[float]], command: str) -> str:
    """Everything in words and a table."""
    rows = []
    for name in WITHOUT:
        costs, part = communication(times, name), of_gloo(times, name)
        most = MOST.get(distributed.get_world_size(), {}).get(name)
        limit = ["", ""] if most is None else [f"≤ {most:g}", "yes" if part.value <= most else "NO"]
        cells = [f"{median(it).value * 1e3:.3g} ms" for it in (times[name], costs)]
        rows.append([name, *cells, interval(part, 1, ""), *limit])
    rows.append([ADDITION, f"{median(times[ADDITION]).value * 1e3:.3g} ms", *[""] * 4])
    head = ["loop", "a step", "its communication", "of gloo's", "limit", "holds"]
    rounds = len(times[GLOO])
    note = "`add_` adds as many numbers as there are gradients, in each instance alone: the memory's own limit."
    count = distributed.get_world_size()
    return f"{rounds} rounds, {count} instances: `{command}`\n\n{table(head, rows)}\n\n{note}"


def compared(times: Mapping[str, Sequence[float]], command: str) -> str:
    """The steps of a tiny model in words and a table."""
    rows = []
    for name in OF_TINY:
        cells = [interval(median(times[name]), 1e6, "µs"), f"{1 / median(times[name]).value:,.0f}"]
        longer = ratio(times[name], times[OURS])
        least = LEAST.get(name)
        limit = ["", ""] if least is None else [f"≥ {least:g}", "yes" if longer.value >= least else "NO"]
        rows.append([name, *cells, interval(longer, 1, ""), *limit])
    head = ["loop", "a step", "steps a second", "times as long as ReplicatedModel's", "limit", "holds"]
    parts = [f"{len(times[OURS])} rounds", f"{distributed.get_world_size()} instances", "10,100 parameters"]
    return f"{', '.join(parts)}: `{command}`\n\n{table(head, rows)}"


def interval(found: Median, factor: float, unit: str) -> str:
    """A median and between what it lies."""
    value, lower, upper = (f"{it * factor:.3g}" for it in (found.value, found.lower, found.upper))
    return f"{value} {unit} ({lower} to {upper})".replace("  ", " ")


@contextmanager
def group() -> Iterator[None]:
    """The job, with gloo as its default group."""
    popdist.init()
    torch.set_num_threads(1)  # poprun gives a host's only instance all of its cores
    distributed.init_process_group("gloo")
    yield
    distributed.destroy_process_group()


def main() -> None:
    """Measure; instance 0 prints a table, and writes the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="how often each loop is timed (50)")
    parser.add_argument("--steps", type=int, help="steps in a round (3; of a tiny model 100)")
    parser.add_argument("--tiny", action="store_true", help="compare steps of a model of 10,100 parameters")
    parser.add_argument("--layers", type=int, default=12, help="linear layers (12)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (1024)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of an instance in a step (8)")
    parser.add_argument("--json", type=Path, help="a file for the figures and all samples")
    parser.add_argument(
        "--document", type=Path, help="a Markdown file; its part `step of N`, or `tiny`, gets the table"
    )
    options = parser.parse_args()
    with group():
        shape = Shape(layers=options.layers, width=options.width, batch_size=options.batch_size)
        made = loops(TINY if options.tiny else shape)
        if options.tiny:
            made = {name: made[name] for name in OF_TINY}
        times = measure(made, options.rounds, options.steps or (100 if options.tiny else 3))
        if not popdist.is_main():
            return
        instances = distributed.get_world_size()
        command = shlex.join(["poprun", "--num-instances", str(instances), "python", *sys.argv])
        text = compared(times, command) if options.tiny else described(times, command)
        print(text)
        if options.json and not options.tiny:
            parts = {name: asdict(of_gloo(times, name)) for name in WITHOUT}
            found = {"command": command, "seconds": times, "share_of_gloo": parts}
            options.json.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
        if options.document:
            put(options.document, "tiny" if options.tiny else f"step of {instances}", text)


if __name__ == "__main__":
    main()
