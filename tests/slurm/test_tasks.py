"""popdist joins the tasks of ``srun`` without poprun: one task, one replica.

Holds popdist.job.context.
"""

import sys
from pathlib import Path

import pytest

from tests.running import run

PROGRAM = Path(__file__).parent.parent / "contract" / "joining_program.py"


@pytest.mark.parametrize(
    ("places", "local"), [(("-N1", "-n2"), "[0, 1]"), (("-N2", "-n3"), "[0, 0, 1]")], ids=["one node", "two nodes"]
)
def test_tasks_of_srun_are_instances(slurm: dict[str, str], places: tuple[str, ...], local: str) -> None:
    """`srun -n 3 python train.py` is one job with one replica for each task, also over uneven nodes."""
    finished = run(
        ["srun", *places, sys.executable, str(PROGRAM), "join"],
        env=slurm | {"OMP_NUM_THREADS": "1"},
    )

    num_instances = int(places[1].removeprefix("-n"))
    ranks = list(range(num_instances))
    joined = f"{num_instances} {ranks} {local} False {{'127.0.0.1'}}"
    lines = [line.rpartition(" ") for line in finished.succeeded().lines]
    assert [told for told, _, _ in lines] == [joined] * num_instances
    assert len({weights for _, _, weights in lines}) == 1


def test_a_shell_of_salloc_is_no_task(slurm: dict[str, str]) -> None:
    """A program that it starts itself is a job of one, and does not wait for tasks that nobody starts."""
    program = "import popdist; print(popdist.num_replicas())"
    finished = run(["salloc", "-N2", "-n4", "-Q", sys.executable, "-c", program], env=slurm)

    assert finished.succeeded().lines == ["1"]
