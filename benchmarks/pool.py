"""How long the pool of virtual IPUs keeps jobs: many of them, all started at once, on a few IPUs.

    python benchmarks/pool.py --jobs 100 --ipus 8

First as many processes as there are jobs take and give back leases as fast as they can: how long does each hold
the lock of the pool, from the moment it has it to the last write? Then as many real poprun jobs start at once,
wait for an IPU, hold it for a while, and give it back. Each makes a mark for its IPU and fails if there is one:
two jobs on one IPU would be found. With J jobs of S seconds on I IPUs the ideal is J / I rounds of S seconds.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

from poprun.devices.pool.folder import PoolFolder
from poprun.devices.pool.holders import this_process
from poprun.devices.pool.pool import Pool, wait_for_turn
from poprun.devices.pool.requests import PoolRequest
from poprun.plan.inventory import cpu_cluster

_PATIENCE_SECONDS = 600.0


def timed(alone: Callable[..., Any], held_seconds: list[float]) -> Callable[..., Any]:
    """What has the pool to itself, and adds to ``held_seconds`` for how long."""

    @contextmanager
    def measured(*words: Any) -> Iterator[None]:
        with alone(*words):
            began = time.perf_counter()
            yield
            held_seconds.append(time.perf_counter() - began)

    return measured


def contend(path: str, num_ipus: int, num_leases: int, start: Any, results: Any) -> None:
    """Take and give back ``num_leases`` leases of one IPU; tell how long each transaction held the lock."""
    held_seconds: list[float] = []
    PoolFolder.alone = timed(PoolFolder.alone, held_seconds)  # type: ignore[method-assign]
    wish = PoolRequest(num_ipus=1, choose=cpu_cluster("box", num_ipus).pick(1))
    pool = Pool(path)
    start.wait()
    for _ in range(num_leases):
        ticket = pool.enqueue(this_process("contender"), wish)
        while not ticket.ipus:
            wait_for_turn(pool, ticket, wish, _PATIENCE_SECONDS)
            ticket = pool.retry(ticket, wish)
        pool.release(ticket)
    results.put(held_seconds)


def measure_transactions(path: str, num_contenders: int, num_ipus: int, num_leases: int) -> list[float]:
    """Seconds that each transaction of all contenders held the lock."""
    context = get_context("fork")
    start, results = context.Event(), context.Queue()
    words = (path, num_ipus, num_leases, start, results)
    contenders = [context.Process(target=contend, args=words) for _ in range(num_contenders)]
    for contender in contenders:
        contender.start()
    start.set()
    try:
        held = [results.get(timeout=_PATIENCE_SECONDS) for _ in contenders]
    except Empty:
        raise SystemExit("a contender did not end") from None
    finally:
        for contender in contenders:
            contender.join(timeout=10)
            contender.kill()
    return [seconds for one in held for seconds in one]


def run_jobs(folder: Path, num_jobs: int, num_ipus: int, seconds: float) -> tuple[float, float, int]:
    """Start all jobs at once on GPUs that a stand-in for ``nvidia-smi`` tells of.

    Returns:
        Seconds from the first start of a job to the first start of a program, from there to the last end, and how
        many jobs failed or found their GPU in use.
    """
    smi = folder / "nvidia-smi"
    rows = "; ".join(f"echo {index}, GPU-{index}" for index in range(num_ipus))
    smi.write_text(f"#!/bin/sh\ncase $2 in *gpu=index*) {rows};; esac\n")
    smi.chmod(0o755)
    mark = "mark-$CUDA_VISIBLE_DEVICES"
    program = f"mkdir {mark} || exit 9; date +%s.%N >> begun; sleep {seconds}; date +%s.%N >> ended; rmdir {mark}"
    words = ["-m", "poprun", "--pool", str(folder / "jobs"), "--launcher", "local", "--wait-for-devices"]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    started = time.time()
    jobs = [
        subprocess.Popen(
            [sys.executable, *words, "sh", "-c", program], cwd=folder, env=environment, stderr=subprocess.DEVNULL
        )
        for _ in range(num_jobs)
    ]
    num_failed = sum(job.wait(timeout=_PATIENCE_SECONDS) != 0 for job in jobs)
    begun, ended = (list(map(float, (folder / name).read_text().split())) for name in ("begun", "ended"))
    return min(begun) - started, max(ended) - min(begun), num_failed + num_jobs - len(ended)


def main() -> None:
    """Measure, then print what was found and the command that repeats it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100, help="jobs, and contenders for the lock (100)")
    parser.add_argument("--ipus", type=int, default=8, help="virtual IPUs that they share (8)")
    parser.add_argument("--leases", type=int, default=20, help="leases that each contender takes (20)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each job holds its IPU (5)")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="poprun-bench-") as name:
        folder = Path(name)
        held = measure_transactions(str(folder / "contended"), given.jobs, given.ipus, given.leases)
        first, rest, num_lost = run_jobs(folder, given.jobs, given.ipus, given.seconds)

    percentiles = statistics.quantiles(held, n=100)
    print(f"{len(held)} transactions of {given.jobs} contenders; each held the lock for")
    print(f"  median {statistics.median(held) * 1e3:.1f} ms   p99 {percentiles[98] * 1e3:.1f} ms", end="   ")
    print(f"most {max(held) * 1e3:.1f} ms")
    ideal = -(-given.jobs // given.ipus)
    print(f"{given.jobs} jobs of {given.seconds:g} s on {given.ipus} virtual IPUs")
    print(f"  {first:.1f} s until the first program ran, {rest:.1f} s from there to the last end")
    print(f"  {rest / given.seconds:.1f} rounds, {ideal} at best: {rest / given.seconds / ideal:.2f} x")
    print(f"  {num_lost} lost or on an IPU that another one had")
    print(f"\nagain: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
