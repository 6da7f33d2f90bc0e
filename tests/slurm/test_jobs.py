"""poprun inside an allocation: on all of its nodes, through srun and through either MPI, without --host."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leftovers import TOKEN_VARIABLE
from tests.running import Finished, MpiEnvironment, Poprun, run

EXAMPLES = Path(__file__).parents[2] / "examples"

HELLO = """
import os
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "SLURMD_NODENAME")))
"""
FAIL = """
import os, time
if os.environ["RANK"] == "3":
    raise ValueError("bad batch")
time.sleep(100)
"""
TELL_PID = """
import os, sys
os.environ["PYTHON_POPRUN"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
KILL_POPRUN = """
import os, time
if os.environ["RANK"] == "3":
    os.kill(int(os.environ["PYTHON_POPRUN"]), 9)
time.sleep(100)
"""

Allocated = Callable[..., Finished]


@pytest.fixture
def allocated(slurm: dict[str, str]) -> Allocated:
    """Call poprun in the shell of salloc, with two nodes and two tasks on each."""

    def call(*words: str, python: Path | str = sys.executable, salloc: tuple[str, ...] = ()) -> Finished:
        nodes = salloc or ("-N2", "--ntasks-per-node=2")
        return run(
            ["salloc", "-Q", *nodes, *Poprun(python=Path(python)).command(*words)],
            env=slurm,
        )

    return call


def test_srun_starts_the_instances(allocated: Allocated) -> None:
    """As many as there are tasks, in blocks, on all nodes; Slurm's own launcher needs no MPI."""
    finished = allocated("--launcher=srun", "--tag-output=no", sys.executable, "-c", HELLO)

    assert finished.succeeded().lines == ["0 4 0 0 n1", "1 4 1 0 n1", "2 4 0 1 n2", "3 4 1 1 n2"]


def test_both_mpis_start_on_all_nodes(allocated: Allocated, mpi: MpiEnvironment) -> None:
    """Hydra and PRRTE reach the nodes through Slurm; the programs are full MPI processes."""
    program = (str(mpi.python), str(EXAMPLES / "mpi_sum.py"))
    finished = allocated("--launcher=mpi", "--tag-output=no", *program, python=mpi.python)

    assert finished.succeeded().lines == [f"rank {rank} of 4: the ranks add up to 6" for rank in range(4)]


def test_an_emitted_script_runs_the_job(slurm: dict[str, str], tmp_path: Path) -> None:
    """What --emit prints, sbatch takes; poprun finds in the allocation what it was asked for."""
    words = ("-H", "n[1-2]", "-n4", "--num-replicas=8", "--launcher=srun", "--tag-output=no", "--emit=sbatch")
    script = tmp_path / "job.sh"
    program = tmp_path / "hello.py"
    program.write_text(HELLO)
    script.write_text(Poprun()(*words, sys.executable, str(program), cwd=tmp_path).succeeded().out)

    run(["sbatch", "--wait", str(script)], env=slurm, cwd=tmp_path).succeeded()

    (output,) = tmp_path.glob("hello-*.out")
    lines = sorted(
        line for line in output.read_text().splitlines() if line[0].isdecimal() and "POPRUN" not in line
    )
    assert lines == ["0 4 0 0 n1", "1 4 1 0 n1", "2 4 0 1 n2", "3 4 1 1 n2"]


def test_the_first_failure_ends_the_job(allocated: Allocated) -> None:
    """With the user's own traceback, the name of the node, and the place in its replica: two nodes have two."""
    finished = allocated("--launcher=srun", "--parallelism=tensor=2", sys.executable, "-c", FAIL)

    assert finished.code == 1
    assert "instance 3 failed first: exit code 1 (host n2, replica 1, stage 0, shard 1)" in finished.err
    assert "ValueError: bad batch" in finished.err


def test_a_job_ends_with_poprun(slurm: dict[str, str]) -> None:
    """SIGKILL of poprun leaves nothing on any node: the fixture that looks for what is left finds no process."""
    seen = f"--mpi-global-args=-x {TOKEN_VARIABLE}"
    poprun = Poprun().command("--launcher=srun", seen, sys.executable, "-c", KILL_POPRUN)[1:]
    shell = ["sh", "-c", '"$@"; echo "code $?"', "sh", sys.executable, "-c", TELL_PID, *poprun]
    finished = run(["salloc", "-Q", "-N2", "--ntasks-per-node=2", *shell], env=slurm)

    assert f"code {128 + signal.SIGKILL}" in finished.out, finished.err


@pytest.mark.parametrize(
    ("salloc", "words", "message"),
    [
        (
            ("-N2", "--ntasks-per-node=2"),
            ("-n8", "true"),
            "which has 4 tasks on 2 nodes: ask for sbatch --nodes=2 --ntasks-per-node=4",
        ),
        (
            ("-N2", "-n2", "srun"),
            ("true",),
            "of 2 of a Slurm step, and would start the job 2 times: call it once",
        ),
        (("-N1", "-n1"), ("--host=n7", "true"), "--host n7 is not in Slurm's job"),
    ],
    ids=["tasks", "twice", "host"],
)
def test_what_does_not_fit_is_told_before_anything_starts(
    allocated: Allocated, salloc: tuple[str, ...], words: tuple[str, ...], message: str
) -> None:
    """With the words for Slurm."""
    finished = allocated(*words, salloc=salloc)

    assert finished.code == 2
    assert message in finished.err
