"""The facts of this machine that may explain why a program has failed; no module of a start loads them."""

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final

from poprun.launch.pressure import CGROUPS, group_folders, named_number, read_kernel_file
from poprun.launch.process.limits import MEMBERSHIP, KillCounts, kill_counts

_MEMINFO: Final = "/proc/meminfo"
_SHARED_MEMORY: Final = "/dev/shm"
_NO_LIMIT_BYTES: Final = 2**60
_KIBIBYTE: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The memory and processor time that a program may use; None for a limit that is not set or not known."""

    group_bytes: int | None = None  # limit of the control groups around this process
    machine_bytes: int | None = None  # the machine's memory
    address_space_bytes: int | None = None  # address space of each process (``ulimit -v``)
    cpu_seconds: int | None = None  # processor time that each process may use (``ulimit -t``)
    shared_bytes: int | None = None  # size of /dev/shm
    shared_free_bytes: int | None = None  # free memory in /dev/shm


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts of a machine that may explain why a program failed: killed processes, and the program's limits."""

    killed: KillCounts = field(default_factory=KillCounts)  # processes that the kernel has killed during the job
    limits: MemoryLimits = field(default_factory=MemoryLimits)  # the limits of a program


def read_evidence_of_machine(event: Mapping[str, Any]) -> Evidence:
    """Return the facts in ``event``, a message of another host's agent, that may explain a program's failure."""
    limits = {it.name: event["limits"].get(it.name) for it in fields(MemoryLimits)}
    return Evidence(killed=KillCounts(*event["killed"]), limits=MemoryLimits(**limits))


def evidence_since(before: KillCounts) -> Evidence:
    """Return facts that may explain a failure: limits, and the processes killed since the counts ``before``."""
    return Evidence(killed=kill_counts().since(before), limits=memory_limits())


def memory_limits(membership: str = MEMBERSHIP, cgroups: str = CGROUPS) -> MemoryLimits:
    """Return how much memory and processor time a program may use on this machine. Arguments are for tests."""
    limits = map(_group_limit, group_folders("memory", read_kernel_file(membership), cgroups))
    kibibytes = named_number(_MEMINFO, "MemTotal:")
    shared = None
    with suppress(OSError):
        shared = os.statvfs(_SHARED_MEMORY)
    return MemoryLimits(
        group_bytes=min((limit for limit in limits if limit is not None), default=None),
        machine_bytes=None if kibibytes is None else kibibytes * _KIBIBYTE,
        address_space_bytes=_soft_limit(resource.RLIMIT_AS),
        cpu_seconds=_soft_limit(resource.RLIMIT_CPU),
        shared_bytes=None if shared is None else shared.f_blocks * shared.f_frsize,
        shared_free_bytes=None if shared is None else shared.f_bavail * shared.f_frsize,
    )


def _group_limit(folder: str) -> int | None:
    with suppress(ValueError):  # without a limit, the limit is called max
        limit = int(
            read_kernel_file(f"{folder}/memory.max") or read_kernel_file(f"{folder}/memory.limit_in_bytes")
        )
        return limit if limit < _NO_LIMIT_BYTES else None
    return None


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
