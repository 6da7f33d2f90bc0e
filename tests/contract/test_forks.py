"""A program that forks in the middle of a job: the child leaves by `sys.exit`, and its parent goes on.

Holds popdist.exchange.host_memory.forks.
"""

import sys
from pathlib import Path

import pytest

from tests.running import Poprun

PROGRAM = Path(__file__).parent / "forking_program.py"

KINDS = ("plain", "sharded optimizer", "default group")
"""What is alive when the program forks: the plain one comes first, when nothing else was."""


@pytest.mark.parametrize("num_instances", [1, 3])
def test_exit_of_a_child(poprun: Poprun, num_instances: int) -> None:
    """Nothing of popdist's keeps a forked child from its exit, or aborts it, or is lost to the parent."""
    counts = ("-n", str(num_instances), "--num-replicas", "3", "--tag-output", "no")
    finished = poprun("--launcher", "local", *counts, sys.executable, str(PROGRAM), *KINDS)

    assert finished.succeeded().lines == sorted([f"{kind}: 7 {num_instances}" for kind in KINDS] * num_instances)
