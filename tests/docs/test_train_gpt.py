"""The example of large models trains alike by every mapping."""

import pytest

from popdist.ground.layout import Parallelism
from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT

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
    mapping = Parallelism(instances_per_replica=4, tensor=2, pipeline=2)
    ends = forked_world.script(PROGRAM, *WORDS, num_instances=4, parallelism=mapping)
    shared = [line for lines in ends for line in lines]

    assert alone[-1] < alone[0] - 0.3
    for found in (sharded, shared):
        assert losses(found) == pytest.approx(alone, abs=1e-5)
