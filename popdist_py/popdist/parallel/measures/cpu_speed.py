"""``python -m popdist.parallel.measures.cpu_speed N``: the speed of each of N instances on this CPU, as JSON.

N processes share the cores and are measured at the same time, for about two seconds. ``--store`` also measures a
disk.
"""

import json
import multiprocessing
import os
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import BrokenBarrierError
from time import monotonic, perf_counter
from typing import Final

import psutil
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch exports FileStore, but not for type checkers

from popdist.errors import BackendError, StoreError
from popdist.ground.torch_private_groups import connect_gloo
from popdist.phases.store_file import StoreFile, StoreThreads, allocate, make_buffer

_PHASE_SECONDS: Final = 0.3
_LIMIT_SECONDS: Final = 50
_MOST_DEVICES: Final = 1024
_WIDTH: Final = 512
_CHAIN: Final = 64
_COPIED_BYTES: Final = 2**25
_NUM_SUMS: Final = 5
_STORE_BYTES: Final = 2**27
_NUM_MOVES: Final = 2
_GIGA: Final = 10**9
_TERA: Final = 10**12
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def main() -> None:
    """Measure this machine, and print the figures as JSON, which `popsize.hardware.machines_of` reads."""
    parser = ArgumentParser(prog="python -m popdist.parallel.measures.cpu_speed", description=__doc__)
    parser.add_argument("num_devices", metavar="N", type=int, help="how many instances share the CPU")
    parser.add_argument("--store", metavar="FOLDER", type=Path, help="where phases of a model would wait")
    words = parser.parse_args()
    num_devices = words.num_devices
    if not 1 <= num_devices <= _MOST_DEVICES:
        parser.error(f"N={num_devices} must be from 1 to {_MOST_DEVICES}")
    try:
        figures = measure(num_devices) | ({} if words.store is None else store_figures(words.store, num_devices))
        print(json.dumps(figures))  # noqa: T201 - the output of the program
    except (BackendError, StoreError) as error:
        sys.exit(f"{parser.prog}: {error}")


