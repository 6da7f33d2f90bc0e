"""Counters of a host's kernel, such as throttling by heat, which agents read and send to poprun.

poprun sends the name of this module to the agents, which load the module in a bare interpreter, so it uses only
a small part of the standard library. A reader gets a process of the program, and returns totals by name, which
only grow.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

_CPUS: Final = "/sys/devices/system/cpu"
_MILLISECONDS: Final = 1000.0


def read_counters(pid: int) -> dict[str, float]:
    """Return the kernel's counters for the process ``pid``, such as seconds of throttling: totals by name."""
    return {name: total for reader in READERS for name, total in reader(pid).items()}


def read_heat(_pid: int, root: str = _CPUS) -> dict[str, float]:
    """Return ``heat_seconds``, the mean time of a core's throttling for heat; {} if the kernel lacks it."""
    totals = []
    for cpu in range(_num_cpus(root)):
        folder = f"{root}/cpu{cpu}/thermal_throttle"
        times = [_read(f"{folder}/{part}_throttle_total_time_ms") for part in ("core", "package")]
        totals += [max(int(time) for time in times if time)] if any(times) else []
    return {"heat_seconds": sum(totals) / len(totals) / _MILLISECONDS} if totals else {}


READERS: Final[tuple[Callable[[int], dict[str, float]], ...]] = (read_heat,)


def _num_cpus(root: str) -> int:
    """Return the largest number of processors that the kernel may have, from the folder ``root`` in /sys."""
    last = _read(f"{root}/possible").rpartition("-")[2]
    return int(last) + 1 if last.isdecimal() else 0


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""
