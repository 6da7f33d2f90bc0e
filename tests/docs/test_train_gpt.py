"""The example of large models trains alike by every mapping: real jobs."""

import sys

import pytest

from tests.docs.markdown import ROOT
from tests.running import Poprun

PROGRAM = ROOT / "examples" / "train_gpt.py"
NUM_STEPS = 4


def losses(*words: str, program: tuple[str, ...] = ()) -> list[float]:
    """The loss of each step of a job of ``words``."""
    poprun = Poprun(options=("--launcher", "local", "--tag-output=no"))
    command = (sys.executable, str(PROGRAM), "--steps", str(NUM_STEPS), *program)
    printed = poprun(*words, *command).succeeded().out.split()
    assert printed[::2] == [str(step) for step in range(NUM_STEPS)]
    return [float(loss) for loss in printed[1::2]]


def test_losses_are_the_same_by_every_mapping() -> None:
    """Four instances share one replica, or hold four whole ones whose weights are sharded."""
    alone = losses("-n", "1")

    assert alone[-1] < alone[0] - 0.3
    assert losses("-n", "4", "--parallelism", "tensor=2,pipeline=2") == pytest.approx(alone, abs=1e-5)
    assert losses("-n", "4", program=("--fully-sharded",)) == pytest.approx(alone, abs=1e-5)
