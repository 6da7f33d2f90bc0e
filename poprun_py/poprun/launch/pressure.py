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
_ROOT: Final = "/sys/fs/cgroup"


def measure_pressure(pid: int) -> dict[str, float]:
    """Return how long a process waited for a core, how long a CPU quota stopped it, and its available memory."""
    if not pid:
        return {}
    delay = _read(f"/proc/{pid}/schedstat").split()[1:2]  # of its main thread
    membership = _read(f"/proc/{pid}/cgroup")
    return {
        "run_delay_seconds": int(delay[0]) / _NANOSECONDS if delay else 0.0,
        "throttled_seconds": throttled_seconds(membership),
        "room_bytes": room_bytes(membership),
    }


def throttled_seconds(membership: str, root: str = _ROOT) -> float:
    """Return the seconds for which a CPU quota stopped a process; ``membership``: its /proc/PID/cgroup as text."""
    texts = (_read(f"{folder}/cpu.stat") for folder in _folders("cpu", membership, root))
    return max(
        (
            _number(text, "throttled_usec") / _MICROSECONDS or _number(text, "throttled_time") / _NANOSECONDS
            for text in texts
        ),
        default=0.0,
    )


def room_bytes(membership: str, root: str = _ROOT, meminfo: str = "/proc/meminfo") -> int:
    """Return how many bytes a process can allocate until its machine or control group is full; 0 if unknown."""
    lines = [line.split() for line in _read(meminfo).splitlines() if line.startswith("MemAvailable:")]
    rooms = [int(fields[1]) * _KIBIBYTE for fields in lines]
    for folder in _folders("memory", membership, root):
        for limit, used, cache in _MEMORY_FILES:
            limit_text, used_text = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{used}").strip()
            if limit_text.isdecimal() and used_text.isdecimal():
                rooms.append(int(limit_text) - int(used_text) + _number(_read(f"{folder}/memory.stat"), cache))
    return max(0, min(rooms, default=0))


def count_kills(membership: str, root: str = _ROOT) -> list[int | None]:
    """Return how many processes the kernel killed for lack of memory: in the control group, and on the machine."""
    files = (f"{folder}/{name}" for folder in _folders("memory", membership, root) for name in _KILL_FILES)
    texts = (next((text for file in files if "oom_kill " in (text := _read(file))), ""), _read("/proc/vmstat"))
    return [_number(text, "oom_kill") if text else None for text in texts]


def _folders(controller: str, membership: str, root: str) -> Iterator[str]:
    """Yield the folders of a process's control groups for ``controller`` (such as ``cpu``), innermost first."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # in version 1, distributions mount the controller under its name, or make a link
        top, place = f"{root}/{controller}" if controllers else root, path.rstrip("/")
        while place:
            yield f"{top}{place}"
            place = place.rpartition("/")[0]
        yield top  # in a container this folder is the container's own group, whatever its name outside


def _number(text: str, label: str) -> int:
    """Return the number behind ``label`` in ``text``, whose lines are names with numbers; 0 if it is missing."""
    pairs = (line.partition(" ") for line in text.splitlines())
    return next((int(number) for name, _, number in pairs if name == label), 0)


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
