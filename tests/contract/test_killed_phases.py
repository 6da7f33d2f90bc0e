"""A run in phases that was killed at a random moment loses nothing but time."""

import json
import os
import sys
from pathlib import Path

from tests.contract.killed_phases import KILLED
from tests.running import run

NUM_KILLS = 3

SEED = 1


def test_a_killed_run_in_phases_ends_with_the_bits_of_one_in_memory(disk_folder: Path) -> None:
    """Killed in transfers, saves and loads; resumed by other numbers of instances and phases, and in memory."""
    finished = run(
        [sys.executable, "-m", "tests.contract.killed_phases", str(disk_folder), str(NUM_KILLS), str(SEED)],
        env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    ).succeeded()
    found = json.loads(finished.out)

    ends = [*found["resumed"], *(end for end in found["ends"] if not KILLED & {*end})]
    assert {bits for end in ends for bits in end} == set(found["whole"]), finished.err
    assert len(found["ends"]) - (len(ends) - len(found["resumed"])) == NUM_KILLS
    assert len({str(phases) for _, phases, _ in found["lives"]}) > 1
