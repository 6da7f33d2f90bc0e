"""All instances save, load and fail together, and a run that was killed loses nothing but time.

Holds popdist.checkpoint.saving, popdist.checkpoint.loading and popdist.checkpoint.together.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.contract import checkpoint_laws, mesh_checkpoints
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS, run

NUM_KILLS = 12

SEED = 3


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 2), (3, 3)])
def test_laws(forked_world: ForkedWorlds, tmp_path: Path, num_instances: int, num_replicas: int) -> None:
    """Every law of checkpoint_laws.py, on every instance."""
    forked_world.keep_laws(checkpoint_laws, tmp_path, num_instances=num_instances, num_replicas=num_replicas)


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


def whole(instances: Sequence[dict[str, Any]], what: str) -> dict[str, str]:
    """What the instances have together; what several have must be the same."""
    joined: dict[str, str] = {}
    for found in instances:
        assert joined.items() | found[what].items() == (joined | found[what]).items()
        joined |= found[what]
    return joined


@pytest.mark.filterwarnings("ignore::popdist.PopdistWarning")
def test_a_checkpoint_loads_at_another_mapping(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Saved by 2 replicas of 2: weights, the optimizer's state, learning rate, samples and random numbers."""

    def world(fn: Callable[[Path], object], num_instances: int, tensor: int = 1, pipeline: int = 1) -> list[Any]:
        return forked_world(
            fn,
            tmp_path,
            num_instances=num_instances,
            tensor=tensor,
            pipeline=pipeline,
            timeout_seconds=DEADLINE_SECONDS,
        )

    def losses(instances: Sequence[dict[str, Any]]) -> list[float]:
        return [fmean(step) for step in zip(*(it["losses"] for it in instances), strict=True)]

    saved = world(mesh_checkpoints.train_and_save, 4, tensor=2)
    assert saved[0]["files"] == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for sizes in [(4, 2), (4,), (1,), (4, 2, 2), (1,)]:  # each saves, too
        if sizes == (4, 2, 2):
            forked_world(
                mesh_checkpoints.be_killed_while_saving,
                tmp_path,
                num_instances=2,
                tensor=2,
                victim=1,
                timeout_seconds=DEADLINE_SECONDS,
            )
            assert [path.name[0] for path in tmp_path.iterdir()] == ["s", "s", "s"]
        loaded = world(mesh_checkpoints.load, *sizes)
        for found in zip(*loaded, strict=True):
            assert whole(found, "then") == whole(saved, "then")
            assert found[0]["rate"] == saved[0]["rate"]
            assert found[0]["sample"] == saved[0]["sample"]
            assert losses(found) == pytest.approx(losses(saved), abs=1e-6)
        if sizes == (4, 2):
            for key in ("end", "draw", "losses"):
                assert [it[key] for (it,) in loaded] == [it[key] for it in saved]
