"""A job to be traced: its instance 1 is late in each step, and both say when a span began by the kernel's clock.

Words: a place (none, forward, compute, data or popdist), the delay of a step in milliseconds, the number of steps,
and the milliseconds that a step computes. With the place none each step does the same work, and shows what tracing
costs; with another each step lasts as long on both instances, and only the delay makes one wait.
"""

import ctypes
import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

REALTIME_SYSTEM_CALL = {"x86_64": 228, "aarch64": 113}[os.uname().machine]
LAYER = 256


class Moment(ctypes.Structure):
    """The kernel's ``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def true_ns() -> int:
    """The kernel's clock, also where a library shows the program another time."""
    moment = Moment()
    ctypes.CDLL(None).syscall(REALTIME_SYSTEM_CALL, 0, ctypes.byref(moment))
    return int(moment.seconds * 1_000_000_000 + moment.nanoseconds)


def tell_truth() -> None:
    """A span of the trace whose name says between which moments it began."""
    before = true_ns()
    with record_function(f"truth {before}"):
        record_function(f"until {true_ns()}").__enter__().__exit__(None, None, None)


class Samples(Dataset[torch.Tensor]):
    """Samples that take their time on instance 1, if asked to."""

    def __init__(self, num_samples: int, seconds: float) -> None:
        self._num_samples = num_samples
        self._seconds = seconds

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(LAYER, dtype=torch.float32)


def compute(num_rounds: int) -> None:
    """Multiply matrices so often."""
    matrix = torch.ones(128, 128, dtype=torch.float32)
    for _ in range(num_rounds):
        matrix = torch.mm(matrix, matrix).clamp_(0.0, 1.0)


def compute_until(end: float) -> None:
    """Multiply matrices until this moment of the monotonic clock."""
    while time.monotonic() < end:
        compute(1)


def rounds_of(seconds: float) -> int:
    """How many rounds of `compute` take so long."""
    compute(20)
    began = time.perf_counter()
    compute(200)
    return round(200 * seconds / (time.perf_counter() - began))


def train(place: str, delay_seconds: float, num_steps: int, step_seconds: float) -> list[float]:
    """The seconds of each step."""
    is_late = os.environ["RANK"] == "1"
    torch.set_num_threads(1)
    own = nn.Sequential(nn.Linear(LAYER, LAYER), nn.Linear(LAYER, LAYER))
    model: Any
    if place == "popdist":
        import popdist

        model = popdist.ReplicatedModel(own)
    else:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = Samples(num_steps, delay_seconds if is_late and place == "data" else 0.0)
    lengths, num_rounds = [], rounds_of(step_seconds) if place == "none" else 0
    began = time.perf_counter()
    for batch in DataLoader(samples, batch_size=1, num_workers=0 if place == "data" else 1):
        optimizer.zero_grad()
        for (part,) in model.micro_batches((batch,)) if place == "popdist" else ((batch,),):
            compute(num_rounds)
            if place != "none":
                compute_until(
                    time.monotonic() + step_seconds + (delay_seconds if is_late and place == "compute" else 0)
                )
            if is_late and place in ("forward", "popdist"):
                time.sleep(delay_seconds)
            model(part).sum().backward()
        optimizer.step()
        tell_truth()
        lengths.append(time.perf_counter() - began)
        began = time.perf_counter()
    return lengths


if __name__ == "__main__":
    place, delay, number, length = sys.argv[1], *map(float, sys.argv[2:])
    lengths = train(place, delay / 1000, int(number), length / 1000)
    sys.stdout.write(json.dumps([round(it, 6) for it in lengths]) + "\n")
    if dist.is_initialized() and place != "popdist":
        dist.destroy_process_group()
