"""Waiting for other processes: look a few times, then leave the core to others, then sleep until woken.

A counter that is raised within microseconds is seen by looking again. Where there are more processes than cores,
the peer that is waited for needs this very core, so the core is given away at once. It is given away by yielding,
and for longer than elsewhere: a rank that sleeps leaves its core empty, and the kernel moves no other rank there
within so short a time (see :class:`CrowdedYields`). A rank that waits longer sleeps until it is woken, looks now
and then in case it was not, and asks whether the processes that it waits for have ended.

Each rank has a futex, a word in memory on which other processes sleep in the kernel. A rank that wants to sleep
says so, looks once more, and sleeps unless the futex has changed since. A rank that has raised its counter changes
its futex and wakes the others if one of them sleeps. The two may cross unseen on their way through memory;
therefore no rank sleeps for long without looking.
"""

import ctypes
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

FUTEX: Final = 9
SLEEPS: Final = 10
"""Words of a rank's page; see `popdist.host_memory.flags`."""

_SYSCALL_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_EVERYBODY: Final = 2**31 - 1
_WORD_MASK: Final = 2**32 - 1
_LOW_HALF: Final = 0 if sys.byteorder == "little" else 4

_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futexes:
    """The futexes of a group, one for each rank."""

    def __init__(self, pages: Sequence[memoryview], rank: int) -> None:
        self._mine = pages[rank]
        self._others = tuple(page for other, page in enumerate(pages) if other != rank)
        self._pages = tuple(pages)
        self._number = _SYSCALL_NUMBERS.get(platform.machine())
        self._addresses = [_address(page) for page in pages]
        self._my_address = self._addresses[rank]

    def wake(self) -> None:
        """Wake the ranks that sleep on this rank's futex."""
        for words in self._others:
            if words[SLEEPS]:
                self._mine[FUTEX] = self._mine[FUTEX] + 1 & _WORD_MASK
                if self._number is not None:
                    _syscall(self._number, self._my_address, _WAKE, _EVERYBODY, None)
                return

    def sleep(self, rank: int, is_done: Callable[[], bool], most_seconds: float) -> None:
        """Sleep until ``rank`` wakes this one, unless ``is_done()``; no longer than ``most_seconds``."""
        if self._number is None:
            time.sleep(most_seconds)
            return
        mine = self._mine
        mine[SLEEPS] = 1
        before = self._pages[rank][FUTEX]
        if not is_done():
            limit = _Timespec(int(most_seconds), int(most_seconds % 1 * 1e9))
            _syscall(self._number, self._addresses[rank], _WAIT, before, ctypes.addressof(limit))
        mine[SLEEPS] = 0


def _address(page: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page)) + FUTEX * page.itemsize + _LOW_HALF


NUM_SPINS: Final = 400
"""Looks in a row, about 20 microseconds, where every process of the group may have a core of its own."""

YIELD_SECONDS: Final = 0.0001
LONGEST_YIELD_SECONDS: Final = 0.001
"""How long the core is left to others before this process sleeps; the second where there are too few cores."""

MOST_SLEEPS: Final = 64
"""Waits in a row that sleep at once, after one in which yielding was not enough."""

FIRST_NAP_SECONDS: Final = 0.0005
LONGEST_NAP_SECONDS: Final = 0.02
NAP_GROWTH: Final = 2

LOOK_SECONDS: Final = 0.02
"""How often to ask whether the processes that are waited for have ended."""

Nap = Callable[[float], None]


def wait_until(
    is_done: Callable[[], bool],
    timeout_seconds: float,
    *,
    check: Callable[[], None] = lambda: None,
    nap: Nap = time.sleep,
    yield_seconds: float = YIELD_SECONDS,
) -> bool:
    """Wait until ``is_done()``; False when the time is up."""
    now = time.monotonic()
    deadline, yield_until, next_look = now + timeout_seconds, now + yield_seconds, now + LOOK_SECONDS
    nap_seconds = FIRST_NAP_SECONDS
    while not is_done():
        now = time.monotonic()
        if now >= deadline:
            return is_done()
        if now < yield_until:
            os.sched_yield()
            continue
        if now >= next_look:
            check()
            next_look = now + LOOK_SECONDS
        nap(min(nap_seconds, deadline - now))
        nap_seconds = min(nap_seconds * NAP_GROWTH, LONGEST_NAP_SECONDS)
    return True


def is_crowded(pids: Collection[int]) -> bool:
    """Whether these processes have fewer cores than they are, all together: each may be bound to one of its own.

    One that the kernel does not let us ask about counts as having none.
    """
    cores: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return len(pids) > len(cores)


class CrowdedYields:
    """How long to yield in a wait, where there are more processes than cores.

    To yield is quick while only ranks that wait for each other want the cores. Where somebody computes, be it
    another rank, it can take a whole slice of time, and a rank that sleeps gets a core sooner. So after a wait in
    which yielding was not enough, some waits sleep at once: one, after each further failure twice as many and one,
    and after each success one fewer. quick_meetings.c does the same.
    """

    def __init__(self) -> None:
        self._distrust = self._num_sleeps = 0

    def next_seconds(self) -> float:
        """For the next wait."""
        if self._num_sleeps == 0:
            return LONGEST_YIELD_SECONDS
        self._num_sleeps -= 1
        return 0.0

    def judge(self, waited_seconds: float) -> None:
        """Learn how long a wait took that began with yielding."""
        if waited_seconds < LONGEST_YIELD_SECONDS:
            self._distrust = max(self._distrust - 1, 0)
        else:
            self._distrust = self._num_sleeps = min(2 * self._distrust + 1, MOST_SLEEPS)


class ProcessWatch:
    """A watch over processes: which of them have ended. It holds their descriptors, so no process id is mistaken.

    Args:
        pids: The processes to watch, by any keys. One that the kernel does not let us watch never counts as ended.

    Attributes:
        are_crowded: Whether these processes and this one had fewer cores than they are, in the beginning.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.are_crowded = is_crowded([os.getpid(), *pids.values()])
        self._descriptors: dict[int, int] = {}
        for key, pid in pids.items():
            with suppress(OSError):
                self._descriptors[key] = os.pidfd_open(pid)

    def ended(self, keys: Iterable[int]) -> list[int]:
        """The keys, among ``keys``, whose processes have ended."""
        by_descriptor = {self._descriptors[key]: key for key in keys if key in self._descriptors}
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        return [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]

    def close(self) -> None:
        """Watch no process any more."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
