"""Train a model ten times larger than the memory, against the model in memory, the disk, and plain mmap.

    python benchmarks/phases.py --folder /data/phases --document docs/phases.md

Each training runs in a process of its own, in a control group with a limit of memory; the models in memory run
outside. Processes that are compared take steps by turns.

The weights after two steps have to be those of the model in memory. Of SGD the weights are ten times the limit; of
AdamW and LAMB the weights, their gradients and the optimizer's state. The disk's own bound is the time in which
direct reads and writes, by as many threads as are fastest, move what a step has to: the weights for the forward
and for the backward pass, and the optimizer's state; or what the step did move where that is less. Plain mmap is
a loop over tensors in mapped files, which updates each parameter as soon as its gradient is there.
"""

import argparse
import json
import mmap
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from measuring.control_group import NoControlGroupError, control_group
from measuring.documents import put, table
from measuring.medians import Median, ratio
from measuring.trainings import STATE_TENSORS, Taken, Training, TrainingProcess, started

MIB, GIB = 1024**2, 1024**3
COMPUTING_TOKENS, READING_TOKENS = 256, 16
"""Of a step that computes longer than it reads, and of one that hardly computes."""

OF_MEMORY, OF_DISK, OF_MAPPED = 0.8, 0.9, 1.15
WARM_STEPS = 2
LEAST_ROUNDS, ROUNDS_SECONDS = 2, 60.0
PIECE_BYTES, BUFFER_BYTES, FILE_BYTES = 8 * MIB, 64 * MIB, 512 * MIB
THREADS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A ratio that was measured, and what it has to be."""

    what: str
    against: str
    ours: list[float]
    theirs: list[float]
    least: float

    @property
    def found(self) -> Median:
        """How many times as long theirs takes."""
        return ratio(self.theirs, self.ours)

    @property
    def cells(self) -> list[str]:
        """It as a row of a table."""
        found = self.found
        times = f"{found.value:.2f} ({found.lower:.2f} to {found.upper:.2f})"
        seconds = [f"{sorted(it)[len(it) // 2]:.3g} s" for it in (self.ours, self.theirs)]
        return [self.what, self.against, *seconds, times, f"≥ {self.least}", says(holds=found.value >= self.least)]


def says(*, holds: bool) -> str:
    """Whether something holds."""
    return "yes" if holds else "NO"


class Measuring:
    """Makes trainings of models that are so many times larger than a limit."""

    def __init__(self, folder: Path, limit_bytes: int, width: int) -> None:
        self._folder, self._limit_bytes, self._width = folder, limit_bytes, width

    def training(self, factor: float, tokens: int, optimizer: str = "AdamW") -> Training:
        """By phases, of a model ``factor`` times as large as the limit."""
        one = Training(way="phases", layers=1, tokens=tokens, width=self._width, optimizer=optimizer)
        tensors = 2 + STATE_TENSORS[optimizer] if STATE_TENSORS[optimizer] else 1
        layers = -int(-factor * self._limit_bytes // (tensors * one.weights_bytes))
        return replace(one, layers=layers, memory_bytes=int(0.95 * self._limit_bytes))

    @contextmanager
    def limited(self, training: Training, num_warm: int = WARM_STEPS) -> Iterator[TrainingProcess]:
        """It in a control group, with files of its own, after its first steps."""
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            control_group(self._limit_bytes) as group,
            started(replace(training, folder=folder), group) as process,
        ):
            warmed(process, num_warm)
            yield process

    def same_bits(self, training: Training) -> bool:
        """Whether it trains to the bits of the model in memory."""
        with self.limited(training) as process:
            found = process.checksum()
        with started(replace(training, way="memory")) as other:
            warmed(other, WARM_STEPS)
            return other.checksum() == found

    def computing(self, factor: float, rounds: int) -> Row:
        """Steps that compute longer than they read, against the model in memory."""
        training = self.training(factor, COMPUTING_TOKENS)
        with self.limited(training) as process, started(replace(training, way="memory")) as other:
            warmed(other, 1)
            turns = [(process.step(), other.step()) for _ in bounded(rounds)]
        return Row(
            what=f"{factor:g} times the limit, {COMPUTING_TOKENS:,} tokens a step",
            against="the model in memory",
            ours=[ours.seconds for ours, _ in turns],
            theirs=[theirs.seconds for _, theirs in turns],
            least=OF_MEMORY,
        )

    def reading(self, factor: float, rounds: int) -> tuple[Row, Row]:
        """Steps that hardly compute, against the disk and against mapped files."""
        training = self.training(factor, READING_TOKENS)
        disk = Disk(self._folder / "disk")
        ours: list[Taken] = []
        bounds, mapped = [], []
        with self.limited(training) as process, self.limited(replace(training, way="mapped"), 1) as other, disk:
            for _ in bounded(rounds):
                os.sync()  # what the kernel has not written yet of the mapped files
                ours.append(process.step())
                bounds.append(disk.seconds(training, ours[-1]))
                mapped.append(other.step().seconds)
        seconds = [it.seconds for it in ours]
        what = f"{factor:g} times the limit, {READING_TOKENS} tokens a step"
        return (
            Row(what=what, against="the disk's own bound", ours=seconds, theirs=bounds, least=OF_DISK),
            Row(what=what, against="plain mmap", ours=seconds, theirs=mapped, least=OF_MAPPED),
        )


def bounded(rounds: int) -> Iterator[int]:
    """Numbers of rounds, of which no further one begins after a minute, as the kernel's paging may be slow."""
    begin = time.monotonic()
    for number in range(rounds):
        if number < LEAST_ROUNDS or time.monotonic() - begin < ROUNDS_SECONDS:
            yield number


