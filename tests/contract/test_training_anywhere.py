"""A popdist script trains the same weights whoever starts its two replicas."""

import sys
from pathlib import Path

from tests.docs.markdown import ROOT
from tests.running import MpiEnvironment, Poprun, run

SCRIPT = [str(ROOT / "examples" / "train_digits.py"), "--epochs", "1"]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def last_line(command: list[str], folder: Path) -> str:
    """What the job says at its end: the accuracy and the checksum of the weights."""
    ended = run(command, env=ENVIRONMENT, cwd=folder)
    return ended.succeeded().out.splitlines()[-1]


def test_two_replicas_train_the_same_under_every_launcher(
    mpi_environments: dict[str, MpiEnvironment], tmp_path: Path
) -> None:
    """Both in one instance of poprun; an instance each under torchrun and each mpiexec."""
    one_instance = Poprun().command("-n", "1", "--num-replicas", "2", sys.executable, *SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *SCRIPT]
    expected = last_line(one_instance, tmp_path)

    assert expected.startswith("test accuracy 9")
    assert last_line(torchrun, tmp_path) == expected
    for mpi in mpi_environments.values():
        options = ["--oversubscribe"] if mpi.name == "openmpi" else []
        mpiexec = [str(mpi.mpiexec), *options, "-n", "2", str(mpi.python), *SCRIPT]
        assert last_line(mpiexec, tmp_path) == expected
