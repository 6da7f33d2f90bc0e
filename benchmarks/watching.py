"""How much longer a training step takes because poprun watches where its time goes.

    python benchmarks/watching.py --rounds 25 --kind DDP

Two jobs of two instances live side by side, one of them without poprun's page and so with torch's defaults. They
train by turns of half a second, each turn the other way round; whoever does not train sleeps. Nine turns of each
are a round, longer than the time between two questions to torch's recorder. What counts is the median over the
rounds of the ratio within a round.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import TextIO

import torch
from measuring.documents import put, table
from measuring.medians import median, ratio
from measuring.turns import by_turns, seconds
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, NUM_LAYERS, BATCH = 192, 8, 16
BUCKET_MEGABYTES = 0.3  # of two layers, so that there are four
TURN_SECONDS, NUM_TURNS = 0.5, 9
MOST_RATIO = 1.005


def train(kind: str, orders: str, answers: str) -> None:
    """Be one instance: train as many steps as instance 0 is told, until it is told none."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    if kind == "DDP":
        net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MEGABYTES)
    else:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for module in [*net, net]:  # type: ignore[misc]
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    is_first = distributed.get_rank() == 0
    with ExitStack() as stack:
        told = stack.enter_context(Path(orders).open(encoding="ascii")) if is_first else None
        answer = stack.enter_context(Path(answers).open("w", encoding="ascii")) if is_first else None
        while True:
            number = torch.tensor(int(told.readline() or 0) if told else 0)
            distributed.broadcast(number, 0)
            if not number:
                return
            took = seconds(step, int(number))
            if answer is not None:
                answer.write(f"{took}\n")
                answer.flush()


class Job:
    """One of the two jobs, which trains when it is told."""

    def __init__(self, stack: ExitStack, kind: str, folder: Path, *, is_watched: bool) -> None:
        name = "watched" if is_watched else "bare"
        fifos = [str(folder / f"{name}-{what}") for what in ("orders", "answers")]
        for fifo in fifos:
            os.mkfifo(fifo)
        program = [sys.executable, __file__, "--train", kind, *fifos]
        bare = [] if is_watched else ["env", "-u", "POPDIST_PROGRESS_DESCRIPTOR", "-u", "TORCH_FR_BUFFER_SIZE"]
        poprun = str(Path(sys.executable).with_name("poprun"))
        words = [poprun, "--launcher", "local", "-n", "2", *bare, *program]
        self._process = stack.enter_context(subprocess.Popen(words, stdin=subprocess.DEVNULL))
        orders, answers = map(Path, fifos)
        self._orders: TextIO = stack.enter_context(orders.open("w", encoding="ascii"))
        self._answers: TextIO = stack.enter_context(answers.open(encoding="ascii"))

    def seconds_of_step(self, num_steps: int) -> float:
        """Have it train; what a step took."""
        self._orders.write(f"{num_steps}\n")
        self._orders.flush()
        return float(self._answers.readline())

    def end(self) -> None:
        """Have it end."""
        self._orders.write("0\n")
        self._orders.flush()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="of nine turns of each job (25)")
    parser.add_argument("--kind", choices=("DDP", "FSDP2"), default="DDP", help="how they train (DDP)")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `watching-KIND` gets the table")
    parser.add_argument("--train", nargs=3, metavar=("KIND", "ORDERS", "ANSWERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="watching-")))
        jobs = {
            name: Job(stack, options.kind, folder, is_watched=name == "watched") for name in ("bare", "watched")
        }
        num_steps = max(1, round(TURN_SECONDS / jobs["bare"].seconds_of_step(100)))
        jobs["watched"].seconds_of_step(num_steps)
        turns = by_turns(
            {name: lambda job=job: job.seconds_of_step(num_steps) for name, job in jobs.items()},  # type: ignore[misc]
            options.rounds * NUM_TURNS,
        )
        times = {
            name: [fmean(own[begin : begin + NUM_TURNS]) for begin in range(0, len(own), NUM_TURNS)]
            for name, own in turns.items()
        }
        for job in jobs.values():
            job.end()
    found, bare = ratio(times["watched"], times["bare"]), median(times["bare"])
    holds = "yes" if found.value <= MOST_RATIO else "NO"
    interval = f"{found.value:.4f} ({found.lower:.4f} to {found.upper:.4f})"
    limit = [f"≤ {MOST_RATIO}", holds] if options.kind == "DDP" else ["", ""]
    rows = [[options.kind, f"{bare.value * 1e3:.2f} ms", interval, *limit]]
    command = f"python benchmarks/watching.py --rounds {options.rounds} --kind {options.kind}"
    heads = ["2 instances", "a step, not watched", "watched ÷ not", "limit", "holds"]
    text = f"`{command}`\n\n{table(heads, rows)}"
    print(text)
    if options.document:
        put(options.document, f"watching-{options.kind}", text)


if __name__ == "__main__":
    main()
