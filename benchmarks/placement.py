"""What the placement of the instances is worth: steps a second of the slowest instance.

    python benchmarks/placement.py --rounds 5

Each instance trains a small network and copies a block of memory larger than most caches, over and over, with its
share of the machine's threads. A job that trains together is as fast as its slowest instance, so that one counts.
Every round runs each placement once, in turn. What a placement is worth depends on the machine: on one NUMA node
(the output tells how many there are) no memory is far away.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from poprun.probe.machine import read_cpus

PROGRAM = """\
import os, sys, time
import torch

threads, steps = map(int, sys.argv[1:])
torch.set_num_threads(threads)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
inputs, source = torch.randn(256, 512), torch.ones(16 * 1024 * 1024)
target = torch.empty_like(source)

def step():
    model(inputs).square().mean().backward()
    target.copy_(source)

for _ in range(3):
    step()
began = time.perf_counter()
for _ in range(steps):
    step()
print(f"rate {steps / (time.perf_counter() - began)}", flush=True)
"""

PLACEMENTS = ("disabled", "spreadnuma", "core", "compact")
COMPETITOR = "mpiexec -bind-to core"


def contenders(num_instances: int, num_threads: int, num_steps: int) -> dict[str, list[str]]:
    """Name → command; all of this interpreter's environment, all with the same threads."""
    program = [sys.executable, "-c", PROGRAM, str(num_threads), str(num_steps)]
    scripts = Path(sys.executable).parent
    poprun = [str(scripts / "poprun"), "-n", str(num_instances), "--no-tag-output"]
    poprun += ["--threads-per-replica", str(num_threads)]
    commands = {name: [*poprun, "--process-placement", name, *program] for name in PLACEMENTS}
    width = f"core:{num_threads}" if num_threads > 1 else "core"
    commands[COMPETITOR] = [str(scripts / "mpiexec"), "-bind-to", width, "-n", str(num_instances), *program]
    return commands


def slowest(command: list[str], num_threads: int) -> float:
    """Steps a second of the slowest instance."""
    with tempfile.TemporaryDirectory() as folder:
        pool = {"POPRUN_POOL": str(Path(folder, "pool")), "OMP_NUM_THREADS": str(num_threads)}
        answer = subprocess.run(
            command, check=True, env=os.environ | pool, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    return min(float(line.split()[1]) for line in answer.stdout.splitlines() if line.startswith("rate "))


def describe_machine() -> str:
    """How many cores, caches and nodes this process may use."""
    cpus = read_cpus(os.sched_getaffinity(0))
    caches, nodes = ({getattr(cpu, name) for cpu in cpus} for name in ("cache", "node"))
    counts = [(len(cpus), "core"), (len(caches), "last-level cache"), (len(nodes), "NUMA node")]
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)


def main() -> None:
    """Measure, then print a table and the command that made it."""
    num_cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each placement runs (5)")
    parser.add_argument("--instances", type=int, default=min(2, num_cores), help="processes (2)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each process (100)")
    asked = parser.parse_args()

    num_threads = max(1, num_cores // asked.instances)
    commands = contenders(asked.instances, num_threads, asked.steps)
    rates: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(asked.rounds):
        for name, command in commands.items():
            rates[name].append(slowest(command, num_threads))

    print(f"{describe_machine()}: {asked.instances} instances, threads of each: {num_threads}\n")
    base = statistics.median(rates["disabled"])
    print(f"{'steps/s of the slowest instance':32} {'median':>8} {'least':>8} {'most':>8}   of disabled")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:32} {median:8.1f} {min(values):8.1f} {max(values):8.1f}   {median / base:8.2f} x")
    print(f"\n{asked.rounds} rounds; again: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
