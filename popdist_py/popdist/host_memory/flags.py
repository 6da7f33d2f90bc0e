"""The flags of a group: a page for each rank, which only that rank writes, and the meetings that they count.

A *meeting* is the point to which all ranks of a group come before any of them goes on. Meetings are counted from
1: a rank raises its counter when all that it has to say before the meeting stands in memory, and goes on when
every other rank's counter is there. What is said for a meeting stands in one of two places, by the meeting's
parity: a rank that is at meeting n + 1 may already write there while a slow one still reads what was said for
meeting n, and no rank is at n + 2 before all have read it.

A rank writes its data, then its counter; a peer reads the counter, then the data. x86 lets others see stores in
program order and does loads in program order, so nothing is needed there. Weaker machines, such as those of ARM
and POWER, may let the counter be seen first. There every rank calls membarrier(2) between the two writes, and
between the two reads: the kernel promises a full memory barrier on every running thread of the processes that
registered.
"""

import ctypes
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from popdist.errors import BackendError, CollectiveError, name_instances
from popdist.host_memory.waiting import NUM_SPINS, YIELD_SECONDS, CrowdedYields, Futexes, ProcessWatch, wait_until

_STORES_IN_ORDER: Final = frozenset({"x86_64", "AMD64", "i386", "i486", "i586", "i686"})

_SYSCALL_NUMBERS: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4

Fence = Callable[[], None]


def make_fence(machine: str | None = None) -> Fence | None:
    """The memory fence to call between data and counter; None where none is needed."""
    name = platform.machine() if machine is None else machine
    return None if name in _STORES_IN_ORDER else membarrier()


def membarrier() -> Fence:
    """A full memory barrier on all running threads of all processes that have called this."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
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


COUNTER: Final = 0
PURPOSES: Final = 1
"""Words 1 and 2: what the rank is about to do at its meeting of even, and of odd number."""

NUMBERS: Final = 4
"""Words 4 and 5: a number that the rank says there."""

STATE: Final = 8
TAKES_PART, HAS_LEFT, GAVE_UP = 0, 1, 2

Words = memoryview  # of 64-bit numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a group's ranks in messages.

    Attributes:
        members: The number of each, in rank order.
        noun: What the members are: "rank", "instance".
    """

    members: tuple[int, ...]
    noun: str = "rank"

    def of(self, ranks: Iterable[int]) -> str:
        """The members of these ranks in words."""
        return name_instances((self.members[rank] for rank in ranks), self.noun)


