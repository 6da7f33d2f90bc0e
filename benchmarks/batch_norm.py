"""What statistics over two replicas cost a training step, beside SyncBatchNorm's arithmetic over gloo.

    poprun --num-instances 2 python benchmarks/batch_norm.py

A small ResNet. torch's own SyncBatchNorm refuses CPU tensors, so its arithmetic is written with the collectives of
``torch.distributed.nn``, one forward and one backward for each layer, under DDP over gloo. Each round times every
loop for some steps, one right after the other, and the next round the other way round. The communication of a loop
is the difference, within a round, to the same loop whose layers take their own row for the other's, too.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from measuring.documents import put, table
from measuring.medians import median
from step import Step, group, interval, measure, share
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import popdist
from popdist.step.training.norm_sync import GroupSync, GroupValues, ReplicaValues

ONE, TWO, SYNC = "ReplicatedModel, k = 1", "ReplicatedModel, k = 2", "SyncBatchNorm's arithmetic, gloo"
WITHOUT = {TWO: "ReplicatedModel, k = 2, no exchange", SYNC: "SyncBatchNorm's arithmetic, no exchange"}
MOST_STEP, MOST_COMMUNICATION = 1.25, 1 / 3


class SyncNorm(nn.BatchNorm2d):
    """BatchNorm over all instances, as programs write it for tensors on CPUs."""

    exchanges = True

    def forward(self, x: Tensor) -> Tensor:
        """Sums go, forward and, by autograd, backward."""
        row = torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), x.new_tensor([x.numel() / x.shape[1]])])
        row = all_reduce(row) if self.exchanges else row * 2
        mean, square = row[:-1].view(2, -1) / row[-1]
        variance = square - mean.square()
        scale = (variance + self.eps).rsqrt() * self.weight
        with torch.no_grad():
            for name, new in (("running_mean", mean), ("running_var", variance)):
                self.get_buffer(name).lerp_(new, self.momentum or 0.0)
        shift = self.bias - mean * scale
        return torch.addcmul(shift.view(1, -1, 1, 1), x, scale.view(1, -1, 1, 1))


class LocalNorm(SyncNorm):
    """The same arithmetic, and no exchange."""

    exchanges = False


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int, norm: type[nn.BatchNorm2d]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """As in He et al., arXiv 1512.03385."""
        return torch.relu(x + self.body(x))


def resnet(blocks: int, width: int, norm: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.Module:
    """The same weights on every instance."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width), nn.ReLU())
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(first, *(Block(width, norm) for _ in range(blocks)), last)


def replicated_step(net: nn.Module, x: Tensor, size: int) -> Step:
    """One replica in each instance."""
    model = popdist.ReplicatedModel(net, batch_norm_group_size=size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        for rows in model.micro_batches(x):
            model(rows).square().mean().backward()
        optimizer.step()

    return step


def without_exchange(step: Step) -> Step:
    """``step`` with exchanges in which nobody else takes part."""

    def alone(_sync: GroupSync, _points: object, rows: list[ReplicaValues]) -> GroupValues:
        return np.array([*rows, *rows])

    def changed() -> None:
        with mock.patch.object(GroupSync, "_exchange", alone):
            step()

    return changed


def ddp_step(net: nn.Module, x: Tensor) -> Step:
    """As torch's own tutorials write it."""
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def loops(options: Any, size: int) -> dict[str, Step]:
    """One step of each, with images of ``size`` x ``size`` pixels."""
    generator = torch.Generator().manual_seed(popdist.instance_index())
    x = torch.randn(options.batch_size, 3, size, size, generator=generator)
    shape = (options.blocks, options.width)
    return {
        ONE: replicated_step(resnet(*shape), x, 1),
        TWO: replicated_step(resnet(*shape), x, 2),
        WITHOUT[TWO]: without_exchange(replicated_step(resnet(*shape), x, 2)),
        SYNC: ddp_step(resnet(*shape, SyncNorm), x),
        WITHOUT[SYNC]: ddp_step(resnet(*shape, LocalNorm), x),
    }


def described(times: Mapping[str, Sequence[float]], size: int) -> str:
    """What was found with images of ``size`` x ``size`` pixels, as tables."""
    costs = {
        name: [with_it - without for with_it, without in zip(times[name], times[other], strict=True)]
        for name, other in WITHOUT.items()
    }
    rows = []
    for name, found in times.items():
        cost = interval(median(costs[name]), 1e3, "ms") if name in costs else ""
        rows.append([name, interval(median(found), 1e3, "ms"), cost])
    limits = [
        ("a step with k = 2 over one with k = 1", MOST_STEP, share(times[TWO], times[ONE])),
        ("its communication over gloo's", MOST_COMMUNICATION, share(costs[TWO], costs[SYNC])),
    ]
    held = [
        [what, interval(ratio, 1, ""), f"≤ {most:.3g}", "yes" if ratio.value <= most else "NO"]
        for what, most, ratio in limits
    ]
    head = table([f"images of {size} x {size} pixels", "a step", "its communication"], rows)
    return f"{head}\n\n{table(['ratio', 'found', 'limit', 'holds'], held)}"


def main() -> None:
    """Measure; instance 0 prints two tables, and writes them where it was asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="how often each loop is timed (12)")
    parser.add_argument("--steps", type=int, default=2, help="steps in a round (2)")
    parser.add_argument("--blocks", type=int, default=9, help="of two convolutions each (9)")
    parser.add_argument("--width", type=int, default=32, help="channels (32)")
    parser.add_argument("--size", type=int, nargs="+", default=[32], help="height and width of images (32)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of an instance in a step (16)")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `batch norm` gets the tables")
    options = parser.parse_args()
    with group():
        found = {size: measure(loops(options, size), options.rounds, options.steps) for size in options.size}
        if popdist.is_main():
            command = shlex.join(["poprun", "--num-instances", "2", "python", *sys.argv])
            tables = "\n\n".join(described(times, size) for size, times in found.items())
            text = f"{options.rounds} rounds, {popdist.num_instances()} instances: `{command}`\n\n{tables}"
            print(text)
            if options.document:
                put(options.document, "batch norm", text)


if __name__ == "__main__":
    main()
