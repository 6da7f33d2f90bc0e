"""What a network costs a training step whose gradients go while they are made, and one where they go at its end.

    poprun --host n1,n2 --num-instances 2 python benchmarks/overlap.py
    python -m benchmarks.slow_network --rate 1gbit python benchmarks/overlap.py

Each round times every loop for some steps, one right after the other, and the next round the other way round. A
loop's communication is the difference, within a round, to the same loop with the reduction replaced by nothing.
Every instance has one thread. Hosts have one instance each: else the gradients of a host are added in its memory.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from measuring.documents import put, table
from measuring.medians import median
from step import Shape, Step, ddp_step, drifting, group, interval, measure, nothing, replicated_step, share
from torch.nn.parallel import DistributedDataParallel

import popdist
from popdist.gradients import reduction
from popdist.gradients.overlap import Overlap

GLOO, LATE, EARLY = "DDP, gloo", "ReplicatedModel, at the end", "ReplicatedModel"
WITHOUT = {GLOO: "DDP, none", LATE: "ReplicatedModel, none", EARLY: "ReplicatedModel, none"}
"""Each loop, and the same without a reduction."""


def loops(shape: Shape) -> dict[str, Step]:
    """One step of each."""
    silent = DistributedDataParallel(shape.net())
    silent.register_comm_hook(None, nothing)
    return {
        GLOO: ddp_step(shape, DistributedDataParallel(shape.net())),
        "DDP, none": ddp_step(shape, silent),
        LATE: without_overlap(replicated_step(shape)),
        EARLY: replicated_step(shape),
        "ReplicatedModel, none": without_sum(without_overlap(replicated_step(shape))),
    }


def without_overlap(step: Step) -> Step:
    """``step`` with all gradients at its end."""

    def changed() -> None:
        with mock.patch.object(Overlap, "offer", return_value=0):
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
    rows = [
        [
            name,
            interval(median(times[name]), 1e3, "ms"),
            interval(median(costs[name]), 1e3, "ms"),
            interval(share(costs[name], costs[LATE]), 1, ""),
            interval(share(times[name], times[LATE]), 1, ""),
        ]
        for name in WITHOUT
    ]
    rows += [
        [name, interval(median(times[name]), 1e3, "ms"), "", "", ""] for name in sorted(set(WITHOUT.values()))
    ]
    head = ["loop", "a step", "its communication", "of that at the end", "step of that at the end"]
    return f"{len(costs[LATE])} rounds, {popdist.num_instances()} hosts: `{command}`\n\n{table(head, rows)}"


def main() -> None:
    """Measure; instance 0 prints a table, and writes it where it was asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often each loop is timed (20)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a round (3)")
    parser.add_argument("--layers", type=int, default=12, help="linear layers (12)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (1024)")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of an instance in a step (256)")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `overlap` gets the table")
    options = parser.parse_args()
    with group():
        shape = Shape(layers=options.layers, width=options.width, batch_size=options.batch_size)
        times = measure(loops(shape), options.rounds, options.steps)
        if popdist.is_main():
            text = described(times, shlex.join(["python", *sys.argv]))
            print(text)
            if options.document:
                put(options.document, "overlap", text)


if __name__ == "__main__":
    main()