class Flags:
    """The meetings of the ranks of a group: every rank has the same ones in the same order, one thread at a time.

    Args:
        pages: Every rank's page, in order, as 64-bit numbers.
        rank: This process's rank.
        names: What the ranks are called.
        watch: The watch over the other ranks' processes.
        fence: The memory fence of this machine, as :func:`make_fence` gives it.
        timeout_seconds: How long a rank is waited for.
    """

    def __init__(
        self,
        pages: Sequence[Words],
        *,
        rank: int,
        names: Names,
        watch: ProcessWatch,
        fence: Fence | None,
        timeout_seconds: float,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.failure: str | None = None
        self.rank = rank
        self.size = len(pages)
        self._mine = pages[rank]
        self._others = tuple(page for other, page in enumerate(pages) if other != rank)
        self._pages = tuple(pages)
        self._names = names
        self._watch = watch
        self._fence = fence
        self.is_crowded = watch.are_crowded
        self._yields = CrowdedYields()
        self._spins = range(1 if self.is_crowded else NUM_SPINS)
        self._futexes = Futexes(pages, rank)
        self.wake = self._futexes.wake
        _all_flags.add(self)

    def meet(self, purpose: int, timeout_seconds: float | None = None) -> int:
        """Wait until every rank is here; the meeting's number.

        Args:
            purpose: What this rank is about to do; below 2**63, and the same on every rank.
            timeout_seconds: How long to wait; None means :attr:`timeout_seconds`.

        Raises:
            BackendError: If a rank was lost or is late, or has failed or left before. Nobody meets any more then.
            CollectiveError: If a rank came for something else; every rank raises it, and they can meet again.
        """
        if self.failure is not None:
            self.raise_failure()
        mine = self._mine
        number = mine[COUNTER] + 1
        mine[PURPOSES + (number & 1)] = purpose
        if self._fence is not None:
            self._fence()
        mine[COUNTER] = number
        return self.go_on(purpose, timeout_seconds)

    def go_on(self, purpose: int, timeout_seconds: float | None = None) -> int:
        """The rest of :meth:`meet`, for a rank that has said its purpose and raised its counter."""
        number = self._mine[COUNTER]
        place = PURPOSES + (number & 1)
        fence = self._fence
        self.wake()
        for words in self._others:
            if words[COUNTER] < number:
                self._wait(words, number, timeout_seconds)
        if fence is not None:
            fence()
        for words in self._others:
            if words[place] != purpose:
                raise CollectiveError(self._disagreement(place))
        return number

    def part(self, ranks: Sequence[int], pages: Sequence[Words], watch: ProcessWatch) -> "Flags":
        """The flags of some of the ranks, this rank among them, on pages of their own."""
        members = tuple(self._names.members[rank] for rank in ranks)
        return Flags(
            pages,
            rank=ranks.index(self.rank),
            names=Names(members=members, noun=self._names.noun),
            watch=watch,
            fence=self._fence,
            timeout_seconds=self.timeout_seconds,
        )

    @property
    def addresses(self) -> list[int]:
        """The addresses of all ranks' pages in this process."""
        return [ctypes.addressof(ctypes.c_char.from_buffer(page)) for page in self._pages]

    def say(self, number: int) -> None:
        """Tell all ranks a number below 2**64 at the next meeting."""
        self._mine[NUMBERS + (self._mine[COUNTER] + 1 & 1)] = number

    def said(self) -> list[int]:
        """The number that every rank told at the last meeting."""
        place = NUMBERS + (self._mine[COUNTER] & 1)
        return [page[place] for page in self._pages]

    def next_number(self) -> int:
        """The next meeting's number."""
        return self._mine[COUNTER] + 1

    def name(self, ranks: Sequence[int]) -> str:
        """The members of these ranks in words."""
        return self._names.of(ranks)

    def fail(self, reason: str) -> None:
        """Come to no further meeting, because of ``reason``, and let no other rank wait for this one."""
        if self.failure is None:
            self.failure = reason
            self._mine[STATE] = GAVE_UP

    def leave(self) -> None:
        """Tell the others that this rank comes to no further meeting."""
        if self.failure is None:
            self.failure = f"this {self._names.noun} has left the group"
            self._mine[STATE] = HAS_LEFT
        self._watch.close()

    def break_off(self) -> None:
        """End this rank's meetings, also one that another thread waits in; no other rank waits for it then."""
        self.fail(f"this {self._names.noun} ends")

    def forget(self) -> None:
        """Refuse all meetings in a forked child: they are the parent's."""
        self.failure = f"this process was forked from a {self._names.noun} of the group, and is none itself"

    def raise_failure(self) -> None:
        """Raise BackendError if this rank comes to no further meeting."""
        if self.failure is not None:
            raise BackendError(self.failure)

    def order(self) -> None:
        """Keep what this thread has read and written so far before what comes next, for all processes."""
        if self._fence is not None:
            self._fence()

    def wait_for(self, rank: int, is_done: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait for what one rank does outside of meetings; False if it did not come in time, and still may.

        Raises:
            BackendError: If the rank was lost or has left, or this one comes to no further meeting.
        """
        return is_done() or self._wait_until(rank, is_done, lambda: [] if is_done() else [rank], timeout_seconds)

    def _wait(self, words: Words, number: int, timeout_seconds: float | None) -> None:
        """Wait for one rank; for all others, too, where it takes long."""
        for _ in self._spins:
            if words[COUNTER] >= number:
                return
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        rank = next(rank for rank, page in enumerate(self._pages) if page is words)
        start = time.monotonic()
        yield_seconds = self._yields.next_seconds() if self.is_crowded else YIELD_SECONDS
        try:
            if not self._wait_until(
                rank, lambda: words[COUNTER] >= number, lambda: self._missing(number), seconds, yield_seconds
            ):
                self._give_up(number, seconds)
        except BaseException as error:
            self.fail(str(error) if isinstance(error, BackendError) else f"a wait was broken off by {error!r}")
            raise
        if self.is_crowded and yield_seconds:
            self._yields.judge(time.monotonic() - start)

    def _wait_until(
        self,
        rank: int,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        timeout_seconds: float,
        yield_seconds: float = YIELD_SECONDS,
    ) -> bool:
        return wait_until(
            is_done,
            timeout_seconds,
            check=lambda: self._look_after(missing),
            nap=lambda seconds: self._futexes.sleep(rank, is_done, seconds),
            yield_seconds=yield_seconds,
        )

    def _give_up(self, number: int, timeout_seconds: float) -> None:
        late = self.name(self._missing(number))
        raise BackendError(f"{late} did not come within the timeout of {timeout_seconds:g} seconds")

    def _missing(self, number: int) -> list[int]:
        return [rank for rank, page in enumerate(self._pages) if page[COUNTER] < number]

    def _look_after(self, missing: Callable[[], list[int]]) -> None:
        """Raise if a rank that is waited for will not come, or this one shall wait no more."""
        self.raise_failure()
        awaited, states = missing(), [page[STATE] for page in self._pages]
        gone = {*self._watch.ended(awaited), *(rank for rank in awaited if states[rank] == HAS_LEFT)}
        if gone := gone.intersection(missing()):
            raise BackendError(f"the connection to {self.name(sorted(gone))} was closed: it ended or was lost")
        if given_up := [rank for rank in missing() if states[rank] == GAVE_UP]:
            raise BackendError(f"{self.name(given_up)} had given up waiting, or failed, in a collective before")

    def _disagreement(self, place: int) -> str:
        by_purpose: Mapping[int, list[int]] = {page[place]: [] for page in self._pages}
        for rank, page in enumerate(self._pages):
            by_purpose[page[place]].append(rank)
        lines = [f"  {self.name(ranks)}: {describe(purpose)}" for purpose, ranks in by_purpose.items()]
        return f"the {self._names.noun}s are not in the same collective:\n" + "\n".join(lines)


_OPERATIONS: list[str] = ["barrier"]
_KINDS: list[str] = [""]


def operation(name: str) -> int:
    """The number of an operation, the same in every process that runs this version of popdist."""
    _OPERATIONS.append(name)
    return len(_OPERATIONS) - 1


def purpose(operation_number: int, *, kind: int = 0, root: int = 0, count: int = 0) -> int:
    """The purpose of a meeting as one number: 8 bits of operation, 8 of kind, 12 of root, 35 of count."""
    return operation_number | kind << 8 | (root & 0xFFF) << 16 | (count & 0x7FFFFFFFF) << 28


def kind(name: str) -> int:
    """The number of a kind of elements or of addition, as :func:`operation`."""
    _KINDS.append(name)
    return len(_KINDS) - 1


def describe(number: int) -> str:
    """A purpose in words."""
    what, of, root, count = number & 0xFF, number >> 8 & 0xFF, number >> 16 & 0xFFF, number >> 28
    words = [_OPERATIONS[what] if what < len(_OPERATIONS) else f"operation {what}"]
    if of:
        words.append(f"of {count} {_KINDS[of] if of < len(_KINDS) else f'elements of kind {of}'}")
    if root:
        words.append(f"with root {root - 1}")
    return " ".join(words)


_all_flags: "weakref.WeakSet[Flags]" = weakref.WeakSet()


def _forget_all() -> None:
    for flags in list(_all_flags):
        with suppress(Exception):
            flags.forget()


os.register_at_fork(after_in_child=_forget_all)
