"""A program that forks in the middle of a job: the child leaves by `sys.exit`, and its parent goes on.

Holds popdist.host_memory.forks.
"""

import sys
from pathlib import Path

import pytest

from tests.running import Poprun

PROGRAM = Path(__file__).parent / "forking_program.py"


@pytest.mark.parametrize("num_instances", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "sharded optimizer", "default group"])
def test_exit_of_a_child(poprun: Poprun, num_instances: int, kind: str) -> None:
    """Nothing of popdist's keeps a forked child from its exit, or aborts it, or is lost to the parent."""
    program = (sys.executable, str(PROGRAM), kind)
    finished = poprun(
        "--launcher", "local", "-n", str(num_instances), "--num-replicas", "4", "--tag-output", "no", *program
    )

    assert finished.succeeded().lines == [f"7 {num_instances}"] * num_instances
