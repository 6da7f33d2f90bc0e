"""What the kernel grants the processes of a job, and how many of them it killed for want of memory.

The counts are those of proc_vmstat(5) and of the control groups (`memory.events`, `memory.oom_control`).
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

CGROUPS: Final = "/sys/fs/cgroup"
MEMBERSHIP: Final = "/proc/self/cgroup"


class ControlGroup(NamedTuple):
    """One group.

    Attributes:
        folder: Where its files are. It need not exist: inside a container the names may be those outside.
        is_unified: Whether it is of version 2.
    """

    folder: str
    is_unified: bool

    def read(self, name: str) -> str:
        """The text of one of its files.

        Raises:
            OSError: If there is none.
        """
        return read_text(os.path.join(self.folder, name))


def control_groups(
    controller: str, membership: str = MEMBERSHIP, cgroups: str = CGROUPS
) -> Iterator[ControlGroup]:
    """The groups of this process that may hold files of ``controller``, inner ones first: each one's limit holds.

    Args:
        controller: Such as ``cpu`` or ``memory``.
        membership: The file that says which groups this process is in.
        cgroups: Where the groups are mounted.
    """
    try:
        lines = read_text(membership).splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = os.path.join(cgroups, controller) if controllers else cgroups
                names = [name for name in path.split("/") if name]
                for depth in range(len(names), -1, -1):
                    yield ControlGroup(os.path.join(root, *names[:depth]), is_unified=not controllers)


def read_text(path: str) -> str:
    """The whole text of a file.

    Raises:
        OSError: If it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        return file.read()


_VMSTAT: Final = "/proc/vmstat"


class KillCounts(NamedTuple):
    """How many processes the kernel has ever killed for want of memory; None where it does not say.

    Attributes:
        in_group: In the control group of this process and those inside it.
        on_machine: On the machine.
    """

    in_group: int | None = None
    on_machine: int | None = None


def kill_counts(membership: str = MEMBERSHIP, cgroups: str = CGROUPS, vmstat: str = _VMSTAT) -> KillCounts:
    """What the kernel has counted until now. The arguments are for tests."""
    groups = (_group_kills(group) for group in control_groups("memory", membership, cgroups))
    in_group = next((count for count in groups if count is not None), None)
    return KillCounts(in_group=in_group, on_machine=_count(vmstat))


def named_count(path: str, name: str) -> int | None:
    """The number behind ``name`` in a file of names and numbers; None when there is none."""
    with suppress(OSError, ValueError):
        rows = [line.split() for line in read_text(path).splitlines()]
        return next((int(row[1]) for row in rows if row[:1] == [name]), None)
    return None


def _group_kills(group: ControlGroup) -> int | None:
    return _count(os.path.join(group.folder, "memory.events" if group.is_unified else "memory.oom_control"))


def _count(path: str) -> int | None:
    """The value of ``oom_kill`` in a file of names and numbers."""
    return named_count(path, "oom_kill")


_MEMINFO: Final = "/proc/meminfo"
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where it is mounted, to look at
_NO_LIMIT_BYTES: Final = 2**60
_KIBIBYTE: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """How much there is; None where there is no limit, or none that can be read.

    Attributes:
        group_bytes: What the control groups around this process may use.
        machine_bytes: The machine's memory.
        address_space_bytes: What each process may address (``ulimit -v``).
        cpu_seconds: Processor time that each process may use (``ulimit -t``).
        shared_bytes: Size of /dev/shm.
        shared_free_bytes: What is free there.
    """

    group_bytes: int | None = None
    machine_bytes: int | None = None
    address_space_bytes: int | None = None
    cpu_seconds: int | None = None
    shared_bytes: int | None = None
    shared_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the machine when a program has failed.

    Attributes:
        before: How many processes the kernel had killed when the job began.
        after: How many it has killed now that the job has ended.
        limits: What a program may have.
    """

    before: KillCounts = field(default_factory=KillCounts)
    after: KillCounts = field(default_factory=KillCounts)
    limits: MemoryLimits = field(default_factory=MemoryLimits)

    @property
    def num_killed_in_group(self) -> int | None:
        """Processes of the job's control group that the kernel killed for want of memory, if it says."""
        return _difference(self.before.in_group, self.after.in_group)

    @property
    def num_killed_on_machine(self) -> int | None:
        """Processes of the machine that it killed for want of memory, if it says."""
        return _difference(self.before.on_machine, self.after.on_machine)


def evidence_since(before: KillCounts) -> Evidence:
    """What there is to know when a job that began with the counts ``before`` has failed."""
    return Evidence(before=before, after=kill_counts(), limits=memory_limits())


def memory_limits(membership: str = MEMBERSHIP, cgroups: str = CGROUPS) -> MemoryLimits:
    """What a program that is started here may have. The arguments are for tests."""
    groups = (_group_limit(group) for group in control_groups("memory", membership, cgroups))
    shared = None
    with suppress(OSError):
        shared = os.statvfs(_SHARED_MEMORY)
    return MemoryLimits(
        group_bytes=min((limit for limit in groups if limit is not None), default=None),
        machine_bytes=_machine_bytes(),
        address_space_bytes=_soft_limit(resource.RLIMIT_AS),
        cpu_seconds=_soft_limit(resource.RLIMIT_CPU),
        shared_bytes=None if shared is None else shared.f_blocks * shared.f_frsize,
        shared_free_bytes=None if shared is None else shared.f_bavail * shared.f_frsize,
    )


def _group_limit(group: ControlGroup) -> int | None:
    with suppress(OSError, ValueError):
        limit = int(group.read("memory.max" if group.is_unified else "memory.limit_in_bytes"))
        return limit if limit < _NO_LIMIT_BYTES else None
    return None


def _machine_bytes() -> int | None:
    kibibytes = named_count(_MEMINFO, "MemTotal:")
    return None if kibibytes is None else kibibytes * _KIBIBYTE


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
