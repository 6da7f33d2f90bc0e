"""The tree of processes below a process, and signals to the tree, whatever session or group a process moved to.

A process group does not contain the whole tree, because a DataLoader worker may call setsid. So the tree is read
from /proc (see proc_pid_stat(5)). A process is identified by its id *and* its start time, because ids are reused.
Each shim of an MPI job loads this module in a bare interpreter, so it imports little of the standard library.
"""

from __future__ import annotations

import os
import resource
import time

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import NamedTuple
else:
    import _signal as signal  # the module signal would load enum and more

    from poprun.launch.process import NamedTuple

STOPPED_SECONDS = 1.0  # time between two searches for stopped children
_LEFTOVER_SECONDS = 1.0  # time in which leftover processes can end after SIGTERM
_KILL_SECONDS = 5.0  # time in which the kernel removes killed processes
_POLL_SECONDS = 0.02
_KIBIBYTE = 1024
_STATE_FIELD, _PARENT_FIELD, _CHILD_FAULTS_FIELD, _START_FIELD = 0, 1, 8, 19


class ProcessKey(NamedTuple):
    """The unique key of a process: its id, and its start time in clock ticks since boot."""

    pid: int
    start_ticks: int


class Ended(NamedTuple):
    """A reaped child process: its id, exit code (negative for a signal) and peak memory; 0 bytes if unknown."""

    pid: int
    code: int
    peak_bytes: int


class _Stat(NamedTuple):
    key: ProcessKey
    parent: int
    state: str
    has_reaped: bool


def _read_stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may contain any text, so the fields are counted from the last parenthesis.
    fields = text[text.rindex(b")") + 2 :].split()
    key = ProcessKey(pid, int(fields[_START_FIELD]))
    has_reaped = fields[_CHILD_FAULTS_FIELD] != b"0"  # no child runs without a page fault
    return _Stat(key, int(fields[_PARENT_FIELD]), fields[_STATE_FIELD].decode(), has_reaped)


def _all_stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _read_stat(int(name))) is not None:
            yield stat


def key_of(pid: int) -> ProcessKey | None:
    """Return the key (id and start time) of the process ``pid``, which is unique; None if there is no process."""
    stat = _read_stat(pid)
    return None if stat is None else stat.key


def has_ended(pid: int) -> bool:
    """Whether there is no process ``pid``, or only a process that has ended and was not reaped."""
    stat = _read_stat(pid)
    return stat is None or stat.state == "Z"


def has_reaped(pid: int) -> bool:
    """Whether the process ``pid`` exists and has ever reaped a child, which shows that a child has ended."""
    stat = _read_stat(pid)
    return stat is not None and stat.has_reaped


def descendants(root: int, apart_from: Collection[int] = ()) -> list[ProcessKey]:
    """Return the living descendants of the process ``root``, parents before children, without the processes
    ``apart_from`` and the descendants of these processes.
    """
    children: dict[int, list[_Stat]] = {}
    for stat in _all_stats():
        children.setdefault(stat.parent, []).append(stat)
    return _descend(root, apart_from, lambda pid: children.get(pid, ()))


def _descend(
    root: int, apart_from: Collection[int], children_of: Callable[[int], Iterable[_Stat]]
) -> list[ProcessKey]:
    living: list[ProcessKey] = []
    parents = [root]
    for parent in parents:
        for stat in children_of(parent):
            if stat.key.pid in apart_from:
                continue
            parents.append(stat.key.pid)
            if stat.state != "Z":
                living.append(stat.key)
    return living


def unreaped_children(parents: Collection[int]) -> list[int]:
    """Return the ids of ended processes that were not reaped and whose parent is in ``parents``."""
    return [stat.key.pid for stat in _all_stats() if stat.state == "Z" and stat.parent in parents]


