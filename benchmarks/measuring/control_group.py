"""Control groups for memory (cgroups(7), version 1 or 2): a limit for a command and all that it starts.

What counts is the memory of the processes, their swap, and the page cache of the files that they read and write,
which the kernel drops when it needs room. A process that needs more than what is left is killed.
"""

import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_MEMBERSHIP = Path("/proc/self/cgroup")
_SWAPS = Path("/proc/swaps")
_END_SECONDS = 30.0
_LOOK_SECONDS = 0.01
_PROBE_BYTES = 32 << 20
_PROBE_SECONDS = 60.0


class NoControlGroupError(Exception):
    """There is no control group here that limits memory; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
    """A group with a limit.

    Attributes:
        folder: Where the kernel shows it.
        limit_bytes: What its processes may hold together; a multiple of the size of a page.
        is_unified: Whether it is one of version 2.
    """

    folder: Path
    limit_bytes: int
    is_unified: bool

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs ``words`` in the group."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self.folder / "cgroup.procs"), *words]

    @property
    def peak_bytes(self) -> int | None:
        """The most that was counted until now; None where the kernel does not say (Linux before 5.19)."""
        file = self.folder / ("memory.peak" if self.is_unified else "memory.max_usage_in_bytes")
        return int(file.read_text(encoding="ascii")) if file.exists() else None

    @property
    def num_killed(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        file = self.folder / ("memory.events" if self.is_unified else "memory.oom_control")
        rows = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
        return int(rows.get("oom_kill", 0))

    def end(self) -> None:
        """Kill what still runs in the group, and remove it.

        Raises:
            OSError: If that was not possible within 30 s.
        """
        deadline = time.monotonic() + _END_SECONDS
        while self.folder.exists():
            for pid in map(int, (self.folder / "cgroup.procs").read_text(encoding="ascii").split()):
                if pid:  # not one that is outside of this process's namespace
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)


@contextmanager
def control_group(limit_bytes: int) -> Iterator[ControlGroup]:
    """A group in which commands run with ``limit_bytes`` of memory; what still runs in it at the end is killed.

    Raises:
        NoControlGroupError: If none can be made, or the kernel does not enforce its limit.
    """
    _check_enforced()
    with _made(limit_bytes) as group:
        yield group


@cache
def _check_enforced() -> None:
    """Check that a process which needs more than the limit is killed: some sandboxes only seem to have groups."""
    needs_more = [sys.executable, "-I", "-S", "-c", f"b'x' * {2 * _PROBE_BYTES}"]
    with _made(_PROBE_BYTES) as group:
        ended = subprocess.run(group.command(needs_more), check=False, capture_output=True, timeout=_PROBE_SECONDS)
        if not ended.returncode:
            raise NoControlGroupError(f"the limit of control groups in {group.folder.parent} is not enforced here")
        if ended.returncode != -signal.SIGKILL:
            raise NoControlGroupError(
                f"no process can be put into {group.folder}: {ended.stderr.decode().strip()}"
            )


@contextmanager
def _made(limit_bytes: int) -> Iterator[ControlGroup]:
    """A group as high up in the tree as where this process is, or higher where groups cannot be made there."""
    root, own, is_unified = _place()
    name = f"popdist-{uuid.uuid4().hex}"
    reasons = []
    for parent in (own, *(it for it in own.parents if it.is_relative_to(root))):
        group = ControlGroup(folder=parent / name, limit_bytes=limit_bytes, is_unified=is_unified)
        try:
            _make(group)
        except OSError as error:
            reasons.append(f"{error.strerror}: {error.filename}")
            with suppress(FileNotFoundError):
                group.folder.rmdir()
            continue
        try:
            yield group
        finally:
            group.end()
        return
    raise NoControlGroupError(f"no control group for memory can be made here: {reasons[0]}")


def _place() -> tuple[Path, Path, bool]:
    """Where groups for memory are mounted, this process's own group there, and whether they are of version 2."""
    mounts = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    older = next((row[1] for row in mounts if row[2] == "cgroup" and "memory" in row[3].split(",")), None)
    root = older or next((row[1] for row in mounts if row[2] == "cgroup2"), None)
    if root is None:
        raise NoControlGroupError(f"no control groups for memory are mounted here: {_MOUNTS} has none")
    for line in _MEMBERSHIP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers.split(",").count("memory" if older else ""):
            own = Path(root, path.strip("/"))  # a container may show its name on the host, which is not there
            return Path(root), own if own.is_dir() else Path(root), older is None
    raise NoControlGroupError(f"this process is in no control group for memory: {_MEMBERSHIP} names none")


def _make(group: ControlGroup) -> None:
    """Make the folder, and set the limit of memory and swap together."""
    group.folder.mkdir()
    older, unified = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ("memory.max", "memory.swap.max")
    memory, swap = (group.folder / name for name in (unified if group.is_unified else older))
    _write(memory, group.limit_bytes)
    if swap.exists():
        _write(swap, 0 if group.is_unified else group.limit_bytes)
    elif len(_SWAPS.read_text(encoding="ascii").splitlines()) > 1:
        raise OSError(errno.ENOTSUP, "the kernel does not count swap", str(swap))


def _write(file: Path, number: int) -> None:
    """Write into one of the kernel's files, which is there."""
    with file.open("r+", encoding="ascii") as opened:
        opened.write(str(number))
