"""What a user meets with each launcher: its start, the lines of a failure, the exit code, and the processes left.

    python benchmarks/launchers.py --rounds 5 --ray ~/ray-environment/bin/python

The launchers are poprun, torchrun, ``accelerate launch``, ``fabric run``, and Ray Train if ``--ray`` names a
Python that has ``ray[train]`` and torch. All run on the CPUs of this machine. In each round every launcher starts
two processes of an empty script, in turn; the other figures are of four processes, and are measured once.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import psutil
from measuring.documents import table
from measuring.medians import median

MARK: Final = "LAUNCHERS_BENCHMARK"
"""An environment variable that all processes of a launch inherit."""

DEADLINE_SECONDS: Final = 300
GRACE_SECONDS: Final = 5

EMPTY: Final = "pass"
EXITS: Final = "import os, sys\nsys.exit(7 if RANK == 2 else 0)"
SLEEPS: Final = "import pathlib, time\npathlib.Path(FOLDER, f'ready-{RANK}').touch()\ntime.sleep(600)"
FAILS: Final = """
import torch
from torch import distributed
if not distributed.is_initialized():
    distributed.init_process_group("gloo")
SHARDS = {0: 512, 1: 512, 3: 512}
for _ in range(5):
    distributed.all_reduce(torch.ones(8))
num_samples = torch.tensor(SHARDS[RANK])
distributed.all_reduce(num_samples)
"""

SCRIPT: Final = "import os\nRANK, FOLDER = int(os.environ['RANK']), {folder!r}\n{body}\n"
RAY_SCRIPT: Final = """
import os
import ray
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def train():
    RANK, FOLDER = ray.train.get_context().get_world_rank(), {folder!r}
{body}

ray.init(num_cpus={num_processes} + 1)
TorchTrainer(train, scaling_config=ScalingConfig(num_workers={num_processes})).fit()
"""

RAY: Final = "Ray Train"


def contenders(num_processes: int, ray: str | None) -> Mapping[str, list[str]]:
    """Return the command of each launcher by its name; the script's path comes after the command."""
    scripts, number = Path(sys.executable).parent, str(num_processes)
    found = {
        "poprun": [f"{scripts}/poprun", "-n", number, sys.executable],
        "torchrun": [f"{scripts}/torchrun", "--nproc-per-node", number],
        "accelerate launch": [f"{scripts}/accelerate", "launch", "--multi_gpu", "--num_processes", number],
        "fabric run": [f"{scripts}/fabric", "run", "--accelerator", "cpu", "--devices", number],
    }
    return found if ray is None else found | {RAY: [ray]}


class Launch:
    """One run of a script by a launcher; all its processes end with the ``with`` block."""

    def __init__(self, name: str, body: str, num_processes: int, ray: str | None) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp())
        words = {"folder": str(self.folder), "num_processes": num_processes}
        if name == RAY:
            indented = "\n".join(f"    {line}" for line in body.splitlines())
            text = RAY_SCRIPT.format(body=indented, **words)
        else:
            text = SCRIPT.format(body=body, **words)
        script = self.folder / "script.py"
        script.write_text(text, encoding="utf-8")
        environment = {key: it for key, it in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen(
            [*contenders(num_processes, ray)[name], str(script)],
            env=environment | {MARK: self.mark, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.left():
            process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder)

    def left(self) -> list[psutil.Process]:
        """Return the processes of this launch that run."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def end(self) -> tuple[int, str]:
        """Return the exit code of the launcher and all that it has printed."""
        printed, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, printed


def start_seconds(name: str, ray: str | None) -> float:
    """Return the seconds that two processes of an empty script take, from the start to the end."""
    start = time.perf_counter()
    with Launch(name, EMPTY, 2, ray) as launch:
        code, printed = launch.end()
    if code:
        raise SystemExit(f"{name} ended with {code}:\n{printed}")
    return time.perf_counter() - start


def num_left(name: str, ray: str | None) -> int:
    """Return the number of processes that run 5 s after the launcher was killed by SIGKILL."""
    with Launch(name, SLEEPS, 4, ray) as launch:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(list(launch.folder.glob("ready-*"))) < 4:
            if launch.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{launch.end()[1]}")
            time.sleep(0.05)
        launch.process.kill()
        time.sleep(GRACE_SECONDS)
        return len(launch.left())


def rows(rounds: int, ray: str | None) -> list[list[str]]:
    """Return the table's rows."""
    names = list(contenders(2, ray))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            seconds[name].append(start_seconds(name, ray))
    found = {"start of 2 processes": [f"{median(seconds[name]).value:.2g} s" for name in names]}
    for name in names:
        with Launch(name, FAILS, 4, ray) as launch:
            found.setdefault("lines of a failure", []).append(str(len(launch.end()[1].splitlines())))
        with Launch(name, EXITS, 4, ray) as launch:
            found.setdefault("exit code of a process that exits with 7", []).append(str(launch.end()[0]))
        found.setdefault("processes left 5 s after kill -9", []).append(str(num_left(name, ray)))
    return [[key, *values] for key, values in found.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each launcher (default: 5)")
    parser.add_argument("--ray", help="a Python that has ray[train] and torch")
    options = parser.parse_args(arguments)
    print(table(["", *contenders(2, options.ray)], rows(options.rounds, options.ray)))


if __name__ == "__main__":
    main()
