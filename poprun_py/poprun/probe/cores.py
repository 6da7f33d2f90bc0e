"""The CPU cores that this process may use: its affinity, bounded by the quota of its control group."""

import os
from contextlib import suppress

from poprun.probe.control_groups import CGROUPS, MEMBERSHIP, ControlGroup, control_groups


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores, ascending; at least one.

    A container limited to the time of two cores may be allowed to run on all sixty-four of its machine; it then
    gets the first two, because threads past the quota only wait for each other.
    """
    cores = sorted(os.sched_getaffinity(0))
    quota = cpu_quota(MEMBERSHIP, CGROUPS)
    return tuple(cores if quota is None else cores[: max(1, int(quota))])


def cpu_quota(membership: str, cgroups: str) -> float | None:
    """How many cores' worth of time the control groups grant; None when they set no limit.

    Args:
        membership: The file that says which groups this process is in, as cgroups(7) describes it.
        cgroups: Where the groups are mounted.
    """
    quotas = map(_quota, control_groups("cpu", membership, cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: ControlGroup) -> float | None:
    with suppress(OSError, ValueError):
        if group.is_unified:
            quota, period = group.read("cpu.max").split()
            return None if quota == "max" else int(quota) / int(period)
        micros = int(group.read("cpu.cfs_quota_us"))
        return None if micros < 0 else micros / int(group.read("cpu.cfs_period_us"))
    return None
