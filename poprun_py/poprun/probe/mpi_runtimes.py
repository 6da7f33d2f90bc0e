"""The MPI runtimes of this machine, told apart by what their launchers print about their version.

What a launcher has said is kept in the user's folder of caches, under the identity of its file, so that each is
asked once. A script is asked each time: what it says may depend on more than its file. Where the cache cannot be
read or written, or holds something else, launchers are asked as if there were none.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from poprun.plan.topology import MpiKind, MpiRuntime
from poprun.process.spawn import answer_of

_VERSION_SECONDS: Final = 10.0
_LAUNCHERS: Final = ("mpiexec", "mpirun")
_FORKER: Final = "mpiexec.gforker"
_VERSIONS: Final = (
    (MpiKind.MPICH, re.compile(r"HYDRA build details:\s+Version:\s*(\S+)")),
    (MpiKind.OPEN_MPI, re.compile(r"\((?:Open MPI|OpenRTE)\)\s+(\S+)")),
)
_CACHE_FILE: Final = os.path.join("poprun", "mpi-launchers.json")
_MOST_BYTES: Final = 64 * 1024
_MOST_KEPT: Final = 32


def find_mpi(
    path: str, own_folder: str, cache_file: str | None = None
) -> tuple[MpiRuntime | None, tuple[str, ...]]:
    """The first MPI runtime in the folders of ``path``, then ``own_folder``, and unknown launchers before it."""
    kept = {} if cache_file is None else _read(cache_file)
    unknown: list[str] = []
    for launcher in _candidates([*path.split(os.pathsep), own_folder]):
        runtime = _runtime_of(launcher, kept, cache_file)
        if runtime is not None:
            return replace(runtime, forker=_forker_beside(runtime)), tuple(unknown)
        unknown.append(launcher)
    return None, tuple(unknown)


def cache_file_of(environment: Mapping[str, str]) -> str | None:
    """Where answers are kept (XDG Base Directory Specification); None where the user has no folder of his own."""
    home = environment.get("XDG_CACHE_HOME") or environment.get("HOME", "")
    folder = home if environment.get("XDG_CACHE_HOME") else os.path.join(home, ".cache")
    try:
        is_own = os.path.isabs(home) and os.stat(home).st_uid == os.geteuid()
    except OSError:
        return None
    return os.path.join(folder, _CACHE_FILE) if is_own else None


def read_version(launcher: str, output: str) -> MpiRuntime | None:
    """The runtime that prints ``output`` about itself, or None when it is of no known family."""
    for kind, pattern in _VERSIONS:
        match = pattern.search(output)
        if match:
            return MpiRuntime(kind=kind, path=launcher, version=match[1])
    return None


class _Answer(NamedTuple):
    """What a launcher has said."""

    identity: list[int]  # that of its file
    kind: MpiKind | None  # its family; None of one that is of no known family
    version: str  # its version; empty without a family


def _runtime_of(launcher: str, kept: Mapping[str, _Answer], cache_file: str | None) -> MpiRuntime | None:
    """The runtime of a launcher, as ``kept`` or asked; None when it did not answer, or is of no known family."""
    file = os.path.realpath(launcher)
    identity, said = _identity(file), kept.get(file)
    if said is not None and said.identity == identity:
        return MpiRuntime(kind=said.kind, path=launcher, version=said.version) if said.kind else None
    output = answer_of((launcher, "--version"), _VERSION_SECONDS)
    runtime = read_version(launcher, output or "")
    if cache_file is not None and identity is not None and output is not None:
        answer = _Answer(identity, runtime.kind, runtime.version) if runtime else _Answer(identity, None, "")
        _keep(cache_file, file, answer)
    return runtime


def _identity(file: str) -> list[int] | None:
    """Numbers that change when a file is replaced or written; None for a script, or an unreadable file."""
    try:
        with open(file, "rb") as program:
            found = os.fstat(program.fileno())
            is_script = program.read(2) == b"#!"
    except OSError:
        return None
    return None if is_script else [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _read(cache_file: str) -> dict[str, _Answer]:
    """The answers in the cache, which must be this user's own file; none where it holds anything else."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        descriptor = os.open(cache_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH:
                return {path: _checked(*row) for path, row in json.loads(file.read(_MOST_BYTES)).items()}
    return {}


def _checked(identity: list[int], kind: str | None, version: str) -> _Answer:
    """A row of the cache; a ValueError where poprun did not write it."""
    if not version.isprintable():
        raise ValueError(version)
    return _Answer(identity, None if kind is None else MpiKind(kind), version)


def _keep(cache_file: str, file: str, answer: _Answer) -> None:
    """Write an answer beside those that others have kept; of too many the oldest go."""
    from poprun.text.atomic_file import opened_parent, write_whole  # noqa: PLC0415 - each launcher is asked once

    kept = {path: row for path, row in _read(cache_file).items() if path != file}
    rows = [*kept.items(), (file, answer)][-_MOST_KEPT:]
    with suppress(OSError), opened_parent(cache_file, makes=True):
        write_whole(cache_file, json.dumps(dict(rows)))


def _candidates(folders: Sequence[str]) -> Iterator[str]:
    """Every launcher in ``folders``, each file once under whichever of its names comes first."""
    seen = set()
    for folder in filter(None, folders):
        for name in _LAUNCHERS:
            launcher = os.path.abspath(os.path.join(folder, name))
            file = os.path.realpath(launcher)
            if _is_program(file) and file not in seen:
                seen.add(file)
                yield launcher


def _forker_beside(runtime: MpiRuntime) -> str | None:
    """MPICH's launcher for one machine, which lies beside the one for many, or None."""
    forker = os.path.join(os.path.dirname(os.path.realpath(runtime.path)), _FORKER)
    return forker if runtime.kind is MpiKind.MPICH and _is_program(forker) else None


def _is_program(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.X_OK)
