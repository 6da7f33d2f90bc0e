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
_ROOT: Final = "/sys/fs/cgroup"


def measure_machine(pid: int) -> dict[str, float]:
    """Totals of a process: seconds without a core that it wanted, and seconds that its group was throttled."""
    if not pid:
        return {}
    delay = _read(f"/proc/{pid}/schedstat").split()[1:2]  # of its main thread
    return {
        "run_delay_seconds": int(delay[0]) / _NANOSECONDS if delay else 0.0,
        "throttled_seconds": throttled_seconds(_read(f"/proc/{pid}/cgroup")),
    }


def throttled_seconds(membership: str, root: str = _ROOT) -> float:
    """How long a process's control group, or one around it, was not allowed to compute; cgroups(7)."""
    return max((_read_throttled(file) for file in _stat_files(membership, root)), default=0.0)


def _stat_files(membership: str, root: str) -> Iterator[str]:
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        place = path.rstrip("/")
        while place:
            # of version 1, distributions mount the controller under this name, if only as a link
            yield f"{root}/cpu{place}/cpu.stat" if controllers else f"{root}{place}/cpu.stat"
            place = place.rpartition("/")[0]


def _read_throttled(file: str) -> float:
    for line in _read(file).splitlines():
        name, _, number = line.partition(" ")
        if name == "throttled_usec":
            return int(number) / _MICROSECONDS
        if name == "throttled_time":
            return int(number) / _NANOSECONDS
    return 0.0


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
