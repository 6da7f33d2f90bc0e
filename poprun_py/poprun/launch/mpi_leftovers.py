"""The leftovers of killed MPI programs and launchers: shared memory, and session folders of Open MPI.

A killed program leaves files in /dev/shm. Such a file has a name of the MPI runtimes, belongs to this user, was
changed since the job began, and is open in no process. A killed PRRTE leaves the folder ``ompi.<process id>``, and
a later PRRTE with this id cannot start. Standard library only: the agents run this module.
"""

from __future__ import annotations

import os
import stat
import time

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FOLDER = "/dev/shm"
_PREFIXES = ("mpich_shm_", "mpich_vci_", "sm_segment.", "vader_segment.", "ucx_shm_posix_")

_FIRST_PROCESS_SPACE = "pid:[4026531836]"
_FIRST_MEMORY_SPACE = "ipc:[4026531839]"

_PREFIX = "ompi."
_PLACES = ("TMPDIR", "TEMP", "TMP")  # in PRRTE's order


def remove_abandoned(age_seconds: float, folder: str = _FOLDER) -> list[str]:
    """Remove shared memory files, at most ``age_seconds`` old, of ended MPI programs; return their paths."""
    # nothing is removed if invisible processes may use the folder, as in a container that shares it with its host
    files = set(_files(folder, time.time() - age_seconds)) if _sees_everybody() else set()
    if files:
        files -= _files_in_use(files)
    for file in files:
        try:
            os.unlink(file)
        except OSError:  # another process has removed the file
            continue
    return sorted(files)


def _files(folder: str, since_seconds: float) -> Iterator[str]:
    for entry in _entries(folder):
        if entry.name.startswith(_PREFIXES):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_ctime >= since_seconds:
                yield entry.path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of ``folder``; [] if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _files_in_use(files: set[str]) -> set[str]:
    """Return the paths in ``files`` that some process still has open or mapped into its memory."""
    # descriptors first: a program opens a file, maps it and closes it, so one of the two lists contains the file
    in_use: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                in_use |= files & set(_open_files(f"/proc/{name}/fd"))
                in_use |= files & set(_mapped_files(f"/proc/{name}/maps"))
            except OSError:  # the process has ended, or belongs to another user, who cannot open this user's files
                continue
    return in_use


def _open_files(folder: str) -> Iterator[str]:
    for descriptor in os.listdir(folder):
        try:
            yield os.readlink(f"{folder}/{descriptor}")
        except OSError:  # the file was closed
            continue


def _mapped_files(maps: str) -> Iterator[str]:
    with open(maps, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            place = line.find("/")
            if place > 0:
                yield line[place:].rstrip("\n")


def _sees_everybody() -> bool:
    """Whether this process's /proc shows all processes that may use files in the same /dev/shm (namespaces(7))."""
    try:
        is_inside = os.readlink("/proc/self/ns/pid") != _FIRST_PROCESS_SPACE
        return not (is_inside and os.readlink("/proc/self/ns/ipc") == _FIRST_MEMORY_SPACE)
    except OSError:
        return False


def session_parent(environ: Mapping[str, str]) -> str:
    """Return the folder in which Open MPI's launcher with the environment ``environ`` makes its session folder."""
    return next((environ[name] for name in _PLACES if environ.get(name)), "/tmp")


def remove_abandoned_sessions(parent: str) -> list[str]:
    """Remove this user's Open MPI session folders in ``parent`` whose launchers have ended; return the paths."""
    # containers may share ``parent`` but not process ids, so a folder without this machine's name stays
    removed = list(_abandoned(parent, os.uname().nodename))
    if removed:
        import shutil

        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _abandoned(parent: str, host: str) -> Iterator[str]:
    for entry in _entries(parent):
        owner = entry.name.removeprefix(_PREFIX)
        if owner != entry.name and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and os.path.exists(f"{entry.path}/pmix.{host}.tool"):
                yield entry.path
