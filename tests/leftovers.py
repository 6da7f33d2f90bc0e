"""Find what a test left behind: processes, threads, files in shared memory.

Other runs on the same machine leave and use things of their own at the same time. A process of a test is known by
a variable in its environment, which descendants inherit whatever session they move to and whoever adopts them; the
children of the test process itself are counted too. Files in shared memory do not tell who made them: as root, a
run has a ``/dev/shm`` of its own. What has just ended may still be in the tables, so each question is asked again
until its deadline.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

TOKEN_VARIABLE = "POPRUN_TEST_TOKEN"  # noqa: S105 - it marks processes, it opens nothing

_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_SECONDS = 60.0
_ASK_AGAIN_SECONDS = 0.02

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000


def processes_of(token: str) -> list[psutil.Process]:
    """Every living process that was started with ``token`` in its environment, but for this one."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    others = (pid for pid in psutil.pids() if pid != os.getpid())
    return _existing(pid for pid in others if mark in _read(f"/proc/{pid}/environ"))


def living_children() -> set[psutil.Process]:
    """The children of this process that are no zombies; their own children are known by the token."""
    pids = b" ".join(_read(f"{thread}/children") for thread in Path("/proc/self/task").iterdir())
    return {child for child in _existing(map(int, pids.split())) if _is_alive(child)}


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _existing(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_processes_of(token: str) -> None:
    """Kill a test's processes."""
    kill(processes_of(token))


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill what a test left, so that it does not disturb the next one."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def shared_memory_files() -> set[Path]:
    """The files in shared memory now."""
    return set(_SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else set()


def make_shared_memory_private() -> bool:
    """Mount a ``/dev/shm`` that only this process and its descendants see; False where that is not allowed (root).

    Called while the process has one thread: the others would keep the old one.
    """
    libc = ctypes.CDLL(None)
    if not _SHARED_MEMORY.is_dir() or libc.unshare(_CLONE_NEWNS):
        return False
    libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    return not libc.mount(b"tmpfs", os.fsencode(_SHARED_MEMORY), b"tmpfs", _MS_NOSUID | _MS_NODEV, None)


def abandoned_files(before: set[Path]) -> list[Path]:
    """The files that are in shared memory since ``before``, when the test's own processes have all ended.

    A file that a process uses, or removes in the end, belongs to another run.
    """
    candidates = shared_memory_files() - before
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while candidates := {file for file in candidates if file.exists() and not is_held_by_others(file)}:
        if time.monotonic() >= deadline:
            break
        time.sleep(_ASK_AGAIN_SECONDS)
    return sorted(candidates)


def is_held_by_others(file: Path) -> bool:
    """Whether another process has ``file`` mapped: then it belongs to another run on this machine."""
    others = (pid for pid in psutil.pids() if pid != os.getpid())
    return any(os.fsencode(file) in _read(f"/proc/{pid}/maps") for pid in others)


def wait_until_none(find: Callable[[], Iterable[T]]) -> list[T]:
    """What ``find`` still finds when its patience ends; an empty list as soon as it finds nothing."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while found := list(find()):
        if time.monotonic() >= deadline:
            return found
        time.sleep(_ASK_AGAIN_SECONDS)
    return []


def describe(process: psutil.Process) -> str:
    """A process in words, for the message of a failed test."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}: gone by now"


def threads() -> set[threading.Thread]:
    """The Python threads that run now."""
    return set(threading.enumerate())
