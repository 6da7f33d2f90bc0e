"""Measurements of what a process lacks on its machine: time without a core, time of throttling, and memory.

Each shim loads this module in a bare interpreter, so it imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

_NANOSECONDS: Final = 1e9
_MICROSECONDS: Final = 1e6
_KIBIBYTE: Final = 1024
_MEMORY_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For both versions of control groups: the files with limit and use, and the name of the cache to subtract."""

_KILL_FILES: Final = ("memory.events", "memory.oom_control")
CGROUPS: Final = "/sys/fs/cgroup"


def measure_pressure(pid: int) -> dict[str, float]:
    """Return how long a process waited for a core, how long a CPU quota stopped it, and its available memory."""
    if not pid:
        return {}
    delay = read_kernel_file(f"/proc/{pid}/schedstat").split()[1:2]  # of its main thread
    membership = read_kernel_file(f"/proc/{pid}/cgroup")
    return {
        "run_delay_seconds": int(delay[0]) / _NANOSECONDS if delay else 0.0,
        "throttled_seconds": throttled_seconds(membership),
        "room_bytes": room_bytes(membership),
    }


def throttled_seconds(membership: str, root: str = CGROUPS) -> float:
    """Return the seconds for which a CPU quota stopped a process; ``membership``: its /proc/PID/cgroup as text."""
    files = [f"{folder}/cpu.stat" for folder in group_folders("cpu", membership, root)]
    return max(
        (
            (named_number(file, "throttled_usec") or 0) / _MICROSECONDS
            or (named_number(file, "throttled_time") or 0) / _NANOSECONDS
            for file in files
        ),
        default=0.0,
    )


def room_bytes(membership: str, root: str = CGROUPS, meminfo: str = "/proc/meminfo") -> int:
    """Return how many bytes a process can allocate until its machine or control group is full; 0 if unknown."""
    kibibytes = named_number(meminfo, "MemAvailable:")
    rooms = [] if kibibytes is None else [kibibytes * _KIBIBYTE]
    for folder in group_folders("memory", membership, root):
        for names in _MEMORY_FILES:
            limit, used = (read_kernel_file(f"{folder}/{name}").strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal():
                rooms.append(int(limit) - int(used) + (named_number(f"{folder}/memory.stat", names[2]) or 0))
    return max(0, min(rooms, default=0))


def count_kills(membership: str, root: str = CGROUPS, vmstat: str = "/proc/vmstat") -> list[int | None]:
    """Return how many processes the kernel killed for lack of memory: in the control group, and on the machine.

    A number that is not known is None.
    """
    files = (f"{folder}/{name}" for folder in group_folders("memory", membership, root) for name in _KILL_FILES)
    counts = (named_number(file, "oom_kill") for file in files)
    return [next((count for count in counts if count is not None), None), named_number(vmstat, "oom_kill")]


def group_folders(controller: str, membership: str, root: str = CGROUPS) -> Iterator[str]:
    """Yield the folders of a process's control groups for ``controller`` (such as ``cpu``), innermost first."""
    for line in membership.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # in version 1, distributions mount the controller under its name, or make a link
        top, place = f"{root}/{controller}" if controllers else root, path.rstrip("/")
        while place:
            yield f"{top}{place}"
            place = place.rpartition("/")[0]
        yield top  # in a container this folder is the container's own group, whatever its name outside


def named_number(file: str, name: str) -> int | None:
    """Return the number after ``name`` in a file whose lines are names with numbers; None if it is missing."""
    rows = (line.split() for line in read_kernel_file(file).splitlines())
    return next((int(row[1]) for row in rows if row[:1] == [name]), None)


def read_kernel_file(file: str) -> str:
    """Return the whole text of ``file``, a file of the kernel such as /proc/self/cgroup; "" if there is none."""
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
