"""How many processes the kernel has killed for want of memory.

The counts are those of proc_vmstat(5) and of the control groups (`memory.events`, `memory.oom_control`).
"""

import os
from contextlib import suppress
from typing import Final, NamedTuple

from poprun.probe.control_groups import CGROUPS, MEMBERSHIP, ControlGroup, control_groups, read_text

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
