"""How fast a launcher passes on what its programs print, and how much memory it takes for that.

    python benchmarks/output.py --rounds 3 --megabytes 1000

8 programs print lines of 80 bytes as fast as they can. First poprun runs once under scrutiny: what each program
printed must stand byte for byte in its log and, behind the tags, in poprun's own output. Then every round runs
each launcher once, in turn, so that a slow moment of the machine slows all of them; its output goes into a pipe
whose reader throws it away. mpiexec is MPICH's. Speeds differ from machine to machine; the ratios of one run are
what can be compared.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

NUM_INSTANCES: Final = 8
READ_BYTES: Final = 1024 * 1024
MEGABYTE: Final = 1000 * 1000
LINES_A_BLOCK: Final = 800
BLOCK_BYTES: Final = 80 * LINES_A_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a launcher.

    Attributes:
        seconds: From its start to its end.
        early_bytes: Its own peak of memory when a tenth of the output had passed; 0 when none passed.
        peak_bytes: The same at the end of the output.
    """

    seconds: float
    early_bytes: int
    peak_bytes: int


def blocks(rank: int, num_blocks: int) -> Iterator[bytes]:
    """What the program of ``rank`` prints: no two lines are alike."""
    rest = b"".join(b"%-78d|\n" % number for number in range(1, LINES_A_BLOCK))
    return (b"rank %-3d block %-63d|\n" % (rank, number) + rest for number in range(num_blocks))


def write(num_blocks: int) -> None:
    """Be one of the programs."""
    for block in blocks(int(os.environ.get("RANK") or os.environ["PMI_RANK"]), num_blocks):
        view = memoryview(block)
        while view:
            view = view[os.write(1, view) :]


def contenders(folder: Path) -> dict[str, list[str]]:
    """Name → the words before the program's."""
    scripts = Path(sys.executable).parent
    poprun = [str(scripts / "poprun"), "--launcher", "mpi", "-n", str(NUM_INSTANCES)]
    mpiexec = [str(scripts / "mpiexec"), "-n", str(NUM_INSTANCES)]
    return {
        "poprun, tags": poprun,
        "poprun, tags and --log-dir": [*poprun, "--log-dir", str(folder)],
        "poprun, no tags": [*poprun, "--no-tag-output"],
        "mpiexec, no tags": mpiexec,
        "mpiexec -prepend-rank": [*mpiexec, "-prepend-rank"],
        "mpiexec -outfile-pattern": [*mpiexec, "-outfile-pattern", str(folder / "%r")],
    }


@contextmanager
def started(command: list[str]) -> Iterator[tuple["subprocess.Popen[bytes]", BinaryIO]]:
    """``command`` as it runs, and what it prints; it has ended when the block ends."""
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.DEVNULL) as process,
    ):
        os.close(writer)
        yield process, output


def measure(command: list[str], num_bytes: int) -> Run:
    """Run ``command`` once and throw its output away."""
    start = time.perf_counter()
    num_read, early_bytes, peak_bytes = 0, 0, 0
    with started(command) as (process, output):
        while data := os.read(output.fileno(), READ_BYTES):
            num_read += len(data)
            if not early_bytes and num_read >= num_bytes // 10:
                early_bytes = peak_memory_bytes(process.pid)
            elif num_read >= num_bytes - READ_BYTES and not peak_bytes:
                peak_bytes = peak_memory_bytes(process.pid)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} ended with {process.returncode}")
    return Run(seconds=time.perf_counter() - start, early_bytes=early_bytes, peak_bytes=peak_bytes)


def peak_memory_bytes(pid: int) -> int:
    """The most memory that process ``pid`` itself has held so far."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def scrutinize(command: list[str], num_blocks: int, folder: Path) -> None:
    """Run poprun once, and end this program if a byte is missing, changed or in the wrong place."""
    shown = [hashlib.blake2b() for _ in range(NUM_INSTANCES)]
    with started(command) as (_, output):
        for line in output:
            tag, _, text = line.partition(b"] ")
            shown[int(tag.removeprefix(b"["))].update(text)
    logs = {path.name: path for path in folder.glob("*/0/*.out.log")}
    for rank in range(NUM_INSTANCES):
        wanted = hashlib.blake2b()
        for block in blocks(rank, num_blocks):
            wanted.update(block)
        with logs[f"instance-{rank}.out.log"].open("rb") as log:
            logged = hashlib.file_digest(log, hashlib.blake2b)
        if not wanted.digest() == shown[rank].digest() == logged.digest():
            sys.exit(f"the output of instance {rank} did not arrive as it was printed")


def main() -> None:
    """Check, measure, then print a table and the command that made it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each launcher runs (3)")
    parser.add_argument("--megabytes", type=int, default=1000, help="how much all programs print together (1000)")
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write)
        return

    num_blocks = options.megabytes * MEGABYTE // NUM_INSTANCES // BLOCK_BYTES
    num_bytes = num_blocks * BLOCK_BYTES * NUM_INSTANCES
    program = [sys.executable, str(Path(__file__).resolve()), "--write", str(num_blocks)]
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {name: [*words, *program] for name, words in contenders(folder).items()}
        scrutinize(commands["poprun, tags and --log-dir"], num_blocks, folder)
        for _ in range(options.rounds):
            for contender, command in commands.items():
                shutil.rmtree(folder)
                folder.mkdir()
                runs.setdefault(contender, []).append(measure(command, num_bytes))

    show(runs, num_bytes)
    print(f"\n{options.rounds} rounds; again: {shlex.join(['python', *sys.argv])}")


def show(runs: dict[str, list[Run]], num_bytes: int) -> None:
    """Print the table."""
    megabytes = num_bytes / MEGABYTE
    print(
        f"{NUM_INSTANCES} programs print {megabytes:,.0f} MB; every byte arrived, in the logs and behind the tags"
    )
    print(f"\n{'':27}{'median':>8}{'':30}  its own peak of memory")
    base = statistics.median(run.seconds for run in runs["mpiexec, no tags"])
    for name, some in runs.items():
        seconds = statistics.median(run.seconds for run in some)
        early, peak = (
            max(getattr(run, field) for run in some) / MEGABYTE for field in ("early_bytes", "peak_bytes")
        )
        speed = f"{megabytes / seconds:7.0f} MB/s  {base / seconds:5.2f} x mpiexec's"
        memory = f"{early:6.1f} MB at a tenth, {peak:.1f} MB at the end" if peak else "  prints nothing itself"
        print(f"{name:27}{seconds:6.2f} s{speed}{memory}")


if __name__ == "__main__":
    main()
