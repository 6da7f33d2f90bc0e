"""The barriers of a group of processes: each rank has a page of shared memory that only this rank writes.

A rank increases its counter when all its data is in memory, and continues when the counter of every other rank is
equal. Next to the counter, in one of two places by the barrier's parity, are the purpose of the barrier and a
number for all ranks: no rank is at barrier n + 2 before all ranks have read the values of barrier n.
docs/design/host-memory.md says how a rank waits.
"""

import ctypes
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from popdist.errors import BackendError, CollectiveError, Names
from popdist.exchange.host_memory import forks

_STORES_IN_ORDER: Final = frozenset({"x86_64", "AMD64", "i386", "i486", "i586", "i686"})

_MEMBARRIER_NUMBERS: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4

Fence = Callable[[], None]


def make_fence(machine: str | None = None) -> Fence | None:
    """Return a function that makes other processes see writes in order; None if the processor orders writes."""
    name = platform.machine() if machine is None else machine
    return None if name in _STORES_IN_ORDER else membarrier()


def membarrier() -> Fence:
    """Return a function that is a memory barrier for all processes that have called ``membarrier()`` before."""
    number = _MEMBARRIER_NUMBERS.get(platform.machine())
    call = ctypes.CDLL(None, use_errno=True).syscall
    if number is None or call(number, _REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise BackendError(
            f"shared memory needs membarrier() on {platform.machine()}, and this kernel does not offer it: "
            f"{os.strerror(ctypes.get_errno())}"
        )

    def fence() -> None:
        if call(number, _GLOBAL_EXPEDITED, 0, 0) != 0:
            raise BackendError(f"membarrier() failed: {os.strerror(ctypes.get_errno())}")

    return fence


# indices of words in a rank's page
COUNTER: Final = 0
PURPOSES: Final = 1  # and 2: the purpose of the rank's last even barrier, and of its last odd barrier
NUMBERS: Final = 4  # and 5: the number that the rank posts at this barrier
STATE: Final = 8
FUTEX: Final = 9
SLEEPS: Final = 10
MESSAGES: Final = 16  # and following: for each rank, the last message to this rank

TAKES_PART, HAS_LEFT, GAVE_UP = 0, 1, 2

Words = memoryview  # of unsigned 64-bit numbers


class Barriers:
    """The barriers of a group's ranks; every rank makes the same barriers in the same order, from one thread.

    The pages and settings are attributes of one class: calls of further objects would slow down each barrier.
    """

    def __init__(
        self,
        pages: Sequence[Words],
        *,
        rank: int,
        names: Names,
        watch: "ProcessWatch",
        fence: Fence | None,
        timeout_seconds: float,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.failure: str | None = None
        self.rank = rank
        self.size = len(pages)
        self.pages = tuple(pages)
        self._mine = pages[rank]
        self._others = tuple(page for other, page in enumerate(pages) if other != rank)
        self._names = names
        self._watch = watch
        self._fence = fence
        self._is_crowded = watch.are_crowded
        self._yields = CrowdedYields()
        self._reads = range(1 if self._is_crowded else NUM_READS)
        self._futexes = Futexes(pages, rank)
        self.wake = self._futexes.wake
        forks.call_in_children(self._refuse_all)

    def wait(self, purpose: int, timeout_seconds: float | None = None) -> None:
        """Wait until all ranks are at this barrier with an equal ``purpose``, a number (below 2**63) for their
        collective.

        Raises BackendError if a rank was lost or late; the group then ends. Raises CollectiveError if the purposes
        of ranks differ; the group can still be used.
        """
        if self.failure is not None:
            self.raise_failure()
        mine, fence = self._mine, self._fence
        number = mine[COUNTER] + 1
        place = PURPOSES + (number & 1)
        mine[place] = purpose
        if fence is not None:
            fence()
        mine[COUNTER] = number
        self.wake()
        for words in self._others:
            if words[COUNTER] < number:
                self._wait_for_counter(words, number, timeout_seconds)
        if fence is not None:
            fence()
        for words in self._others:
            if words[place] != purpose:
                raise CollectiveError(self._disagreement(place))

    def of_part(self, ranks: Sequence[int], pages: Sequence[Words], watch: "ProcessWatch") -> "Barriers":
        """Return barriers for only ``ranks``, with this rank; ``pages`` has each rank's memory for barriers."""
        members = tuple(self._names.members[rank] for rank in ranks)
        return Barriers(
            pages,
            rank=ranks.index(self.rank),
            names=replace(self._names, members=members),
            watch=watch,
            fence=self._fence,
            timeout_seconds=self.timeout_seconds,
        )

    def exchange(self, number: int, purpose: int) -> list[int]:
        """Show ``number``, below 2**64, to all ranks at the next barrier; return the numbers of all, by rank."""
        place = NUMBERS + self.next_parity()
        self._mine[place] = number
        self.wait(purpose)
        return [page[place] for page in self.pages]

    def next_parity(self) -> int:
        """Return the next barrier's number modulo 2, which selects one of two places in shared memory."""
        return self._mine[COUNTER] + 1 & 1

    def name(self, ranks: Sequence[int]) -> str:
        """Return the names of the group's processes with the ranks ``ranks``, as text for messages."""
        return self._names.of(ranks)

    def fail(self, reason: str) -> None:
        """End this rank's part in barriers: its barriers raise an error with ``reason``, others stop waiting."""
        if self.failure is None:
            self.failure = reason
            self._mine[STATE] = GAVE_UP

    def close(self) -> None:
        """Leave the group, so that the other ranks see that this rank joins no further barrier."""
        if self.failure is None:
            self.failure = f"this {self._names.noun} has left the group"
            self._mine[STATE] = HAS_LEFT
        self._watch.close()

    def abort(self) -> None:
        """Make this rank's barriers raise an error, also in a thread that waits now; other ranks stop waiting."""
        self.fail(f"this {self._names.noun} ends")

    def _refuse_all(self) -> None:
        """Refuse all barriers in a forked child, because the barriers belong to the parent process."""
        self.failure = f"this process was forked from a {self._names.noun} of the group, and is none itself"

    def raise_failure(self) -> None:
        """Raise BackendError with the reason if this rank takes part in no further barrier."""
        if self.failure is not None:
            raise BackendError(self.failure)

    def fence(self) -> None:
        """Order this thread's memory accesses, for all processes: earlier accesses come before later accesses."""
        if self._fence is not None:
            self._fence()

    def wait_for(self, ranks: Sequence[int], is_done: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait for ``ranks`` until ``is_done()``, and return True; return False after ``timeout_seconds``. Raises
        BackendError if one of these ranks was lost, or if all of them have left.
        """

        def missing() -> list[int]:
            if is_done():
                return []
            return [rank for rank in ranks if self.pages[rank][STATE] != HAS_LEFT] or list(ranks)

        return is_done() or self._wait_until(ranks, is_done, missing, timeout_seconds)

    def check(self, ranks: Sequence[int]) -> None:
        """Raise BackendError if a rank in ``ranks`` was lost or has left, or if this rank has left."""
        self._check_awaited(lambda: list(ranks))

    def _wait_for_counter(self, words: Words, number: int, timeout_seconds: float | None) -> None:
        """Wait until the rank whose memory is ``words`` is at barrier ``number``; raise BackendError if late."""
        for _ in self._reads:
            if words[COUNTER] >= number:
                return
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        rank = next(rank for rank, page in enumerate(self.pages) if page is words)
        start = time.monotonic()
        yield_seconds = self._yields.next_seconds() if self._is_crowded else YIELD_SECONDS
        try:
            has_come = self._wait_until(
                [rank], lambda: words[COUNTER] >= number, lambda: self._missing(number), seconds, yield_seconds
            )
        except BaseException as error:
            self.fail(str(error) if isinstance(error, BackendError) else f"a wait was broken off by {error!r}")
            raise
        if not has_come:
            late = f"{self.name(self._missing(number))} did not come within the timeout of {seconds:g} seconds"
            self.fail(late)
            raise BackendError(late)
        if self._is_crowded and yield_seconds:
            self._yields.record_wait(time.monotonic() - start)

    def _wait_until(
        self,
        ranks: Sequence[int],
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        timeout_seconds: float,
        yield_seconds: float | None = None,
    ) -> bool:
        # only the first rank's wake-up can end a nap
        longest_nap = LONGEST_NAP_SECONDS if len(ranks) == 1 else FIRST_NAP_SECONDS
        return wait_until(
            is_done,
            timeout_seconds,
            check=lambda: self._check_awaited(missing),
            nap=lambda seconds: self._futexes.sleep(ranks[0], is_done, min(seconds, longest_nap)),
            yield_seconds=yield_seconds,
        )

    def _missing(self, number: int) -> list[int]:
        return [rank for rank, page in enumerate(self.pages) if page[COUNTER] < number]

    def _check_awaited(self, missing: Callable[[], list[int]]) -> None:
        """Raise BackendError if an awaited rank, one of ``missing()``, is lost or has failed, or this rank has."""
        self.raise_failure()
        awaited, states = missing(), [page[STATE] for page in self.pages]
        gone = {*self._watch.ended(awaited), *(rank for rank in awaited if states[rank] == HAS_LEFT)}
        if gone := gone.intersection(missing()):
            raise BackendError(f"the connection to {self.name(sorted(gone))} was closed: it ended or was lost")
        if given_up := [rank for rank in missing() if states[rank] == GAVE_UP]:
            raise BackendError(f"{self.name(given_up)} had given up waiting, or failed, in a collective before")

    def _disagreement(self, place: int) -> str:
        by_purpose: Mapping[int, list[int]] = {page[place]: [] for page in self.pages}
        for rank, page in enumerate(self.pages):
            by_purpose[page[place]].append(rank)
        lines = [f"  {self.name(ranks)}: {describe(purpose)}" for purpose, ranks in by_purpose.items()]
        return f"the {self._names.noun}s are not in the same collective:\n" + "\n".join(lines)


_OPERATIONS: list[str] = ["barrier"]
_KINDS: list[str] = [""]


def operation(name: str) -> int:
    """Register the operation ``name``; return its number, equal in all processes of the same popdist version."""
    _OPERATIONS.append(name)
    return len(_OPERATIONS) - 1


def kind(name: str) -> int:
    """Register the dtype ``name``; return its number, equal in all processes of the same popdist version."""
    _KINDS.append(name)
    return len(_KINDS) - 1


def purpose(operation_number: int, *, kind: int = 0, root: int = 0, count: int = 0) -> int:
    """Return a number that describes a barrier's collective: bits for operation, dtype, root and element count."""
    return operation_number | kind << 8 | (root & 0xFFF) << 16 | (count & 0x7FFFFFFFF) << 28


def describe(number: int) -> str:
    """Return in words the collective that a barrier's ``number``, made by :func:`purpose`, describes."""
    what, of, root, count = number & 0xFF, number >> 8 & 0xFF, number >> 16 & 0xFFF, number >> 28
    words = [_OPERATIONS[what] if what < len(_OPERATIONS) else f"operation {what}"]
    if of:
        words.append(f"of {count} {_KINDS[of] if of < len(_KINDS) else f'elements of kind {of}'}")
    if root:
        words.append(f"with root {root - 1}")
    return " ".join(words)


_FUTEX_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_EVERYBODY: Final = 2**31 - 1
_WORD_MASK: Final = 2**32 - 1
_LOW_HALF: Final = 0 if sys.byteorder == "little" else 4

_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futexes:
    """The futexes (futex(2)) of a group: ranks sleep on a rank's futex until this rank wakes the sleepers."""

    def __init__(self, pages: Sequence[memoryview], rank: int) -> None:
        self._mine = pages[rank]
        self._others = tuple(page for other, page in enumerate(pages) if other != rank)
        self._pages = tuple(pages)
        self._number = _FUTEX_NUMBERS.get(platform.machine())
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
        """Sleep until ``rank`` wakes this rank, at most ``most_seconds``; return at once if ``is_done()``."""
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


NUM_READS: Final = 400
"""Number of reads of a rank's counter (20 microseconds) before a process yields; 1 if cores are too few."""

YIELD_SECONDS: Final = 0.0001
LONGEST_YIELD_SECONDS: Final = 0.001
"""The time for which a process yields its core before it sleeps; the second value if cores are too few."""

MOST_SLEEPS: Final = 64
"""Maximum number of consecutive waits that sleep at once, after a wait in which yielding was not enough."""

FIRST_NAP_SECONDS: Final = 0.0005
LONGEST_NAP_SECONDS: Final = 0.02
NAP_GROWTH: Final = 2

CHECK_SECONDS: Final = 0.02
"""Seconds between two checks whether the processes that this process waits for have ended."""

Nap = Callable[[float], None]


def wait_until(
    is_done: Callable[[], bool],
    timeout_seconds: float,
    *,
    check: Callable[[], None] = lambda: None,
    nap: Nap = time.sleep,
    yield_seconds: float | None = None,
) -> bool:
    """Wait until ``is_done()``, and return True; return False if ``timeout_seconds`` have passed."""
    now = time.monotonic()
    deadline, next_check = now + timeout_seconds, now + CHECK_SECONDS
    yield_until = now + (YIELD_SECONDS if yield_seconds is None else yield_seconds)
    nap_seconds = FIRST_NAP_SECONDS
    while not is_done():
        now = time.monotonic()
        if now >= deadline:
            return is_done()
        if now < yield_until:
            os.sched_yield()
            continue
        if now >= next_check:
            check()
            next_check = now + CHECK_SECONDS
        nap(min(nap_seconds, deadline - now))
        nap_seconds = min(nap_seconds * NAP_GROWTH, LONGEST_NAP_SECONDS)
    return True


def is_crowded(pids: Collection[int]) -> bool:
    """Whether there are more processes in ``pids`` than cores on which these processes may run."""
    cores: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # a process that the kernel does not let us ask about counts as without cores
            cores |= os.sched_getaffinity(pid)
    return len(pids) > len(cores)


class CrowdedYields:
    """The time for which a waiting process calls sched_yield() before it sleeps, if there are too few cores."""

    def __init__(self) -> None:
        self._distrust = self._num_sleeps = 0  # next to a computing process a yield takes a whole time slice

    def next_seconds(self) -> float:
        """Return how many seconds the next wait calls sched_yield() before it sleeps; 0 means to sleep at once."""
        if self._num_sleeps == 0:
            return LONGEST_YIELD_SECONDS
        self._num_sleeps -= 1
        return 0.0

    def record_wait(self, waited_seconds: float) -> None:
        """Record how long a wait with sched_yield() took; after a long wait, the next waits sleep at once."""
        if waited_seconds < LONGEST_YIELD_SECONDS:
            self._distrust = max(self._distrust - 1, 0)
        else:
            self._distrust = self._num_sleeps = min(2 * self._distrust + 1, MOST_SLEEPS)


class ProcessWatch:
    """A watch that detects which processes have ended, by descriptors, because process ids may be reused."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.are_crowded = is_crowded([os.getpid(), *pids.values()])
        self._descriptors: dict[int, int] = {}
        for key, pid in pids.items():
            with suppress(OSError):  # a process that the kernel does not let us watch never counts as ended
                self._descriptors[key] = os.pidfd_open(pid)

    def ended(self, keys: Iterable[int]) -> list[int]:
        """Return those ranks in ``keys`` whose processes have ended."""
        by_descriptor = {self._descriptors[key]: key for key in keys if key in self._descriptors}
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        return [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]

    def close(self) -> None:
        """Stop watching all processes, and close the descriptors of the processes."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
