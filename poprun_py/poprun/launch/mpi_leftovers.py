"""The leftovers of killed MPI programs and launchers: shared memory, and session folders of Open MPI.

A killed program leaves its files in /dev/shm: those with a name of the MPI runtimes, of this user, changed since
the job began, which no process has open. A killed PRRTE leaves ``ompi.<process id>``, and the next one with this
id cannot start. Standard library only: the agents run this.
"""

from __future__ import annotations

import os
import stat
import time

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FOLDER = "/dev/shm"
_PREFIXES = ("mpich_shm_", "mpich_vci_", "sm_segment.", "vader_segment.", "ucx_shm_posix_")

_FIRST_PROCESS_SPACE = "pid:[4026531836]"
_FIRST_MEMORY_SPACE = "ipc:[4026531839]"

_PREFIX = "ompi."
_PLACES = ("TMPDIR", "TEMP", "TMP")  # in PRRTE's order


def remove_abandoned(age_seconds: float, folder: str = _FOLDER) -> list[str]:
    """Remove every leftover in ``folder`` that is not older than ``age_seconds``; their paths."""
    # not where processes that cannot be seen may use the folder, as in a container that shares it with its host
    files = set(_files(folder, time.time() - age_seconds)) if _sees_everybody() else set()
    if files:
        files -= _held(files)
    for file in files:
        try:
            os.unlink(file)
        except OSError:  # somebody else was faster
            continue
    return sorted(files)


def _files(folder: str, since_seconds: float) -> Iterator[str]:
    for entry in _entries(folder):
        if entry.name.startswith(_PREFIXES):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_ctime >= since_seconds:
                yield entry.path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder; none of one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _held(files: set[str]) -> set[str]:
    """Those of ``files`` that a process has open or mapped."""
    # descriptors first: a program opens a file, maps it, and closes it, so one of the two shows it
    held: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                held |= files & set(_open_files(f"/proc/{name}/fd"))
                held |= files & set(_mapped_files(f"/proc/{name}/maps"))
            except OSError:  # it has ended, or is another user's, who cannot hold files of this one
                continue
    return held


def _open_files(folder: str) -> Iterator[str]:
    for descriptor in os.listdir(folder):
        try:
            yield os.readlink(f"{folder}/{descriptor}")
        except OSError:  # it was closed
            continue


def _mapped_files(maps: str) -> Iterator[str]:
    with open(maps, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            place = line.find("/")
            if place > 0:
                yield line[place:].rstrip("\n")


def _sees_everybody() -> bool:
    """Whether shared memory is no further shared than the list of processes (see namespaces(7))."""
    try:
        is_inside = os.readlink("/proc/self/ns/pid") != _FIRST_PROCESS_SPACE
        return not (is_inside and os.readlink("/proc/self/ns/ipc") == _FIRST_MEMORY_SPACE)
    except OSError:
        return False


def session_parent(environ: Mapping[str, str]) -> str:
    """The folder in which a launcher that is started with ``environ`` keeps its own."""
    return next((environ[name] for name in _PLACES if environ.get(name)), "/tmp")


def remove_abandoned_sessions(parent: str) -> list[str]:
    """Remove every session folder in ``parent`` that is this user's and whose launcher has ended; their paths."""
    # containers may share ``parent`` and not their process ids: a folder without this machine's name stays
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
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and os.path.exists(f"{entry.path}/pmix.{host}.tool"):
                yield entry.path
