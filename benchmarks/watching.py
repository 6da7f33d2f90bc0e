"""What poprun takes of a training's processors because it watches where the time goes.

    python benchmarks/watching.py --rounds 5 --kind DDP

Jobs of two instances train, one after another. What counts is the processor time of the threads that torch alone
would not have, as a share of the elapsed time on instance 0: they inspect the phases and answer for torch's
recorder. Beside it stands that of its agent and of poprun. The steps of a job that is not watched are no measure:
they differ by more from one second to the next.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from measuring.documents import put, table
from measuring.medians import median
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, NUM_LAYERS, BATCH = 192, 8, 16
BUCKET_MEGABYTES = 0.3  # of two layers, so that there are four
MOST_SHARE = 0.005
SERVER = "pt_workerserver"
"""The name of the threads that answer for torch's recorder."""


def train(kind: str, seconds: float) -> None:
    """Be one instance: train for so long; instance 0 prints what it took."""
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

    def train_steps(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - began

    num_steps = torch.tensor(max(1, round(seconds / train_steps(500) * 500)))
    distributed.broadcast(num_steps, 0)
    before = processor_seconds()
    elapsed = train_steps(int(num_steps))
    threads, processes = (after - it for after, it in zip(processor_seconds(), before, strict=True))
    if distributed.get_rank() == 0:
        print(json.dumps([elapsed / int(num_steps), threads / elapsed, processes / elapsed]), flush=True)
    distributed.destroy_process_group()


def processor_seconds() -> tuple[float, float]:
    """The processor time, until now, of the threads that watch this program, and of its agent and poprun."""
    threads = 0
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        is_main = task.name == str(os.getpid())
        if name == SERVER or (name.startswith("python") and not is_main):
            threads += int((task / "schedstat").read_text().split()[0])
    above = [process.cpu_times() for process in psutil.Process().parents()[:2]]
    return threads / 1e9, sum(times.user + times.system for times in above)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how many jobs (5)")
    parser.add_argument("--seconds", type=float, default=20, help="for how long each trains (20)")
    parser.add_argument("--kind", choices=("DDP", "FSDP2"), default="DDP", help="how they train (DDP)")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `watching-KIND` gets the table")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.kind, options.seconds)
        return
    poprun = str(Path(sys.executable).with_name("poprun"))
    job = [poprun, "--launcher", "local", "--no-tag-output", "-n", "2", sys.executable, __file__, "--train"]
    words = [*job, "--kind", options.kind, "--seconds", str(options.seconds)]
    rounds = []
    for _ in range(options.rounds):
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
        rounds.append(json.loads(done.stdout))
    step, threads, processes = map(median, zip(*rounds, strict=True))
    shares = [f"{it.value:.2%} ({it.lower:.2%} to {it.upper:.2%})" for it in (threads, processes)]
    limit = [f"≤ {MOST_SHARE:.1%}", "yes" if threads.value <= MOST_SHARE else "NO"]
    rows = [[options.kind, f"{step.value * 1e3:.2f} ms", *shares, *(limit if options.kind == "DDP" else ["", ""])]]
    command = f"python benchmarks/watching.py --rounds {options.rounds} --kind {options.kind}"
    heads = [
        "2 instances",
        "a step",
        "threads in the program",
        "its agent and poprun",
        "limit of the threads",
        "holds",
    ]
    text = f"`{command}`\n\n{table(heads, rows)}"
    print(text)
    if options.document:
        put(options.document, f"watching-{options.kind}", text)


if __name__ == "__main__":
    main()
