"""Who runs the programs: poprun with each of its launchers, and the launchers that it is compared with."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.catalogue import GRACE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One launcher.

    Attributes:
        name: As the tables call it.
        words: Its command as far as the number of processes.
        python: The interpreter of the programs.
        has_mpi: Whether its processes are those of an MPI job.
        is_poprun: Whether the laws hold for it; others are only looked at.
    """

    name: str
    words: tuple[str, ...]
    python: Path
    has_mpi: bool
    is_poprun: bool

    def command(self, size: int, program: list[str], options: tuple[str, ...] = ()) -> list[str]:
        """The argv that starts ``size`` processes of a Python program; ``options`` stand before Python."""
        return [*self.words, str(size), *options, str(self.python), *program]

    @property
    def environment(self) -> Mapping[str, str]:
        """What it needs beside the caller's environment: the commands of its own come first."""
        return {"PATH": os.pathsep.join((str(self.python.parent), os.environ.get("PATH", os.defpath)))}


def popruns(openmpi: Path) -> tuple[Contestant, ...]:
    """Those of poprun's launchers; ``openmpi`` is the interpreter of an environment with Open MPI."""
    mpich = Path(sys.executable)
    return (
        _poprun("local", mpich),
        _poprun("mpich", mpich),
        _poprun("hydra", mpich, "--mpi-global-args", "-genv POPRUN_HYDRA 1"),
        _poprun("openmpi", openmpi),
    )


def others(openmpi: Path) -> tuple[Contestant, ...]:
    """torchrun, Open MPI's launcher and MPICH's, as their manuals have them called on one machine."""
    mpich = Path(sys.executable)
    torchrun = (str(mpich.parent / "torchrun"), "--standalone", "--no-python", "--nproc-per-node")
    mpirun = (str(openmpi.parent / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np")
    return (
        Contestant(name="torchrun", words=torchrun, python=mpich, has_mpi=False, is_poprun=False),
        Contestant(name="mpirun", words=mpirun, python=openmpi, has_mpi=True, is_poprun=False),
        Contestant(
            name="mpiexec",
            words=(str(mpich.parent / "mpiexec"), "-n"),
            python=mpich,
            has_mpi=True,
            is_poprun=False,
        ),
    )


def _poprun(name: str, python: Path, *options: str) -> Contestant:
    launcher = "local" if name == "local" else "mpi"
    stop_timeout = ("--stop-timeout", f"{GRACE_SECONDS:g}")
    words = (str(python), "-m", "poprun", "--launcher", launcher, *stop_timeout, *options, "-n")
    return Contestant(name=name, words=words, python=python, has_mpi=launcher == "mpi", is_poprun=True)
