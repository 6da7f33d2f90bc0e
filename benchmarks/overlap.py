"""What a network costs a training step whose gradients go while they are made, and one where they go at its end.

    poprun --host n1,n2 --num-instances 2 python benchmarks/overlap.py
    python -m benchmarks.slow_network --rate 1gbit python benchmarks/overlap.py

Each round times every loop for some steps, one right after the other, and the next round the other way round. A
loop's communication is the difference, within a round, to the same loop with the reduction replaced by nothing.
The wire's is what the network alone takes: each host sends the next one as much as a sum of the gradients takes at
least (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009). Every instance has one thread. Where
hosts have several instances, gradients are added in the memory of each host first.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
from measuring.documents import put, table
from measuring.medians import median
from step import Shape, Step, ddp_step, drifting, group, interval, measure, nothing, replicated_step, share
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import popdist
from popdist.gradients import reduction
from popdist.gradients.overlap import Overlap
from popdist.job import context

GLOO, LATE, EARLY = "DDP, gloo", "ReplicatedModel, at the end", "ReplicatedModel"
HALF, WIRE = "ReplicatedModel, bfloat16", "the wire"
WITHOUT = {
    GLOO: "DDP, none",
    LATE: "ReplicatedModel, none",
    EARLY: "ReplicatedModel, none",
    HALF: "ReplicatedModel, none",
}
"""Each loop, and the same without a reduction."""

MOST = {EARLY: 1.0, HALF: 1.0}
"""What share of DDP's communication theirs may be."""


def loops(shape: Shape) -> dict[str, Step]:
    """One step of each."""
    silent = DistributedDataParallel(shape.net())
    silent.register_comm_hook(None, nothing)
    return {
        GLOO: ddp_step(shape, DistributedDataParallel(shape.net())),
        "DDP, none": ddp_step(shape, silent),
        LATE: without_overlap(replicated_step(shape)),
        EARLY: replicated_step(shape),
        HALF: replicated_step(shape, torch.bfloat16),
        "ReplicatedModel, none": without_sum(without_overlap(replicated_step(shape))),
        WIRE: wire_step(shape),
    }


def wire_step(shape: Shape) -> Step:
    """The bytes alone: the instances of a host share what it sends."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    num_local, numbers = size // num_hosts(), sum(it.numel() for it in shape.net().parameters())
    sent = torch.zeros(2 * (num_hosts() - 1) * numbers // (num_hosts() * num_local))
    received = torch.empty_like(sent)

    def exchange() -> None:
        arrival = distributed.irecv(received, (rank - num_local) % size)
        distributed.send(sent, (rank + num_local) % size)
        if arrival is not None:
            arrival.wait()

    return exchange


def num_hosts() -> int:
    """Of the job, each with as many instances."""
    return popdist.num_instances() // context.environment().contract.num_local_instances


def without_overlap(step: Step) -> Step:
    """``step`` with all gradients at its end."""

    def changed() -> None:
        with mock.patch.object(Overlap, "number_of_step", return_value=0):
            step()

    return changed


def without_sum(step: Step) -> Step:
    """``step`` with the gradients of this instance alone."""

    def changed() -> None:
        with mock.patch.object(reduction, "add_instances"), drifting():
            step()

    return changed


def described(times: Mapping[str, Sequence[float]], command: str) -> str:
    """Everything in words and a table."""
    costs = {
        name: [with_it - without for with_it, without in zip(times[name], times[other], strict=True)]
        for name, other in WITHOUT.items()
    }
    rows = []
    for name in WITHOUT:
        part, most = share(costs[name], costs[GLOO]), MOST.get(name)
        limit = ["", ""] if most is None else [f"≤ {most:g}", "yes" if part.value <= most else "NO"]
        cells = [f"{median(it).value * 1e3:.3g} ms" for it in (times[name], costs[name])]
        rows.append([name, *cells, interval(part, 1, ""), *limit])
    rows.append([WIRE, f"{median(times[WIRE]).value * 1e3:.3g} ms", *[""] * 4])
    head = ["loop", "a step", "its communication", "of DDP's", "limit", "holds"]
    hosts = f"{num_hosts()} hosts of {popdist.num_instances() // num_hosts()}"
    return f"{len(costs[LATE])} rounds, {hosts} instances: `{command}`\n\n{table(head, rows)}"


def main() -> None:
    """Measure; instance 0 prints a table, and writes it where it was asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often each loop is timed (20)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a round (3)")
    parser.add_argument("--layers", type=int, default=12, help="linear layers (12)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (1024)")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of an instance in a step (256)")
    parser.add_argument("--document", type=Path, help="a Markdown file that gets the table")
    parser.add_argument("--part", default="overlap", help="which part of it (overlap)")
    options = parser.parse_args()
    with group():
        shape = Shape(layers=options.layers, width=options.width, batch_size=options.batch_size)
        times = measure(loops(shape), options.rounds, options.steps)
        if popdist.is_main():
            text = described(times, shlex.join(["python", *sys.argv]))
            print(text)
            if options.document:
                put(options.document, options.part, text)


if __name__ == "__main__":
    main()
