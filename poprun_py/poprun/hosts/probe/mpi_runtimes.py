"""The MPI runtimes of this machine, recognized by what their launchers print about their version."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from poprun.launch.process.spawn import answer_of
from poprun.plan.topology import MpiKind, MpiRuntime

_VERSION_SECONDS: Final = 10.0
_LAUNCHERS: Final = ("mpiexec", "mpirun")
_FORKER: Final = "mpiexec.gforker"
_VERSIONS: Final = (
    (MpiKind.MPICH, r"HYDRA build details:\s+Version:\s*(\S+)"),
    (MpiKind.OPEN_MPI, r"\((?:Open MPI|OpenRTE)\)\s+(\S+)"),
)


def find_mpi(path: str, own_folder: str) -> tuple[MpiRuntime | None, tuple[str, ...]]:
    """Return the first MPICH or Open MPI in ``path``, then ``own_folder``; also the other MPIs found before it."""
    unknown: list[str] = []
    for launcher in _candidates([*path.split(os.pathsep), own_folder]):
        runtime = read_version(launcher, answer_of((launcher, "--version"), _VERSION_SECONDS) or "")
        if runtime is not None:
            return replace(runtime, forker=_forker_beside(runtime)), tuple(unknown)
        unknown.append(launcher)
    return None, tuple(unknown)


def read_version(launcher: str, output: str) -> MpiRuntime | None:
    """Return the MPI runtime whose launcher prints ``output`` as its version; None for an unknown MPI."""
    for kind, pattern in _VERSIONS:
        match = re.search(pattern, output)
        if match:
            return MpiRuntime(kind=kind, path=launcher, version=match[1])
    return None


def _candidates(folders: Sequence[str]) -> Iterator[str]:
    """Yield every mpiexec and mpirun in ``folders``; a file with several names comes once, with its first name."""
    seen = set()
    for folder in filter(None, folders):
        for name in _LAUNCHERS:
            launcher = os.path.abspath(os.path.join(folder, name))
            file = os.path.realpath(launcher)
            if _is_program(file) and file not in seen:
                seen.add(file)
                yield launcher


def _forker_beside(runtime: MpiRuntime) -> str | None:
    """Return mpiexec.gforker, MPICH's launcher for one machine, in the folder of ``runtime``; None if missing."""
    forker = os.path.join(os.path.dirname(os.path.realpath(runtime.path)), _FORKER)
    return forker if runtime.kind is MpiKind.MPICH and _is_program(forker) else None


def _is_program(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.X_OK)
