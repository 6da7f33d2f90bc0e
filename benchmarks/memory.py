"""The memory of weights and Adam's state in a job: with ShardedOptimizer, and in one instance with plain Adam.

    python benchmarks/memory.py --instances 4

Each job trains a row of equal layers, and this program adds up, every few milliseconds, the proportional set size
of its processes: a page that n of them share counts 1/n in each. What counts is the highest sum. To leave out what
is neither weights nor state (the interpreter, gradients, activations), each job's peak is compared with that of as
many instances which train with plain SGD, which has no state; to the difference, their weights are added.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from measuring.documents import put, table
from measuring.medians import Median, median

MOST = 1.3
SAMPLE_SECONDS = 0.02
MIB = 1024**2
NUM_STEPS = 10


def train(kind: str, layers: int, width: int) -> None:
    """One instance of a job."""
    import torch
    from torch import nn

    import popdist

    torch.set_num_threads(1)
    model = popdist.ReplicatedModel(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))))
    optimizer: torch.optim.Optimizer
    if kind == "sharded":
        optimizer = popdist.ShardedOptimizer(model, torch.optim.Adam, lr=1e-4)
    else:
        optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](model.parameters(), lr=1e-4)
    for _ in range(NUM_STEPS):
        for x in model.micro_batches(torch.randn(popdist.num_local_replicas(), width)):
            model(x).square().mean().backward()
        optimizer.step()


def peak_bytes(kind: str, instances: int, layers: int, width: int) -> int:
    """The highest sum of the sizes of a job's processes."""
    program = [sys.executable, __file__, "--train", kind, "--layers", str(layers), "--width", str(width)]
    command = [sys.executable, "-m", "poprun", "--launcher", "local", "-n", str(instances), *program]
    highest = 0
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}) as job:
        while job.poll() is None:
            highest = max(highest, sum(map(_size, psutil.Process(job.pid).children(recursive=True))))
            time.sleep(SAMPLE_SECONDS)
    if job.returncode:
        raise SystemExit(f"the job {kind} with {instances} instances ended with {job.returncode}")
    return highest


def _size(process: psutil.Process) -> int:
    """The proportional set size in bytes, as the kernel adds it up; 0 of a process that has ended."""
    with suppress(OSError):
        sizes = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        return 1024 * sum(int(line.split()[1]) for line in sizes.splitlines() if line.startswith("Pss:"))
    return 0


def measure(instances: int, rounds: int, layers: int, width: int) -> dict[str, list[float]]:
    """MiB of weights and state in each round: of one instance, of all with plain Adam, and sharded."""
    weights = 4 * layers * width**2
    found: dict[str, list[float]] = {"one instance": [], "Adam": [], "ShardedOptimizer": []}
    for _ in range(rounds):
        jobs = [(kind, count) for count in {1, instances} for kind in ("sgd", "adam")] + [("sharded", instances)]
        peaks = {job: peak_bytes(*job, layers, width) for job in jobs}
        for name, kind, count in (
            ("one instance", "adam", 1),
            ("Adam", "adam", instances),
            ("ShardedOptimizer", "sharded", instances),
        ):
            found[name].append((peaks[kind, count] - peaks["sgd", count] + count * weights) / MIB)
    return found


def described(found: dict[str, list[float]], instances: int, weights: float, command: str) -> str:
    """Everything in words and a table."""
    one = median(found["one instance"]).value
    rows = []
    for name, number in (("one instance", 1), ("Adam", instances), ("ShardedOptimizer", instances)):
        taken = median(found[name])
        share = taken.value / one
        limit = [f"≤ {MOST}", "yes" if share <= MOST else "NO"] if name == "ShardedOptimizer" else ["", ""]
        label = "Adam" if name == "one instance" else name
        rows.append([f"{label}, instances: {number}", _interval(taken), f"{share:.2f}", *limit])
    head = ["weights and state", "MiB, of all instances", "of one instance's", "limit", "holds"]
    rounds = len(found["Adam"])
    return f"{rounds} rounds, {weights:.0f} MiB of weights: `{command}`\n\n{table(head, rows)}"


def _interval(found: Median) -> str:
    return f"{found.value:.0f} ({found.lower:.0f} to {found.upper:.0f})"


def main() -> None:
    """Measure, print a table, and write the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=4, help="of the jobs that are compared with one (4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each job runs (3)")
    parser.add_argument("--layers", type=int, default=16, help="linear layers (16)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (1024)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `memory` gets the table")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.layers, options.width)
        return
    command = shlex.join(["python", *sys.argv])
    found = measure(options.instances, options.rounds, options.layers, options.width)
    text = described(found, options.instances, 4 * options.layers * options.width**2 / MIB, command)
    print(text)
    if options.json:
        options.json.write_text(
            json.dumps({"command": command, "mebibytes": found}, indent=1) + "\n", encoding="utf-8"
        )
    if options.document:
        put(options.document, "memory", text)


if __name__ == "__main__":
    main()
