"""The example of large models trains alike by every mapping."""

import sys

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT
from tests.running import Poprun

PROGRAM = ROOT / "examples" / "train_gpt.py"
NUM_STEPS = 4


WORDS = ("--steps", str(NUM_STEPS))


def losses(lines: list[str]) -> list[float]:
    """The loss of each step that a job has printed."""
    printed = " ".join(lines).split()
    assert printed[::2] == [str(step) for step in range(NUM_STEPS)]
    return [float(loss) for loss in printed[1::2]]


def test_losses_are_the_same_by_every_mapping(forked_world: ForkedWorlds) -> None:
    """Four instances share one replica, or hold four whole ones whose weights are sharded."""
    (alone,) = (losses(it) for it in forked_world.script(PROGRAM, *WORDS, num_instances=1))
    sharded, *_ = forked_world.script(PROGRAM, *WORDS, "--fully-sharded", num_instances=4)
    poprun = Poprun(options=("--launcher", "local", "--tag-output=no"))
    mapping = ("-n", "4", "--parallelism", "tensor=2,pipeline=2")
    shared = poprun(*mapping, sys.executable, str(PROGRAM), *WORDS).succeeded().lines

    assert alone[-1] < alone[0] - 0.3
    for found in (sharded, shared):
        assert losses(found) == pytest.approx(alone, abs=1e-5)
