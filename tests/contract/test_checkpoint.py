"""All instances save, load and fail together, and a run that was killed loses nothing but time."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.contract import checkpoint_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS, run

NUM_KILLS = 20

SEED = 3


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 2), (3, 3)])
def test_laws(forked_world: ForkedWorlds, tmp_path: Path, num_instances: int, num_replicas: int) -> None:
    """Every law of checkpoint_laws.py, on every instance."""
    counts = forked_world(
        checkpoint_laws.run_all,
        tmp_path,
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [len([name for name in vars(checkpoint_laws) if name.startswith("law_")])] * num_instances


def test_a_killed_run_ends_with_the_bits_of_one_never_killed(tmp_path: Path) -> None:
    """Killed in steps and in saves, on any instance, and resumed in mid-epoch with 1, 2 or 4 of them."""
    finished = run(
        [sys.executable, "-m", "tests.contract.killed_training", str(tmp_path), str(NUM_KILLS), str(SEED)],
        env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    ).succeeded()
    found = json.loads(finished.out)

    assert [-9 in ends for ends in found["ends"]] == [True] * NUM_KILLS, finished.err
    assert len(set(found["splits"])) > 1
    assert found["num_torn"] > 0
    assert set(found["resumed"]) == set(found["whole"])
    assert len(found["whole"][0]) == 32
