"""Ranks that end by an exception after MPI has begun, whose MPI_Finalize would wait for the others for ever."""

from collections.abc import Iterator

import pytest

from tests import leftovers
from tests.running import MpiEnvironment, Poprun

PROGRAM = """
import atexit, sys
atexit.register(lambda: print("saved", flush=True))
from mpi4py import MPI
def fail():
    {how}
if MPI.COMM_WORLD.rank == 1:
    fail()
MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture
def _shared_memory_of_mpich() -> Iterator[None]:
    """A rank of MPICH that is stopped leaves a file: its shared memory has a name until MPI_Finalize."""
    before = leftovers.shared_memory_files()
    yield
    for file in leftovers.shared_memory_files() - before:
        if file.name.startswith("mpich_shm_") and not leftovers.is_held_by_others(file):
            file.unlink()


@pytest.mark.usefixtures("_shared_memory_of_mpich")
@pytest.mark.parametrize("how", ["raise ValueError('bad batch')", "sys.excepthook = None; 1 / 0"])
def test_a_rank_that_raises_ends_the_job(mpi: MpiEnvironment, how: str) -> None:
    """With its traceback, after what it does at exit."""
    finished = Poprun(python=mpi.python)("--launcher=mpi", "-n2", str(mpi.python), "-c", PROGRAM.format(how=how))

    assert finished.code == 1
    assert "instance 1 failed first: exit code 1" in finished.err
    assert "Error: " in finished.err
    assert "[1,1]<stdout>:saved" in finished.out


GOOD = """
import code, time
from mpi4py import MPI
code.InteractiveInterpreter().runcode("1 / 0")
if MPI.COMM_WORLD.rank == 0:
    time.sleep(0.5)
print("done", flush=True)
"""


def test_a_rank_that_ends_well_waits_for_the_others(mpi: MpiEnvironment) -> None:
    """Also when something has printed a traceback before and the program went on."""
    finished = Poprun(python=mpi.python)("--launcher=mpi", "-n2", "--no-tag-output", str(mpi.python), "-c", GOOD)

    assert finished.succeeded().lines == ["done", "done"]
    assert finished.err.count("ZeroDivisionError") == 2
