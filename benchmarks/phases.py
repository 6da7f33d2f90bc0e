"""Train a model ten times larger than the memory, against the model in memory, the disk, and plain mmap.

    python benchmarks/phases.py --folder /data/phases

Each training runs in a process of its own, in a control group with a limit of memory; the models in memory run
outside. Processes that are compared take steps by turns. A row that fails says so, and the others are measured.

- **Bits**: the weights after three steps have to be those of the model in memory. Of SGD the weights are ten times
  the limit; of AdamW and LAMB the weights, their gradients and the optimizer's state.
- **Where it computes longer than it reads**: against the model in memory, which computes its layers again, too.
  The limit is half as large again, as more activations need more memory.
- **Where reading dominates**: a fast disk reads a layer about as fast as this model computes it, with few samples
  too. So the disk is slowed down, as a control group can, to ``--reads`` for our training, and likewise for what
  measures the disk. The disk's own bound is the time in which direct reads and writes, by as many threads as are
  fastest, move what a step has to: the weights for the forward and for the backward pass, and the optimizer's
  state; or what the step did move where that is less.
- **Plain mmap** is a loop over tensors in mapped files, which updates each parameter as soon as its gradient is
  there. Here the disk is as fast as it is.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from measuring.control_group import NoControlGroupError, control_group
from measuring.documents import put, table
from measuring.medians import median, ratio
from measuring.trainings import STATE_TENSORS, FailedError, Process, Training, started

MIB, GIB = 1024**2, 1024**3
COMPUTING_TOKENS, READING_TOKENS = 1024, 16
"""Of a step that computes longer than it reads, and of one that hardly computes."""

COMPUTING_LIMIT = 1.5
"""So many times as much memory has a step that computes long: the activations of many tokens need it."""

OF_MEMORY, OF_DISK, OF_MAPPED = 0.8, 0.9, 1.15
WARM_STEPS = 3
"""The third one has the phases that were planned."""

LEAST_ROUNDS, ROUNDS_SECONDS = 2, 40.0

Turns = Iterator[tuple[float, float]]
"""Our seconds and theirs, of steps that were taken by turns."""


class Measuring:
    """Makes trainings of models that are so many times larger than a limit."""

    def __init__(self, folder: Path, limit_bytes: int, rounds: int, read_speed: int) -> None:
        self._folder, self._limit_bytes, self._rounds, self._read_speed = folder, limit_bytes, rounds, read_speed

    def training(self, factor: float, tokens: int, optimizer: str = "AdamW") -> Training:
        """By phases, of a model ``factor`` times as large as the limit."""
        one = Training(way="phases", layers=1, tokens=tokens, optimizer=optimizer)
        tensors = 2 + STATE_TENSORS[optimizer] if STATE_TENSORS[optimizer] else 1
        layers = -int(-factor * self._limit_bytes // (tensors * one.weights_bytes))
        return replace(one, layers=layers, memory_bytes=int(0.95 * self._limit_bytes))

    @contextmanager
    def limited(self, task: Training | Path, *, slow: bool = False) -> Iterator[Process]:
        """It in a control group, with files of its own, on a disk that is slowed down or not."""
        slow_disk = (self._folder, self._read_speed) if slow else None
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            control_group(self._limit_bytes, slow_disk) as group,
            started(
                replace(task, folder=folder) if isinstance(task, Training) else Path(folder), group
            ) as process,
        ):
            yield process

    def bits(self, factor: float, optimizer: str) -> list[str]:
        """Whether a model trains to the bits of the one in memory: a row of a table."""
        training = self.training(factor, READING_TOKENS, optimizer)
        try:
            with self.limited(training) as process:
                found = warmed(process).checksum()
            with started(replace(training, way="memory")) as other:
                told = says(holds=warmed(other).checksum() == found)
        except FailedError as error:
            told = f"NO: {error}"
        whole = (2 + STATE_TENSORS[optimizer]) * training.weights_bytes
        return [optimizer, f"{training.weights_bytes / GIB:.2f} GiB", f"{whole / GIB:.2f} GiB", told]

    def computing(self, factor: float) -> Turns:
        """Steps that compute longer than they read, against the model in memory."""
        training = self.training(factor, COMPUTING_TOKENS)
        with self.limited(training) as process, started(replace(training, way="memory")) as other:
            warmed(process), warmed(other, 1)
            for _ in bounded(self._rounds):
                yield process.step().seconds, other.step().seconds

    def reading(self, factor: float) -> Turns:
        """Steps that hardly compute, on a slow disk, against that disk."""
        training = self.training(factor, READING_TOKENS)
        with self.limited(training, slow=True) as process, self.limited(self._folder, slow=True) as disk:
            warmed(process)
            for _ in bounded(self._rounds):
                taken, (reading, writing) = process.step(), disk.speeds()
                num_read = min(training.read_bytes, taken.read_bytes)
                num_written = min(training.written_bytes, taken.written_bytes)
                yield taken.seconds, num_read / reading + num_written / writing

    def mapped(self, factor: float) -> Turns:
        """Steps that hardly compute, against mapped files."""
        training = self.training(factor, READING_TOKENS)
        with self.limited(training) as process, self.limited(replace(training, way="mapped")) as other:
            warmed(process), warmed(other, 1)
            for _ in bounded(self._rounds):
                os.sync()  # what the kernel has not written yet of the mapped files
                yield process.step().seconds, other.step().seconds


def row(what: str, against: str, least: float, turns: Turns) -> list[str]:
    """A comparison as a row of a table, with what the ratio has to be; or why it could not be measured."""
    try:
        ours, theirs = zip(*turns, strict=True)
    except (FailedError, NoControlGroupError) as error:
        return [what, against, str(error), "", "", f"≥ {least}", says(holds=False)]
    found = ratio(theirs, ours)
    seconds = [f"{median(it).value:.3g} s" for it in (ours, theirs)]
    times = f"{found.value:.2f} ({found.lower:.2f} to {found.upper:.2f})"
    return [what, against, *seconds, times, f"≥ {least}", says(holds=found.value >= least)]


def says(*, holds: bool) -> str:
    """Whether something holds."""
    return "yes" if holds else "NO"


def bounded(rounds: int) -> Iterator[int]:
    """Numbers of rounds, of which no further one begins after some time, as the kernel's paging may be slow."""
    begin = time.monotonic()
    for number in range(rounds):
        if number < LEAST_ROUNDS or time.monotonic() - begin < ROUNDS_SECONDS:
            yield number


