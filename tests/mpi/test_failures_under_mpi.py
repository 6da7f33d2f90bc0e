"""Ranks that fail after MPI has begun, whose MPI_Finalize would wait for the others for ever.

`tests/process/test_startup_hook.py` has all ways to end, without MPI.
"""

import signal
from collections.abc import Iterator

import pytest

from tests import leftovers
from tests.process.test_hangs import read_until
from tests.running import DEADLINE_SECONDS, MpiEnvironment, Poprun

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
@pytest.mark.parametrize(
    ("how", "code", "end", "said"),
    [
        ("sys.excepthook = None; 1 / 0", 1, "exit code 1", "ZeroDivisionError: "),
        ("sys.exit(7)", 7, "exit code 7", ""),
        ("raise KeyboardInterrupt", 130, "SIGINT, interrupt", "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_fails_ends_the_job(mpi: MpiEnvironment, how: str, code: int, end: str, said: str) -> None:
    """With its traceback, after what it does at exit."""
    finished = Poprun(python=mpi.python)("--launcher=mpi", "-n2", str(mpi.python), "-c", PROGRAM.format(how=how))

    assert finished.code == code
    assert f"instance 1 failed first: {end}" in finished.err
    assert said in finished.err
    assert "[1] saved" in finished.out


GOOD = """
import code, sys, time
from mpi4py import MPI
code.InteractiveInterpreter().runcode("1 / 0")
try:
    sys.exit(7)
except SystemExit:
    pass
if MPI.COMM_WORLD.rank == 0:
    time.sleep(0.5)
print("done", flush=True)
"""


def test_a_rank_that_ends_well_waits_for_the_others(mpi: MpiEnvironment) -> None:
    """Also when something has printed a traceback before, or was to exit, and the program went on."""
    finished = Poprun(python=mpi.python)("--launcher=mpi", "-n2", "--no-tag-output", str(mpi.python), "-c", GOOD)

    assert finished.succeeded().lines == ["done", "done"]
    assert finished.err.count("ZeroDivisionError") == 2


EARLY = """
import time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    time.sleep(600)
"""


@pytest.mark.usefixtures("_shared_memory_of_mpich")
def test_a_rank_that_ends_before_the_others_is_seen_to_wait(mpi: MpiEnvironment) -> None:
    """In MPI_Finalize, which the other one never comes to."""
    words = ("--launcher=mpi", "--hang-report=1", "-n2", str(mpi.python), "-c", EARLY)
    with Poprun(python=mpi.python).started(*words) as process:
        said = read_until(process, "the job goes on")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert "instance 1 waits in MPI_Finalize" in said
    assert "instance 0 did not arrive: MPI_Finalize not called yet" in said
    where = 'File "<string>", line 5, in <module>'
    assert where in said.partition("instance 0:\n")[2].partition("instance 1:\n")[0]
