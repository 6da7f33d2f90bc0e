"""Gradients that go while the backward pass runs have the bits of those that go at its end."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import popdist
from tests.contract import loop_laws, overlap_laws, overlap_losses, training_recipes
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.laws import laws_of
from tests.running import DEADLINE_SECONDS, run

NUM_RECIPES = len([name for name in vars(training_recipes) if name.startswith("recipe_")])


@pytest.mark.parametrize(
    ("num_instances", "num_replicas", "num_hosts"), [(2, 2, 2), (3, 6, 3), (4, 12, 4), (4, 8, 2)]
)
def test_laws(forked_world: ForkedWorlds, num_instances: int, num_replicas: int, num_hosts: int) -> None:
    """Every law of overlap_laws.py, where each instance is alone on its host, and where two share one."""
    counts = forked_world(
        *(overlap_laws.run_all, False),
        num_instances=num_instances,
        num_replicas=num_replicas,
        num_hosts=num_hosts,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [len(laws_of(overlap_laws))] * num_instances


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_laws_on_gpus() -> None:
    """The same laws over NCCL, with a GPU for each instance."""
    counts = popdist.launch(overlap_laws.run_all, (True,), num_instances=2, timeout=DEADLINE_SECONDS)
    assert counts == [len(laws_of(overlap_laws))] * 2


def test_recipes_have_the_same_bits(forked_world: ForkedWorlds) -> None:
    """What training_recipes.py trains on three replicas is the same on one host and on three."""
    ((alone, none), *shared) = (
        end
        for number in (1, 3)
        for end in forked_world(
            overlap_laws.run_recipes,
            num_instances=number,
            num_replicas=3,
            num_hosts=number,
            timeout_seconds=DEADLINE_SECONDS,
        )
    )
    ((_, num_early), *_) = shared

    assert none == 0
    assert num_early > NUM_RECIPES
    assert shared == [(alone, num_early)] * 3


def test_training_laws(forked_world: ForkedWorlds) -> None:
    """Every law of training_laws.py, check_laws.py and loop_laws.py, where each instance is alone on its host."""
    counts = forked_world(
        loop_laws.run_all, num_instances=2, num_replicas=6, num_hosts=2, timeout_seconds=DEADLINE_SECONDS
    )
    assert counts == [len(loop_laws.all_laws())] * 2


@pytest.mark.parametrize(
    ("way", "num_instances", "num_hosts"),
    [*((way, 3, 3) for way in overlap_losses.WAYS), *((way, 4, 2) for way in overlap_losses.WAYS)],
)
def test_an_instance_is_killed(forked_world: ForkedWorlds, way: str, num_instances: int, num_hosts: int) -> None:
    """In the middle of its step: all others raise, and leave in order; neighbours in memory, too."""
    told = forked_world(
        *(overlap_losses.lose, way),
        num_instances=num_instances,
        num_hosts=num_hosts,
        victim=overlap_losses.VICTIM,
        timeout_seconds=DEADLINE_SECONDS,
    )
    heard = overlap_losses.WAYS[way]
    assert told == [None if it == overlap_losses.VICTIM else heard for it in range(num_instances)]


@pytest.mark.parametrize("method", ["issue", "receive"])
def test_an_instance_is_interrupted(forked_world: ForkedWorlds, method: str) -> None:
    """While it sends, or says where to put what comes: nobody waits for what may have gone or not."""
    forked_world(overlap_losses.interrupt, method, num_instances=3, num_hosts=3, timeout_seconds=DEADLINE_SECONDS)


def test_programs_end(tmp_path: Path) -> None:
    """Without finalize(), with a loop that only the interpreter's end closes, or with an exception in one."""
    finished = run(
        [sys.executable, "-m", overlap_losses.__name__, str(tmp_path)],
        env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    ).succeeded()
    told = {path.name: path.read_text(encoding="utf-8") for path in sorted(tmp_path.iterdir())}

    assert json.loads(finished.out) == [[int(end == "raise")] * 2 for end in overlap_losses.ENDS], told
    # in a fork, extensions may have their own last words
    first, second = (
        re.findall(r"^[\w.]+Error: .*", told[f"raise-{index}"], re.MULTILINE)[-1] for index in range(2)
    )
    assert first.startswith("popdist.errors.MicroBatchError: instance 1 left the micro_batches loop")
    assert second == "ValueError: no more"
