"""The MPI runtimes of this machine, told apart by what they print about their version."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from poprun.plan.topology import MpiKind, MpiRuntime
from poprun.process.start import answer_of

TIMEOUT_SECONDS: Final = 10.0

LAUNCHERS: Final = ("mpiexec", "mpirun")

_FORKER: Final = "mpiexec.gforker"

_VERSIONS: Final = (
    (MpiKind.MPICH, re.compile(r"HYDRA build details:\s+Version:\s*(\S+)")),
    (MpiKind.OPEN_MPI, re.compile(r"\((?:Open MPI|OpenRTE)\)\s+(\S+)")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiSearch:
    """What a search found: the first runtime of a known family, and the launchers before it that are of none."""

    runtime: MpiRuntime | None = None
    unknown: tuple[str, ...] = ()


def find_mpi(path: str, own_folder: str) -> MpiSearch:
    """Look for an MPI runtime on ``path``, then in ``own_folder``, where Python packages install theirs.

    Args:
        path: Folders with colons between them, as in ``PATH``.
        own_folder: The folder of the interpreter's own commands.
    """
    unknown: list[str] = []
    for launcher in _candidates([*path.split(os.pathsep), own_folder]):
        runtime = _identify(launcher)
        if runtime is not None:
            return MpiSearch(runtime=replace(runtime, forker=find_forker(runtime)), unknown=tuple(unknown))
        unknown.append(launcher)
    return MpiSearch(unknown=tuple(unknown))


def read_version(launcher: str, output: str) -> MpiRuntime | None:
    """The runtime that prints ``output`` about itself, or None when it is of no known family."""
    for kind, pattern in _VERSIONS:
        match = pattern.search(output)
        if match:
            return MpiRuntime(kind=kind, path=launcher, version=match[1])
    return None


def find_forker(runtime: MpiRuntime) -> str | None:
    """MPICH's launcher for one machine beside ``runtime``, or None."""
    forker = os.path.join(os.path.dirname(os.path.realpath(runtime.path)), _FORKER)
    is_there = runtime.kind is MpiKind.MPICH and os.path.isfile(forker) and os.access(forker, os.X_OK)
    return forker if is_there else None


def _candidates(folders: list[str]) -> Iterator[str]:
    """Every launcher in ``folders``, each file once under whichever of its names comes first."""
    seen = set()
    for folder in filter(None, folders):
        for name in LAUNCHERS:
            launcher = os.path.abspath(os.path.join(folder, name))
            file = os.path.realpath(launcher)
            if os.path.isfile(file) and os.access(file, os.X_OK) and file not in seen:
                seen.add(file)
                yield launcher


def _identify(launcher: str) -> MpiRuntime | None:
    output = answer_of((launcher, "--version"), TIMEOUT_SECONDS)
    return None if output is None else read_version(launcher, output)
