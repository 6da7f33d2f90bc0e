"""What the machine keeps from one process: time without a core of its own, and time its control group forbids.

Standard library only, and little of it: a bare interpreter loads this in each shim.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it
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
"""A group's limit, what it uses, and the cache among that which makes room; of both versions."""

_KILL_FILES: Final = ("memory.events", "memory.oom_control")
_ROOT: Final = "/sys/fs/cgroup"


def measure_pressure(pid: int) -> dict[str, float]:
    """What a process lacked: seconds without a core that it wanted, seconds of throttling; and the memory left."""
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
    """How long a process's control group, or one around it, was not allowed to compute; cgroups(7)."""
    texts = (_read(f"{folder}/cpu.stat") for folder in _folders("cpu", membership, root))
    return max(
        (
            _number(text, "throttled_usec") / _MICROSECONDS or _number(text, "throttled_time") / _NANOSECONDS
            for text in texts
        ),
        default=0.0,
    )


def room_bytes(membership: str, root: str = _ROOT, meminfo: str = "/proc/meminfo") -> int:
    """How much memory the machine has left for a process, or a control group that it is in; 0 if nobody tells."""
    lines = [line.split() for line in _read(meminfo).splitlines() if line.startswith("MemAvailable:")]
    rooms = [int(fields[1]) * _KIBIBYTE for fields in lines]
    for folder in _folders("memory", membership, root):
        for limit, used, cache in _MEMORY_FILES:
            limit_text, used_text = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{used}").strip()
            if limit_text.isdecimal() and used_text.isdecimal():
                rooms.append(int(limit_text) - int(used_text) + _number(_read(f"{folder}/memory.stat"), cache))
    return max(0, min(rooms, default=0))


def count_kills(membership: str, root: str = _ROOT) -> list[int | None]:
    """How many processes the kernel has ever killed for want of memory: in the control group, on the machine."""
    files = (f"{folder}/{name}" for folder in _folders("memory", membership, root) for name in _KILL_FILES)
    texts = (next((text for file in files if "oom_kill " in (text := _read(file))), ""), _read("/proc/vmstat"))
    return [_number(text, "oom_kill") if text else None for text in texts]


def _folders(controller: str, membership: str, root: str) -> Iterator[str]:
    """The folders of a process's control group of a controller, and of those around it."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # of version 1, distributions mount the controller under its name, if only as a link
        top, place = f"{root}/{controller}" if controllers else root, path.rstrip("/")
        while place:
            yield f"{top}{place}"
            place = place.rpartition("/")[0]
        yield top  # in a container this is its own group, whatever that is called outside


def _number(text: str, wanted: str) -> int:
    """The number behind a name in a list of both; 0 where there is none."""
    pairs = (line.partition(" ") for line in text.splitlines())
    return next((int(number) for name, _, number in pairs if name == wanted), 0)


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
