"""Programs that do not know us, under both MPI runtimes."""

import os
from pathlib import Path

import pytest

from tests.running import MpiEnvironment, Poprun, run

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

LIBRARY = {"mpich": "MPICH", "openmpi": "Open MPI"}

WHICH_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


@pytest.fixture
def under_mpi(mpi: MpiEnvironment) -> Poprun:
    """The command with each MPI runtime in turn."""
    return Poprun(python=mpi.python, options=("--launcher", "mpi", "--tag-output=no"), name=mpi.name)


@pytest.mark.skipif(
    "CI" not in os.environ, reason="CI must not skip; elsewhere scripts/test makes both environments"
)
def test_ci_has_both_runtimes(mpi_environments: dict[str, MpiEnvironment]) -> None:
    """Where it counts, no test of MPI is skipped."""
    assert set(mpi_environments) == set(LIBRARY)


def test_an_environment_holds_the_runtime_of_its_name(mpi: MpiEnvironment) -> None:
    """What the environments are called is what mpi4py finds in them."""
    assert run([str(mpi.python), "-c", WHICH_LIBRARY]).succeeded().out.startswith(LIBRARY[mpi.name])


def test_poprun_takes_the_runtime_of_its_own_environment(mpi: MpiEnvironment) -> None:
    """In each environment poprun starts the programs with the launcher that belongs to their library."""
    finished = Poprun(python=mpi.python)("-n", "2", "--launcher", "mpi", "-v", "--dry-run", "true")

    assert str(mpi.mpiexec.parent) in finished.succeeded().out + finished.err


@pytest.mark.parametrize("num_instances", [1, 2, 3, 4])
def test_mpi_programs_see_the_whole_world(under_mpi: Poprun, num_instances: int) -> None:
    """``COMM_WORLD`` has one rank an instance, and its collectives work."""
    finished = under_mpi("-n", str(num_instances), str(under_mpi.python), str(EXAMPLES / "mpi_sum.py"))
    total = sum(range(num_instances))

    assert finished.succeeded().lines == [
        f"rank {rank} of {num_instances}: the ranks add up to {total}" for rank in range(num_instances)
    ]


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_any_executable_runs_under_mpi(under_mpi: Poprun, num_instances: int) -> None:
    """A program that never calls MPI ends the job as it ends itself."""
    assert under_mpi("-n", str(num_instances), "echo", "Hello").succeeded().lines == ["Hello"] * num_instances


def test_the_variables_of_open_mpi_are_there_whatever_mpi_is(under_mpi: Poprun) -> None:
    """A program that reads Open MPI's variables finds its place under MPICH too."""
    finished = under_mpi("-n", "3", str(under_mpi.python), str(EXAMPLES / "open_mpi_variables.py"))

    assert finished.succeeded().lines == [
        f"rank {rank} of 3, local rank {rank}: items {list(range(10))[rank::3]}" for rank in range(3)
    ]


def test_words_for_open_mpi_do_the_same_under_every_launcher(launcher: Poprun, tmp_path: Path) -> None:
    """Variables, of all and of one instance, tags and logs; what only Open MPI could be told is named."""
    words = (
        *("-n", "2", "--mpi-global-args", "--tag-output --allow-run-as-root -x A=1 --output-filename logs"),
        *("--mpi-global-args= --mca btl_tcp_if_include lo", "--mpi-local-args=-x 'B=b c' -x SHELL_OF_OURS"),
        *("--instance-mpi-local-args", '1:"-x A=3"'),
    )
    program = ("sh", "-c", "echo $A $B $SHELL_OF_OURS")
    finished = launcher(*words, *program, cwd=tmp_path, env={"SHELL_OF_OURS": "ours"}).succeeded()
    logs = {path.name: path.read_text() for path in tmp_path.glob("logs/*/0/*.out.log")}

    assert finished.lines == ["[1,0]<stdout>:1 b c ours", "[1,1]<stdout>:3 b c ours"]
    assert logs == {"instance-0.out.log": "1 b c ours\n", "instance-1.out.log": "3 b c ours\n"}
    assert ("--mca btl_tcp_if_include lo: left out" in finished.err) == (launcher.name != "openmpi")
