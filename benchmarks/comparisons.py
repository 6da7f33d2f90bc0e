"""What poprun-report compare says of equal trainings, and of some that were slowed, beside other work or none.

    python benchmarks/comparisons.py --pairs 20 --load 2

Each training is compared with the one before it. Then the last instance of some is late by a share of each step,
in one of three phases. Other work is a process for each ``--load`` that computes and rests by turns.
"""

import argparse
import multiprocessing
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import run

from measuring.documents import put, table

from poprun.observe.account.job_record import JobRecord, read_report
from poprun.observe.show.compare import Change, Comparison, compare

PROGRAM = Path(__file__).parent / "measuring" / "delayed_training.py"
PHASES = ("data", "forward", "optimizer")
SHARES = (0.1, 0.2, 0.5)


def report_of(folder: str, seconds: float, *words: str) -> JobRecord:
    """The report of one training."""
    file = Path(folder, "report.json")
    poprun = [str(Path(sys.executable).with_name("poprun")), "-n", "2", "--report", str(file)]
    # torch 2.13 may abort a process that ends right after a collective; the report is whole all the same
    run([*poprun, sys.executable, str(PROGRAM), f"{seconds:g}", *words], check=False, capture_output=True)
    return read_report(file.read_text(encoding="utf-8"), str(file))


def work() -> None:
    """Compute and rest by turns, each for up to three seconds, until somebody ends this."""
    while True:
        until = time.monotonic() + random.uniform(0.1, 3)  # noqa: S311 - other work
        while time.monotonic() < until:
            pass
        time.sleep(random.uniform(0.1, 3))  # noqa: S311 - as above


@contextmanager
def loaded(num_processes: int) -> Iterator[None]:
    """Other work on this machine."""
    processes = [multiprocessing.Process(target=work, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.terminate()


def row(name: str, found: Comparison) -> Sequence[str]:
    """A comparison as cells of a table."""
    step = found.differences[0]
    return [name, step.before, step.after, step.change, f"{step.noise:.1%}", "; ".join(step.notes)]


def main() -> None:
    """Train, compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="equal trainings, each compared with the one before")
    parser.add_argument("--load", type=int, default=0, help="processes that do other work (0)")
    parser.add_argument("--seconds", type=float, default=14, help="of each training (14)")
    parser.add_argument("--document", type=Path, help="a Markdown file; its part `comparisons` gets the table")
    options = parser.parse_args()
    rows, equal = [], []
    with tempfile.TemporaryDirectory() as folder, loaded(options.load):
        before = report_of(folder, options.seconds)
        for number in range(options.pairs):
            after = report_of(folder, options.seconds)
            found, before = compare(before, after), after
            equal.append(found.differences[0].change is Change.NONE)
            rows.append(row(f"equal, {number + 1}", found))
        step_seconds = float(found.differences[0].after.split()[0]) / 1000
        for phase in PHASES:
            for share in SHARES:
                words = ("--phase", phase, "--delay", f"{share * step_seconds:.6f}")
                found = compare(before, report_of(folder, options.seconds, *words))
                rows.append(row(f"late in {phase} by {share:.0%} of a step", found))
    head = ["second training", "a step before", "after", "said", "noise", "why, or where"]
    told = f"{sum(equal)} of {len(equal)} equal pairs: {Change.NONE}. `{shlex.join(['python', *sys.argv])}`"
    text = f"{told}\n\n{table(head, rows)}"
    print(text)
    if options.document:
        put(options.document, "comparisons", text)


if __name__ == "__main__":
    main()
