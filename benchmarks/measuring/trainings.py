"""Processes that train one GPT a step at a time, and one that measures a disk, each when it is asked to."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from measuring.control_group import ControlGroup

MEASURING = Path(__file__).parent
DEADLINE_SECONDS = 300.0
STATE_TENSORS = {"SGD": 0, "AdamW": 2, "LAMB": 2}
"""For each optimizer: how many tensors of the size of a parameter it keeps of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and how.

    Attributes:
        way: The model is in memory, in a store that is read phase by phase, or in files that are mapped.
        layers: Number of layers.
        tokens: Of a step, which is one sequence in each of its micro batches.
        width: Of the layers, a multiple of 64.
        micro_batches: Of a step.
        optimizer: A name in ``STATE_TENSORS``.
        folder: For the files of a model that is not in memory; it is there.
        memory_bytes: What the process may hold if it trains by phases.
        threads: Of the process; 0 for as many as there are cores.
    """

    way: Literal["memory", "phases", "mapped"]
    layers: int
    tokens: int
    width: int = 512
    micro_batches: int = 1
    optimizer: str = "AdamW"
    folder: str = ""
    memory_bytes: int = 0
    threads: int = 0

    @property
    def weights_bytes(self) -> int:
        """Of all layers, without embedding and head."""
        return 4 * self.layers * (12 * self.width**2 + 13 * self.width)

    @property
    def read_bytes(self) -> int:
        """What a step has to read if nothing stays in memory: weights twice, and the optimizer's state."""
        return (2 * self.micro_batches + STATE_TENSORS[self.optimizer]) * self.weights_bytes

    @property
    def written_bytes(self) -> int:
        """What a step of one micro batch has to write: weights and the optimizer's state."""
        return (1 + STATE_TENSORS[self.optimizer]) * self.weights_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a step took: seconds, and what the process had the disk read and write."""

    seconds: float
    read_bytes: int
    written_bytes: int


class FailedError(Exception):
    """A process has ended, or does not answer."""


class Process:
    """A process that answers orders."""

    def __init__(self, process: "subprocess.Popen[str]", task: object, group: ControlGroup | None) -> None:
        self._process, self._task, self._group = process, task, group

    def step(self) -> Taken:
        """Train one step."""
        return Taken(**self.asked("step"))

    def checksum(self) -> str:
        """Of all weights."""
        return str(self.asked("checksum"))

    def speeds(self) -> tuple[float, float]:
        """Bytes that the disk reads in a second, and that it writes."""
        reading, writing = self.asked("speeds")
        return reading, writing

    def asked(self, order: str) -> Any:
        """The answer to ``order``; to an empty one what the process says when it is ready.

        Raises:
            FailedError: If none comes within five minutes, or the process has gone.
        """
        if order:
            print(order, file=self._process.stdin, flush=True)
        answers = self._process.stdout
        if not answers or not select.select([answers], [], [], DEADLINE_SECONDS)[0]:
            raise FailedError(f"no answer within {DEADLINE_SECONDS:.0f} s: {self._task}")
        answer = answers.readline()
        if not answer:
            killed = f", {self._group.num_killed} killed for want of memory" if self._group else ""
            raise FailedError(f"ended with {self._process.wait()}{killed}: {self._task}")
        return json.loads(answer)


@contextmanager
def started(task: Training | Path, group: ControlGroup | None = None) -> Iterator[Process]:
    """A process that is ready to train, or to measure the disk of a folder; it is ended with the context."""
    if isinstance(task, Training):
        program, argument, threads = "training_program.py", json.dumps(asdict(task)), task.threads
    else:
        program, argument, threads = "disk_program.py", str(task), 1
    words = [sys.executable, str(MEASURING / program), argument]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0))),
        "PYTHONPATH": f"{MEASURING.parent}{os.pathsep}{MEASURING.parent.parent}",
    }
    with subprocess.Popen(
        group.command(words) if group else words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            found = Process(process, task, group)
            found.asked("")
            yield found
        finally:
            process.kill()
