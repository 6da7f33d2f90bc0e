"""The hang of a job: no instance makes progress while some wait, and which instances wait for which. Pure.

Programs with popdist report that they wait. Other programs that compute almost nothing are asked for their
stacks. If no program is in a collective and no program computes, all instances stand still. The length of a
hang is the time without a change of any instance. A long compilation looks the same, so a hang is only
reported. poprun does not find an instance that spins while it waits, as with NCCL.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from popdist.ground.progress import Progress
from popdist.ground.values import dataclass
from poprun.observe.account.state import InstanceState, InstanceStatus

_GONE: Final = (InstanceState.EXITED, InstanceState.ENDED)
_LOOK_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang: the instances that wait while no instance makes progress, and the instances that they wait for."""

    idle_seconds: float  # for how long none has made progress
    waiting: Mapping[str, tuple[int, ...]]  # the instances that wait, ascending, by the call in which they wait
    absent: tuple[int, ...] = ()  # instances that run and for which the waiting instances wait, ascending
    ended: tuple[int, ...] = ()  # instances that have ended, ascending
    standing: tuple[int, ...] = ()  # instances that compute nothing while nobody waits in a collective, ascending
    is_told_by_programs: bool = True  # whether the programs reported their waits on their progress pages

    @property
    def is_suspicion(self) -> bool:
        """Whether the hang is only suspected, because it is unknown in which calls the instances wait."""
        return not self.waiting and not self.standing


def find_hang(statuses: Sequence[InstanceStatus], since_seconds: float = 0.0) -> Hang | None:
    """Return which instances wait for which, and for how many seconds no instance has made progress, counted at
    most from ``since_seconds``; None if no instance waits.
    """
    running = [status for status in statuses if status.state is InstanceState.RUNNING]
    waiting: dict[str, list[int]] = {}
    for status in running:
        if status.usage is None or status.progress is None or status.progressed_at_seconds is None:
            return None  # an instance was not measured yet
        if status.is_waiting:
            waiting.setdefault(status.progress.collective, []).append(status.index)
    if not waiting:
        return None
    absent = {status.index for status in running}.difference(*waiting.values())
    pages = [status.progress for status in running if status.is_waiting and status.progress is not None]
    awaited = {index for index in absent if any(_takes_part(index, page) for page in pages)}
    return Hang(
        idle_seconds=min(
            _seconds_since(status.progressed_at_seconds, status, since_seconds) for status in running
        ),
        waiting={collective: tuple(indices) for collective, indices in waiting.items()},
        absent=tuple(sorted(awaited)),
        ended=tuple(status.index for status in statuses if status.state in _GONE),
    )


def find_idle(
    statuses: Sequence[InstanceStatus], calls: Mapping[int, str], since_seconds: float, *, are_known: bool = False
) -> Hang | None:
    """Return the hang, found from stacks, of programs that do not report waits; None if one is not measured.

    ``calls`` are the collectives in which the instances stand. Without any call the hang is only suspected; but if
    ``are_known`` says that all instances were asked, the hang is a standstill.
    """
    running = [status for status in statuses if status.state is InstanceState.RUNNING]
    if any(status.usage is None or status.busy_at_seconds is None for status in running):
        return None
    idle = {status.index: _seconds_since(_changed_at_seconds(status), status, since_seconds) for status in running}
    waiting: dict[str, list[int]] = {}
    for index in sorted(calls.keys() & idle.keys()):
        waiting.setdefault(calls[index], []).append(index)
    ended = tuple(status.index for status in statuses if status.state in _GONE)
    if not waiting:
        if not idle:
            return None
        seconds, standing = (min, tuple(sorted(idle))) if are_known else (max, ())
        return Hang(
            idle_seconds=seconds(idle.values()),
            waiting={},
            ended=ended if are_known else (),
            standing=standing,
            is_told_by_programs=False,
        )
    return Hang(
        idle_seconds=min(idle[index] for indices in waiting.values() for index in indices),
        waiting={call: tuple(indices) for call, indices in waiting.items()},
        absent=tuple(sorted(idle.keys() - calls.keys())),
        ended=ended,
        is_told_by_programs=False,
    )


