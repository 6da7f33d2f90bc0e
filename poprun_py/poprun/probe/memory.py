"""What is known of the memory of a machine on which a program failed: who was killed for want of it, limits."""

import os
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from poprun.probe.control_groups import CGROUPS, MEMBERSHIP, ControlGroup, control_groups
from poprun.probe.kernel_kills import KillCounts, kill_counts, named_count

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
