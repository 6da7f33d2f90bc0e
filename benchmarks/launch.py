"""How long a launcher takes from its start to its end when the program does nothing: ``true``, 1 to 256 times.

    python benchmarks/launch.py --plot docs/launch.svg

Every round runs each launcher once at each number of processes, in turn, so that a slow moment of the machine
slows all of them. Times differ from machine to machine; the ratios of one round are what can be compared. What a
further process takes is the slope from the fewest to the most of them. Besides: what Python takes to start, the
machine's own limit, and what popdist takes in a program.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from measuring.documents import put, table
from measuring.log_log import Panel, svg
from measuring.medians import Median, median, ratio

MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI's launcher refuses to run for root without these; poprun sees to it itself."""

LOCAL, MPI, TORCHRUN, MPIEXEC = "poprun (local)", "poprun (MPI)", "torchrun", "mpiexec"
LEAST_FASTER = 18
"""How many times as long torchrun takes for two programs at least."""

PYTHON, IMPORT, INIT = "python", "import popdist", "popdist.init()"

INIT_PROGRAM = """
import gc, time, torch, popdist
gc.collect()
start = time.perf_counter()
popdist.init()
print(time.perf_counter() - start)
"""
"""Prints what ``popdist.init()`` takes once torch is there: the instance that comes last waits for nobody.

Python's pass over all of torch's objects comes before, because it may be due at any moment.
"""

Seconds = Mapping[tuple[str, int], Sequence[float]]


def contenders(num_processes: int) -> dict[str, list[str]]:
    """Name → command; all of this interpreter's environment."""
    scripts = Path(sys.executable).parent
    number = str(num_processes)
    poprun = [str(scripts / "poprun"), "-n", number]
    return {
        LOCAL: [*poprun, "--launcher", "local", "true"],
        MPI: [*poprun, "--launcher", "mpi", "true"],
        TORCHRUN: [str(scripts / "torchrun"), "--nproc-per-node", number, "--no-python", "true"],
        MPIEXEC: [str(scripts / "mpiexec"), "-n", number, "true"],
    }


def run(command: Sequence[str]) -> tuple[float, str]:
    """Seconds from start to end of ``command``, and its output; Python keeps its bytecode, as for users."""
    environment = os.environ | MPI_AS_ROOT
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    ended = subprocess.run(
        command, check=True, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return time.perf_counter() - start, ended.stdout


def measure(rounds: int, numbers: Sequence[int]) -> Seconds:
    """The seconds of each round, by name and number of processes; further figures have the number 0."""
    python, init = [sys.executable, "-c"], [*contenders(2)[LOCAL][:-1], "--no-tag-output", sys.executable, "-c"]
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for number in numbers:
            for name, command in contenders(number).items():
                found.setdefault((name, number), []).append(run(command)[0])
        found.setdefault((PYTHON, 0), []).append(run([*python, "pass"])[0])
        found.setdefault((IMPORT, 0), []).append(run([*python, "import popdist"])[0])
        found.setdefault((INIT, 0), []).append(min(map(float, run([*init, INIT_PROGRAM])[1].split())))
    return found


def curve_table(seconds: Seconds, numbers: Sequence[int]) -> str:
    """The medians, and the ratio of torchrun to poprun without MPI."""
    names = [LOCAL, TORCHRUN, MPI, MPIEXEC]
    rows = [
        [
            f"{number}",
            *(f"{median(seconds[name, number]).value * 1000:.3g} ms" for name in names),
            times(ratio(seconds[TORCHRUN, number], seconds[LOCAL, number])),
        ]
        for number in numbers
    ]
    return table(["processes", *names, "torchrun / local"], rows)


def limits_table(seconds: Seconds, numbers: Sequence[int]) -> str:
    """What is asked, and what was measured."""
    fewest, most = numbers[0], numbers[-1]
    first = 2 if 2 in numbers else fewest

    def less(name: str, other: str, number: int) -> list[float]:
        return [a - b for a, b in zip(seconds[name, number], seconds[other, number], strict=True)]

    def slope(values: Sequence[float], at_least: Sequence[float]) -> Median:
        return median([(a - b) / max(most - fewest, 1) for a, b in zip(values, at_least, strict=True)])

    local = slope(seconds[LOCAL, most], seconds[LOCAL, fewest])
    mpi = slope(less(MPI, MPIEXEC, most), less(MPI, MPIEXEC, fewest))
    imported = median([a - b for a, b in zip(seconds[IMPORT, 0], seconds[PYTHON, 0], strict=True)])
    faster = ratio(seconds[TORCHRUN, first], seconds[LOCAL, first])
    rows = [
        [
            f"{first} x true without MPI, torchrun takes",
            times(faster),
            f"≥ {LEAST_FASTER}",
            holds(faster.value >= LEAST_FASTER),
        ],
        bounded("each further instance without MPI", local, 0.003),
        bounded(f"{first} x true under MPI, over mpiexec", median(less(MPI, MPIEXEC, first)), 0.12),
        bounded("each further instance under MPI, over mpiexec", mpi, 0.008),
        bounded("import popdist, over a start of Python", imported, 0.015),
        bounded("popdist.init() of two instances, torch is there", median(seconds[INIT, 0]), 0.03),
    ]
    return table(["what", "median (95%)", "limit", "holds"], rows)


def bounded(what: str, found: Median, limit_seconds: float) -> list[str]:
    """A row of a time that is to stay below a limit."""
    text = " to ".join(f"{value * 1000:.3g}" for value in (found.lower, found.upper))
    limit = f"≤ {limit_seconds * 1000:g} ms"
    return [what, f"{found.value * 1000:.3g} ms ({text})", limit, holds(found.value <= limit_seconds)]


def times(found: Median) -> str:
    """A ratio with its interval."""
    return f"{found.value:.3g} x ({found.lower:.3g} to {found.upper:.3g})"


def holds(is_held: bool) -> str:  # noqa: FBT001 - a word for it
    """The word for whether a limit holds."""
    return "yes" if is_held else "NO"


def draw(seconds: Seconds, numbers: Sequence[int]) -> str:
    """The picture: seconds over processes, one curve for each launcher."""
    found = {
        name: {number: median(seconds[name, number]) for number in numbers}
        for name in (MPIEXEC, LOCAL, MPI, TORCHRUN)
    }
    curves = {
        name: {number: (one.value, one.lower, one.upper) for number, one in curve.items()}
        for name, curve in found.items()
    }
    panel = Panel(title="true, from start to end", curves=curves)
    return svg([panel], str, lambda at: f"{at:g} s", "seconds over the number of processes")


def main() -> None:
    """Measure, then print tables and the command that made them, or put them into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each launcher runs (9)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 8, 64, 256])
    parser.add_argument("--document", type=Path, help="put the tables into this file")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG")
    words = parser.parse_args()
    seconds = measure(words.rounds, words.processes)
    head = f"{words.rounds} rounds, medians: `{shlex.join(['python', *sys.argv])}`"
    text = "\n\n".join([head, curve_table(seconds, words.processes), limits_table(seconds, words.processes)])
    print(text)
    if words.document is not None:
        put(words.document, "launch", text)
    if words.plot is not None:
        words.plot.write_text(draw(seconds, words.processes), encoding="utf-8")


if __name__ == "__main__":
    main()
