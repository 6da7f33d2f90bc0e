"""How much memory and processor time the processes below an agent use, as /proc tells it.

Standard library only: the agents run this in a bare interpreter.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

from poprun.process.tree import ProcessKey

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_USER_TIME_FIELD, _SYSTEM_TIME_FIELD = 11, 12
_RESIDENT_FIELD, _SHARED_FIELD = 1, 2


class Usage(NamedTuple):
    """What a tree of processes uses.

    Attributes:
        memory_bytes: Resident memory; of the processes after the first, only what they share with nobody.
        cpu_seconds: Processor time of those that live, since each began.
        num_processes: How many live.
    """

    memory_bytes: int
    cpu_seconds: float
    num_processes: int


def measure(keys: Iterable[ProcessKey]) -> Usage:
    """What the processes of ``keys`` use now, parents first; those that are gone are passed over."""
    memory_bytes, cpu_ticks, num_processes = 0, 0, 0
    for key in keys:
        try:
            with open(f"/proc/{key.pid}/statm", "rb") as file:
                pages = file.read().split()
            with open(f"/proc/{key.pid}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        cpu_ticks += int(fields[_USER_TIME_FIELD]) + int(fields[_SYSTEM_TIME_FIELD])
        shared = int(pages[_SHARED_FIELD]) if num_processes else 0
        memory_bytes += (int(pages[_RESIDENT_FIELD]) - shared) * _PAGE_BYTES
        num_processes += 1
    return Usage(memory_bytes, cpu_ticks / _TICKS_PER_SECOND, num_processes)