def warmed(process: TrainingProcess, num_steps: int) -> None:
    """Take the first steps, which make the optimizer's state and measure for the plan."""
    for _ in range(num_steps):
        process.step()


class Disk:
    """A file that is read and written without the kernel's cache."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, FILE_BYTES)
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in THREADS]
        for buffer in self._buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(bytes(BUFFER_BYTES))
        self._moved(1, writes=True)  # what was never written is not read from the disk
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._path.unlink()

    def seconds(self, training: Training, taken: Taken) -> float:
        """How long the disk takes for what the step of ``training`` that took ``taken`` had to read and write."""
        num_read = min(training.read_bytes, taken.read_bytes)
        num_written = min(training.written_bytes, taken.written_bytes)
        return num_read / self._speed(writes=False) + num_written / self._speed(writes=True)

    def _speed(self, *, writes: bool) -> float:
        """Bytes in a second, with the number of threads that is fastest."""
        return max(FILE_BYTES / self._moved(num, writes=writes) for num in THREADS)

    def _moved(self, num_threads: int, *, writes: bool) -> float:
        """Seconds in which so many threads write the whole file, or read it."""

        def move(first: int) -> None:
            for start in range(first * PIECE_BYTES, FILE_BYTES, num_threads * PIECE_BYTES):
                piece = memoryview(self._buffers[first])[start % BUFFER_BYTES :][:PIECE_BYTES]
                moved = (os.pwritev if writes else os.preadv)(self._file, [piece], start)
                if moved != PIECE_BYTES:
                    raise SystemExit(f"{moved} of {PIECE_BYTES} bytes were moved in {self._path}")

        with ThreadPoolExecutor(num_threads) as threads:
            begin = time.perf_counter()
            list(threads.map(move, range(num_threads)))
            return time.perf_counter() - begin


def described(bits: Mapping[str, tuple[Training, bool]], rows: Sequence[Row], limit: str, command: str) -> str:
    """Everything in words and tables."""
    sizes = [
        [
            name,
            f"{training.weights_bytes / GIB:.2f} GiB",
            f"{(2 + STATE_TENSORS[name]) * training.weights_bytes / GIB:.2f} GiB",
            says(holds=same),
        ]
        for name, (training, same) in bits.items()
    ]
    sizes_head = ["optimizer", "weights", "with gradients and state", "bits of the model in memory"]
    head = ["model", "against", "a step", "theirs", "times as long", "limit", "holds"]
    return "\n\n".join(
        [
            f"A control group of {limit}, {len(os.sched_getaffinity(0))} cores: `{command}`",
            table(sizes_head, sizes),
            table(head, [row.cells for row in rows]),
        ]
    )


def main() -> None:
    """Measure, print tables, and write the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured (.)")
    parser.add_argument("--limit", type=int, default=512, help="MiB of memory of a training (512)")
    parser.add_argument("--width", type=int, default=512, help="of the layers (512)")
    parser.add_argument("--rounds", type=int, default=5, help="how often those that are compared take a step (5)")
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[2, 5, 10], help="sizes of models, of the limit (2 5 10)"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `phases` gets the tables")
    options = parser.parse_args()
    measuring = Measuring(options.folder, options.limit * MIB, options.width)
    bits, rows = {}, []
    try:
        for name in STATE_TENSORS:
            training = measuring.training(max(options.factors), READING_TOKENS, name)
            bits[name] = training, measuring.same_bits(training)
        rows.append(measuring.computing(sorted(options.factors)[len(options.factors) // 2], options.rounds))
        for factor in options.factors:
            rows += measuring.reading(factor, options.rounds)
    except NoControlGroupError as error:
        raise SystemExit(str(error)) from None
    text = described(bits, rows, f"{options.limit} MiB", shlex.join(["python", *sys.argv]))
    print(text)
    if options.json:
        found = {"bits": {name: same for name, (_, same) in bits.items()}, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.document:
        put(options.document, "phases", text)


if __name__ == "__main__":
    main()