def measure(num_devices: int) -> dict[str, object]:
    """Measure this CPU's speed for each of ``num_devices`` processes; return it, or raise BackendError."""
    # a fork need not import torch again, and is safe because this process has not started torch's threads
    context = multiprocessing.get_context("fork")
    number = max(2, num_devices)  # the link needs two processes
    barrier = context.Barrier(number)
    with TemporaryDirectory(prefix="popdist-speed-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(number)]
        processes = [
            context.Process(target=_instance, args=(index, num_devices, barrier, folder, sender), daemon=True)
            for index, (_, sender) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            speeds = _received([receiver for receiver, _ in pipes])
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
    rates = {name: mean(speed[name] for speed in speeds[:num_devices]) for name in speeds[0]}
    link = speeds[0]["link"] / _GIGA
    return {
        "memory_gib": _usable_bytes() / num_devices / 2**30,
        "tflops": {name: rates[name] / _TERA for name in ("fp32", "bf16")},
        "memory_gb_per_second": rates["memory"] / _GIGA,
        "link_gb_per_second": link,
        "network_gb_per_second": link,
        "num_devices": num_devices,
        "devices_per_host": num_devices,
        "operator_seconds": 1 / rates["operators"],
    }


def store_figures(folder: Path, num_devices: int) -> dict[str, object]:
    """Return free space, read and write speed of the disk of ``folder``, each divided by ``num_devices``."""
    threads = StoreThreads(torch.device("cpu"))
    memory = make_buffer(_STORE_BYTES).fill_(1)
    rates = {}
    try:
        with TemporaryDirectory(prefix="popdist-speed-", dir=folder) as place:
            path = Path(place, "speed")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file = StoreFile(descriptor, path, _STORE_BYTES, threads)
            try:
                allocate(descriptor, _STORE_BYTES, str(path))
                file.write(0, memory)  # not measured, because the first write takes longer
                for name, move in {"_write": file.write, "": file.read}.items():
                    start = perf_counter()
                    for _ in range(_NUM_MOVES):
                        move(0, memory)
                    rates[name] = _NUM_MOVES * _STORE_BYTES / (perf_counter() - start)
            finally:
                file.close()
    except OSError as error:
        raise StoreError(f"{folder} cannot be measured: {error.strerror}") from error
    finally:
        threads.close()
    speeds = {f"streaming{name}_gb_per_second": rate / num_devices / _GIGA for name, rate in rates.items()}
    return {"streaming_gib": shutil.disk_usage(folder).free / num_devices / 2**30, **speeds}


def _received(receivers: list[Connection]) -> list[dict[str, float]]:
    """Return the speeds that all processes send. Raise BackendError if a process fails or is late."""
    deadline = monotonic() + _LIMIT_SECONDS
    speeds: list[dict[str, float]] = []
    failures: list[str] = []
    for index, receiver in enumerate(receivers):
        if not receiver.poll(max(0.0, deadline - monotonic())):
            raise BackendError(
                f"the CPU was not measured in {_LIMIT_SECONDS} seconds: process {index} is still at it"
            )
        value = receiver.recv()
        (failures if isinstance(value, str) else speeds).append(value)
    if failures:
        raise BackendError(f"the CPU could not be measured: {max(failures, key=len) or 'a process is late'}")
    return speeds


def _instance(index: int, num_devices: int, barrier: Barrier, folder: str, sender: Connection) -> None:
    """Measure the speeds of this process, at the same time as all other processes, and send the speeds."""
    try:
        sender.send(_speeds(index, num_devices, barrier, folder))
    except BrokenBarrierError:  # another process sends the reason
        sender.send("")
    except Exception as error:  # noqa: BLE001 - the parent process reports the error
        barrier.abort()
        sender.send(f"{type(error).__name__}: {error}")


def _speeds(index: int, num_devices: int, barrier: Barrier, folder: str) -> dict[str, float]:
    """Return what this process does per second: operations, bytes moved, torch operators and bytes sent."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_devices))
    phases: dict[str, tuple[float, Callable[[], object]]] = {
        "fp32": (2 * _WIDTH**3, _product(torch.float32)),
        "bf16": (2 * _WIDTH**3, _product(torch.bfloat16)),
        "memory": (2 * _COPIED_BYTES, _copy()),
        "operators": (3 * _CHAIN, _tiny_operators),
    }
    speeds = {}
    for name, (amount, work) in phases.items():
        barrier.wait(_LIMIT_SECONDS)
        speeds[name] = amount * _runs_per_second(work) if index < num_devices else 0.0
    barrier.wait(_LIMIT_SECONDS)
    speeds["link"] = _link_rate(index, folder) if index < 2 else 0.0
    barrier.wait(_LIMIT_SECONDS)
    return speeds


def _product(dtype: torch.dtype) -> Callable[[], object]:
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device="cpu")
    return lambda: matrix @ matrix


def _copy() -> Callable[[], object]:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _tiny_operators() -> None:
    """Run small torch operators: a forward pass, and a backward pass with twice as many operators."""
    value = factor = torch.ones(8, dtype=torch.float32, requires_grad=True, device="cpu")
    for _ in range(_CHAIN):
        value = value * factor
    value.sum().backward()


def _runs_per_second(work: Callable[[], object]) -> float:
    """Return how often ``work`` runs in a second, after a first run that is not measured."""
    work()
    start = perf_counter()
    number = 0
    while (seconds := perf_counter() - start) < _PHASE_SECONDS:
        work()
        number += 1
    return number / seconds


def _link_rate(index: int, folder: str) -> float:
    """Return the bytes per second that each of two processes sends in an all-reduce by gloo."""
    group = connect_gloo(FileStore(f"{folder}/link", 2), index, 2, timedelta(seconds=_LIMIT_SECONDS), "127.0.0.1")
    tensor = torch.ones(_COPIED_BYTES // 4, dtype=torch.float32, device="cpu")
    group.allreduce([tensor]).wait()
    start = perf_counter()
    for _ in range(_NUM_SUMS):
        group.allreduce([tensor]).wait()
    return _NUM_SUMS * _COPIED_BYTES / (perf_counter() - start)


def _usable_bytes() -> float:
    """Return the bytes of memory that programs can use: free memory, but at most the container's limit."""
    free = psutil.virtual_memory().available
    limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.exists() else ""
    return min(free, int(limit)) if limit.isdecimal() else free


if __name__ == "__main__":
    main()
