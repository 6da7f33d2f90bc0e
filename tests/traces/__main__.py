"""Trace jobs with known delays and a false clock, and print how far the trace and its table are from the truth."""

import json
import os
import random
import sys
import tempfile
from statistics import median

from tests.trace_checks import faults
from tests.traces.traced_jobs import FALSE_CLOCK, clock_errors, launched, read

PLACES = ("forward", "compute", "data", "popdist")
STEP_MS = 20


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def prove_delays(num_runs: int) -> None:
    """Random delays of one instance, on a false clock: print how wrong the clock and the table are."""
    generator = random.Random(0)  # noqa: S311 - no secret
    say(
        "| late in | delay | found | error | clock off by | stated | holds | faults |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    num_right = num_held = 0
    for number in range(num_runs):
        place, delay_ms = PLACES[number % len(PLACES)], generator.randrange(50, 300)
        with tempfile.TemporaryDirectory() as folder:
            launched(folder, (place, str(delay_ms), "18", str(STEP_MS)))
            document, table = read(folder)
        found_ms = table.instances[0].seconds["waiting"] * 1000 / table.num_steps
        error = found_ms / delay_ms - 1
        errors = clock_errors(document)
        clocks = document["poprun"]["instances"]
        worst = max(max(own) for own in errors.values())
        stated = max(it["uncertainty_seconds"] for it in clocks.values())
        holds = all(max(own) <= clocks[str(index)]["uncertainty_seconds"] for index, own in errors.items())
        num_right, num_held = num_right + (abs(error) <= 0.05), num_held + (holds and worst <= 1e-3)
        say(
            f"| {place} | {delay_ms} ms | {found_ms:.1f} ms | {error:+.1%} | {worst * 1e6:.0f} µs "
            f"| {stated * 1e6:.0f} µs | {'yes' if holds else 'NO'} | {len(faults(document))} |",
        )
    say(f"\ntable within 5 %: {num_right} of {num_runs}; clock within 1 ms, as stated: {num_held} of {num_runs}")


def prove_cost() -> None:
    """The length of a step before, in and after the window, on both instances."""
    with tempfile.TemporaryDirectory() as folder:
        finished = launched(folder, ("none", "0", "150", str(STEP_MS)), steps="50:100")
    for line in (line for line in finished.out.splitlines() if line.startswith("[")):
        lengths = json.loads(line)
        before, traced, after = (median(lengths[a:b]) * 1000 for a, b in ((10, 50), (51, 99), (101, 150)))
        say(f"a step: {before:.2f} ms before the window, {traced:.2f} ms in it, {after:.2f} ms after it")


if __name__ == "__main__":
    say(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, clock of instance 1: {FALSE_CLOCK}\n")
    prove_delays(int(sys.argv[1]) if sys.argv[1:] else 20)
    prove_cost()