def _seconds_since(changed_at_seconds: float | None, status: InstanceStatus, since_seconds: float) -> float:
    """Return how long an instance had not changed at its last measurement, at most since ``since_seconds``."""
    measured_at_seconds = status.usage.at_seconds if status.usage is not None else 0.0
    return measured_at_seconds - max(changed_at_seconds or 0.0, since_seconds)


def _changed_at_seconds(status: InstanceStatus) -> float:
    """Return the time at which an instance last used processor time or reported progress."""
    return max(status.busy_at_seconds or 0.0, status.progressed_at_seconds or 0.0)


def _takes_part(index: int, progress: Progress) -> bool:
    """Whether instance ``index`` belongs to the collective in which the program with ``progress`` waits."""
    runs = progress.member_runs
    return not runs or any(first <= index <= last for first, last in runs)


def _seems_to_wait(status: InstanceStatus) -> bool:
    usage, busy_at_seconds = status.usage, status.busy_at_seconds
    if status.state is not InstanceState.RUNNING or usage is None or busy_at_seconds is None:
        return False
    return usage.at_seconds - busy_at_seconds >= _IDLE_SECONDS


class HangWatch:
    """The repeated search for a hang while a job runs; it also records whether the user was told of the hang."""

    def __init__(self) -> None:
        self.hang: Hang | None = None  # the hang that was seen at the last look, or None
        self.is_interactive = False  # whether a program may wait for its user: then only its report counts
        self.is_told = False
        """Whether the user was told of this hang. A hang after some progress is another hang."""
        self._since_seconds = 0.0
        self._next_seconds = 0.0
        self._calls: Mapping[int, str] = {}
        self._asked_at_seconds = 0.0

    @property
    def is_suspected(self) -> bool:
        """Whether a hang is suspected only because some instance computes nothing."""
        return self.hang is not None and self.hang.is_suspicion

    @property
    def idle_seconds(self) -> float:
        """The seconds for which no instance has made progress while some wait; 0 if no instance waits."""
        return 0.0 if self.hang is None else self.hang.idle_seconds

    def update(self, statuses: Sequence[InstanceStatus], now_seconds: float) -> None:
        """Search for a hang of the job, unless the last search was less than half a second ago."""
        if now_seconds < self._next_seconds:
            return
        self._next_seconds = now_seconds + _LOOK_SECONDS
        before, self.hang = self.idle_seconds, self._find(statuses)
        if self.idle_seconds < before:
            self.is_told = False

    def begin_anew(self, now_seconds: float) -> None:
        """Count the time without progress from now on, because the job was suspended until now."""
        self.hang, self.is_told, self._since_seconds, self._calls = None, False, now_seconds, {}

    def note_calls(self, calls: Mapping[int, str], statuses: Sequence[InstanceStatus], now_seconds: float) -> None:
        """Record in which collective, by its stack, each instance waits; leave out instances that compute."""
        self._calls = {index: call for index, call in calls.items() if _seems_to_wait(statuses[index])}
        self._asked_at_seconds = now_seconds
        self.hang, self.is_told = None, False

    def _find(self, statuses: Sequence[InstanceStatus]) -> Hang | None:
        if any(status.is_waiting for status in statuses):
            return find_hang(statuses, self._since_seconds)
        if self.is_interactive or not any(map(_seems_to_wait, statuses)):
            return None
        if any((statuses[index].busy_at_seconds or 0.0) > self._asked_at_seconds for index in self._calls):
            self._calls = {}
        running = [status for status in statuses if status.state is InstanceState.RUNNING]
        are_known = all(_changed_at_seconds(status) < self._asked_at_seconds for status in running)
        is_over = self._calls or are_known
        since = self._since_seconds if is_over else max(self._since_seconds, self._asked_at_seconds)
        return find_idle(statuses, self._calls, since, are_known=are_known)