def warmed(process: Process, num_steps: int = WARM_STEPS) -> Process:
    """The process after the first steps, which make the optimizer's state and measure for the plan."""
    for _ in range(num_steps):
        process.step()
    return process


def main() -> None:
    """Measure, print tables, and write the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured (.)")
    parser.add_argument("--limit", type=int, default=512, help="MiB of memory of a training (512)")
    parser.add_argument("--rounds", type=int, default=5, help="how often those that are compared take a step (5)")
    parser.add_argument("--reads", type=int, default=500, help="MB that the slow disk reads in a second (500)")
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[2, 5, 10], help="sizes of models, of the limit (2 5 10)"
    )
    parser.add_argument(
        "--only", nargs="+", default=["bits", "computing", "reading", "mapped"], help="of the parts"
    )
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `phases` gets the tables")
    options = parser.parse_args()
    measuring = Measuring(options.folder, options.limit * MIB, options.rounds, options.reads * 10**6)
    least, most = min(options.factors), max(options.factors)
    few, reads = f"{READING_TOKENS} tokens a step", f"reads of {options.reads / 1000:g} GB/s"
    bits, rows = [], []
    try:
        with control_group(options.limit * MIB):
            pass
        if "bits" in options.only:
            bits += [measuring.bits(most, name) for name in STATE_TENSORS]
        if "computing" in options.only:
            limit = int(COMPUTING_LIMIT * options.limit)
            roomy = Measuring(options.folder, limit * MIB, options.rounds, options.reads * 10**6)
            what = f"{least:g} times {limit} MiB, {COMPUTING_TOKENS:,} tokens a step"
            rows.append(row(what, "the model in memory", OF_MEMORY, roomy.computing(least)))
        for factor in sorted({least, most}) if "reading" in options.only else ():
            what = f"{factor:g} times the limit, {few}, {reads}"
            rows.append(row(what, "the disk's own bound", OF_DISK, measuring.reading(factor)))
        for factor in options.factors if "mapped" in options.only else ():
            what = f"{factor:g} times the limit, {few}"
            rows.append(row(what, "plain mmap", OF_MAPPED, measuring.mapped(factor)))
    except NoControlGroupError as error:
        raise SystemExit(str(error)) from None
    command = shlex.join(["python", *sys.argv])
    told = f"A control group of {options.limit} MiB, {len(os.sched_getaffinity(0))} cores: `{command}`"
    sizes = table(["optimizer", "weights", "with gradients and state", "bits of the model in memory"], bits)
    speeds = table(["model", "against", "a step", "theirs", "times as long", "limit", "holds"], rows)
    text = f"{told}\n\n{sizes}\n\n{speeds}"
    print(text)
    if options.document:
        put(options.document, "phases", text)


if __name__ == "__main__":
    main()
