"""The tree of processes below one, and how they are signalled, whatever session or group they moved to.

Process groups do not hold a tree together: a data loader's worker may call setsid. So the tree is walked in
/proc (see proc_pid_stat(5)). A process is known by its id *and* its start time, because ids are used again.
Standard library only, and little of it: each shim of an MPI job loads this in a bare interpreter.
"""

from __future__ import annotations

import os
import resource
import time

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import NamedTuple
else:
    import _signal as signal  # signal itself loads enum and more

    from poprun.launch.process import NamedTuple

STOPPED_SECONDS = 1.0  # how often to look for children that are stopped
_LEFTOVER_SECONDS = 1.0  # what left processes get to end after SIGTERM
_POLL_SECONDS = 0.02
_KIBIBYTE = 1024
_STATE_FIELD, _PARENT_FIELD, _CHILD_FAULTS_FIELD, _START_FIELD = 0, 1, 8, 19


class ProcessKey(NamedTuple):
    """One process for all time: its id, and when it started in clock ticks since boot."""

    pid: int
    start_ticks: int


class Ended(NamedTuple):
    """A child that has ended: its id, exit code, negative for a signal, and most memory, 0 if unknown."""

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
    # The name in parentheses may hold anything, so the fields are counted from the last parenthesis.
    fields = text[text.rindex(b")") + 2 :].split()
    key = ProcessKey(pid, int(fields[_START_FIELD]))
    has_reaped = fields[_CHILD_FAULTS_FIELD] != b"0"  # no child runs without a page fault
    return _Stat(key, int(fields[_PARENT_FIELD]), fields[_STATE_FIELD].decode(), has_reaped)


def _all_stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _read_stat(int(name))) is not None:
            yield stat


def key_of(pid: int) -> ProcessKey | None:
    """The key of the process that has the id ``pid`` now, or None when there is none."""
    stat = _read_stat(pid)
    return None if stat is None else stat.key


def has_ended(pid: int) -> bool:
    """Whether there is no process ``pid``, or one that only has not been reaped."""
    stat = _read_stat(pid)
    return stat is None or stat.state == "Z"


def has_reaped(pid: int) -> bool:
    """Whether there is a process ``pid`` that has reaped a child of its own."""
    stat = _read_stat(pid)
    return stat is not None and stat.has_reaped


def descendants(root: int, apart_from: Collection[int] = ()) -> list[ProcessKey]:
    """Every living descendant of ``root``, parents first, without those in ``apart_from`` and below them."""
    children: dict[int, list[_Stat]] = {}
    for stat in _all_stats():
        children.setdefault(stat.parent, []).append(stat)
    return _descend(root, apart_from, lambda pid: children.get(pid, ()))


def _descend(
    root: int, apart_from: Collection[int], children_of: Callable[[int], Iterable[_Stat]]
) -> list[ProcessKey]:
    found: list[ProcessKey] = []
    parents = [root]
    for parent in parents:
        for stat in children_of(parent):
            if stat.key.pid in apart_from:
                continue
            parents.append(stat.key.pid)
            if stat.state != "Z":
                found.append(stat.key)
    return found


def unreaped_children(parents: Collection[int]) -> list[int]:
    """Return the processes that have ended, and that their ``parents`` have not asked about."""
    return [stat.key.pid for stat in _all_stats() if stat.state == "Z" and stat.parent in parents]


