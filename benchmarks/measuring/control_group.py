"""Control groups for memory (cgroups(7), version 1 or 2): a limit for a command and all that it starts.

What counts is the memory of the processes, their swap, and the page cache of the files that they read and write,
which the kernel drops when it needs room. A process that needs more than what is left is killed. A group may have
a disk, too, that reads more slowly than it can.
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
from dataclasses import dataclass, replace
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
    disk_folder: Path | None = None  # where the kernel shows the limit of the disk, if that is elsewhere

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs ``words`` in the group."""
        enter = 'echo $$ > "$0" && exec "$@"'
        for folder in filter(None, (self.disk_folder, self.folder)):
            words = ["sh", "-c", enter, str(folder / "cgroup.procs"), *words]
        return [*words]

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
def control_group(limit_bytes: int, slow_disk: tuple[Path, int] | None = None) -> Iterator[ControlGroup]:
    """A group in which commands run with ``limit_bytes`` of memory; what still runs in it at the end is killed.

    ``slow_disk`` is a folder, and how many bytes the disk on which it is reads for the group in a second.

    Raises:
        NoControlGroupError: If none can be made, or the kernel does not enforce its limit.
    """
    _check_enforced()
    with _made(limit_bytes) as made:
        group = made if slow_disk is None else _with_slow_disk(made, *slow_disk)
        try:
            yield group
        finally:
            group.end()
            if group.disk_folder is not None:
                group.disk_folder.rmdir()


def _with_slow_disk(group: ControlGroup, folder: Path, bytes_per_second: int) -> ControlGroup:
    """The group, for which the disk of ``folder`` reads so slowly."""
    device = folder.stat().st_dev
    disk = Path("/sys/dev/block", f"{os.major(device)}:{os.minor(device)}")
    disk_folder = None
    try:
        if (disk / "partition").exists():
            disk = disk.resolve().parent
        number = (disk / "dev").read_text(encoding="ascii").strip()
        if group.is_unified:
            _write(group.folder / "io.max", f"{number} rbps={bytes_per_second}")
            return group
        mounts = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
        root = next(row[1] for row in mounts if row[2] == "cgroup" and "blkio" in row[3].split(","))
        disk_folder = Path(root, group.folder.name)
        disk_folder.mkdir()
        _write(disk_folder / "blkio.throttle.read_bps_device", f"{number} {bytes_per_second}")
    except (OSError, StopIteration) as error:
        if disk_folder is not None and disk_folder.exists():
            disk_folder.rmdir()
        raise NoControlGroupError(f"the disk of {folder} cannot be slowed down here: {error!r}") from error
    return replace(group, disk_folder=disk_folder)


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


def _write(file: Path, value: int | str) -> None:
    """Write into one of the kernel's files, which is there."""
    with file.open("r+", encoding="ascii") as opened:
        opened.write(str(value))
