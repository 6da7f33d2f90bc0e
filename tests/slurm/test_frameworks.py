"""Programs of JAX and TensorFlow, whose own way to read Slurm's variables would find another job.

Holds popdist.startup.jax_cluster.
"""

from tests import jax_programs
from tests.running import Poprun, run


def test_jax_trains_in_an_allocation(poprun: Poprun, slurm: dict[str, str], framework_python: str) -> None:
    """On two nodes: its coordinator is where poprun says, not at the port that JAX makes of Slurm's job."""
    words = ("--launcher=srun", "--num-replicas=4", "--tag-output=no", framework_python, jax_programs.PROGRAM)
    finished = run(["salloc", "-Q", "-N2", "--ntasks-per-node=1", *poprun.command(*words)], env=slurm)

    assert set(jax_programs.expected(2)) <= set(finished.succeeded().lines)