def _known_children(pid: int) -> Iterator[_Stat]:
    """The children of a process as its threads have them; one that ends at this moment may hide another."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children = file.read().split()
        except OSError:  # the thread has ended, or the kernel does not tell (CONFIG_PROC_CHILDREN)
            continue
        yield from filter(None, map(_read_stat, map(int, children)))


def ancestors(pid: int) -> Iterator[int]:
    """The ids of the processes above a process, its parent first."""
    while (stat := _read_stat(pid)) is not None and stat.parent > 0:
        yield stat.parent
        pid = stat.parent


def words_of(pid: int) -> list[str]:
    """The argv of a process; empty when it is gone, a zombie, or a thread of the kernel."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def catchers(signum: int) -> list[ProcessKey]:
    """The descendants of this process that handle ``signum``, without those below another one that does."""
    # a helper that was forked from a program has the program's handlers, and is the program's to tell
    found: list[ProcessKey] = []
    covered: set[int] = set()
    for key in descendants(os.getpid()):
        stat = _read_stat(key.pid)
        if stat is None:
            continue
        if stat.parent in covered:
            covered.add(key.pid)
        elif catches(key.pid, signum):
            covered.add(key.pid)
            found.append(key)
    return found


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal (proc_pid_status(5), SigCgt); none has one for 0."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return signum > 0 and any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def own_tree(apart_from: Collection[int] = ()) -> list[ProcessKey]:
    """Every living descendant of this process, a subreaper, without those in ``apart_from`` and below them.

    One may be missing for a moment while another ends. An empty answer is certain: the processes of others, of
    which there may be thousands, are read before it.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # a subreaper without a child has no descendants
        return []
    return _descend(os.getpid(), apart_from, _known_children) or descendants(os.getpid(), apart_from)


def reap() -> Iterator[Ended]:
    """Reap every child that has ended, adopted ones too."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while True:
        try:
            pid, status, usage = os.wait3(os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        # the kernel counts what the child held before it executed its program: less than ours says nothing
        peak_bytes = usage.ru_maxrss * _KIBIBYTE if usage.ru_maxrss > own else 0
        yield Ended(pid, os.waitstatus_to_exitcode(status), peak_bytes)


def send(keys: Iterable[ProcessKey], signum: int) -> None:
    """Send ``signum`` to each process; those that are gone, or whose id is used again, are left out."""
    for key in keys:
        if key_of(key.pid) == key:
            try:
                os.kill(key.pid, signum)
            except (ProcessLookupError, PermissionError):
                continue


def terminate(keys: Iterable[ProcessKey]) -> None:
    """Send SIGTERM to processes, and SIGCONT so that stopped ones can end."""
    keys = list(keys)
    send(keys, signal.SIGTERM)
    send(keys, signal.SIGCONT)


class StoppedChildren:
    """The children of this process that somebody has stopped, and that have to act: they are continued."""

    def __init__(self) -> None:
        self._seen: list[ProcessKey] = []
        self._next_seconds = 0.0

    def continue_them(self) -> None:
        """Continue those that were seen stopped at the last look, and look for others, at most once a second."""
        if time.monotonic() >= self._next_seconds:  # a pause of the whole job stops this process meanwhile, too
            self._next_seconds = time.monotonic() + STOPPED_SECONDS
            send(self._seen, signal.SIGCONT)
            self._seen = list(_newly_stopped())


def _newly_stopped() -> Iterator[ProcessKey]:
    try:
        while (child := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG)) is not None:
            if (key := key_of(child.si_pid)) is not None:
                yield key
    except ChildProcessError:  # there is no child at all
        return


def user_name(uid: int) -> str:
    """The name of the user with that number, or the number where there is no such user."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_of(pid: int) -> str:
    """The name of the user whose process it is; empty when this machine's /proc does not show it."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


def end_descendants(spared: Collection[int], kill_seconds: float) -> list[ProcessKey]:
    """End all descendants but the ``spared`` and their children; return those that SIGKILL did not end in time."""
    if not _living(spared):
        return []
    terminate(_living(spared))
    _wait_until_none(_LEFTOVER_SECONDS, spared)
    send(_living(spared), signal.SIGKILL)
    _wait_until_none(kill_seconds, spared)
    return _living(spared)


def _living(spared: Collection[int]) -> list[ProcessKey]:
    for _ in reap():
        pass
    return own_tree(spared)


def _wait_until_none(timeout_seconds: float, spared: Collection[int]) -> None:
    deadline = time.monotonic() + timeout_seconds
    while _living(spared) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
