"""Programs of JAX and TensorFlow, whose own way to read Slurm's variables would find another job.

Holds popdist.startup.jax_cluster.
"""

from pathlib import Path

from tests.running import Poprun, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_training.py"


def test_jax_trains_in_an_allocation(poprun: Poprun, slurm: dict[str, str], framework_python: str) -> None:
    """On two nodes: its coordinator is where poprun says, not at the port that JAX makes of Slurm's job."""
    words = ("--launcher=srun", "--num-replicas=4", "--tag-output=no", framework_python, str(EXAMPLE))
    finished = run(["salloc", "-Q", "-N2", "--ntasks-per-node=1", *poprun.command(*words)], env=slurm)

    assert "2 processes, 4 devices: [0. 1. 2. 3.]" in finished.succeeded().lines