def _known_children(pid: int) -> Iterator[_Stat]:
    """Yield the children of ``pid`` that /proc/PID/task lists; one may be missing while another child ends."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children = file.read().split()
        except OSError:  # the thread has ended, or the kernel has no such file (CONFIG_PROC_CHILDREN)
            continue
        yield from filter(None, map(_read_stat, map(int, children)))


def ancestors(pid: int) -> Iterator[int]:
    """Yield the ids of the processes above the process ``pid``, its parent first."""
    while (stat := _read_stat(pid)) is not None and stat.parent > 0:
        yield stat.parent
        pid = stat.parent


def words_of(pid: int) -> list[str]:
    """Return the argv of a process; [] if it has ended, is a zombie, or is a thread of the kernel."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process started; {} if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def catchers(signum: int) -> list[ProcessKey]:
    """Return this process's descendants that handle the signal ``signum``, but no descendant of a returned one."""
    # a helper that a program forked inherits the program's handlers, and the program passes signals on to it
    catching: list[ProcessKey] = []
    covered: set[int] = set()
    for key in descendants(os.getpid()):
        stat = _read_stat(key.pid)
        if stat is None:
            continue
        if stat.parent in covered:
            covered.add(key.pid)
        elif catches(key.pid, signum):
            covered.add(key.pid)
            catching.append(key)
    return catching


def catches(pid: int, signum: int) -> bool:
    """Whether the process ``pid`` has a handler for the signal ``signum``, as /proc says; False for signal 0."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return signum > 0 and any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def own_tree(apart_from: Collection[int] = ()) -> list[ProcessKey]:
    """Return this subreaper's living descendants, except the processes ``apart_from`` and their descendants.

    A descendant may be missing for a moment while another ends. An empty result is certain, because the slower
    list of all processes of the machine is read before it.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # a subreaper without children has no descendants
        return []
    return _descend(os.getpid(), apart_from, _known_children) or descendants(os.getpid(), apart_from)


def reap() -> Iterator[Ended]:
    """Reap every child that has ended, also adopted children, and yield each child's id and exit code."""
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while True:
        try:
            pid, status, usage = os.wait3(os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        # the kernel also counts the child's memory before exec, which was ours: a smaller value says nothing
        peak_bytes = usage.ru_maxrss * _KIBIBYTE if usage.ru_maxrss > own_peak else 0
        yield Ended(pid, os.waitstatus_to_exitcode(status), peak_bytes)


def send(keys: Iterable[ProcessKey], signum: int) -> None:
    """Send ``signum`` to the processes ``keys``; skip a process that has ended, even if its id was reused."""
    for key in keys:
        if key_of(key.pid) == key:
            try:
                os.kill(key.pid, signum)
            except (ProcessLookupError, PermissionError):
                continue


def terminate(keys: Iterable[ProcessKey]) -> None:
    """Send SIGTERM to the processes ``keys``, and SIGCONT so that a stopped process can end."""
    keys = list(keys)
    send(keys, signal.SIGTERM)
    send(keys, signal.SIGCONT)


class StoppedChildren:
    """The children of this process that somebody has stopped (SIGSTOP); this process continues them."""

    def __init__(self) -> None:
        self._seen: list[ProcessKey] = []
        self._next_seconds = 0.0

    def continue_them(self) -> None:
        """Send SIGCONT to children that the last search found stopped, and search again; at most once a second."""
        if time.monotonic() >= self._next_seconds:  # a pause of the whole job also stops this process
            self._next_seconds = time.monotonic() + STOPPED_SECONDS
            send(self._seen, signal.SIGCONT)
            self._seen = list(_newly_stopped())


def _newly_stopped() -> Iterator[ProcessKey]:
    try:
        while (child := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG)) is not None:
            if (key := key_of(child.si_pid)) is not None:
                yield key
    except ChildProcessError:  # there are no children
        return


def user_name(uid: int) -> str:
    """Return the name of the user with the id ``uid``; the id as text if there is no such user."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_of(pid: int) -> str:
    """Return the name of the owner of the process ``pid``; an empty text if /proc does not show the process."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


def end_descendants(spared: Collection[int]) -> list[ProcessKey]:
    """End all descendants of this process by SIGTERM, then by SIGKILL, except the processes ``spared`` and their
    descendants. Return the keys (id and start time) of the descendants that still live.
    """
    if not _living(spared):
        return []
    terminate(_living(spared))
    _wait_until_none(_LEFTOVER_SECONDS, spared)
    send(_living(spared), signal.SIGKILL)
    _wait_until_none(_KILL_SECONDS, spared)
    return _living(spared)


def _living(spared: Collection[int]) -> list[ProcessKey]:
    for _ in reap():
        pass
    return own_tree(spared)


def _wait_until_none(timeout_seconds: float, spared: Collection[int]) -> None:
    deadline = time.monotonic() + timeout_seconds
    while _living(spared) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
