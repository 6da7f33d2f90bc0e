"""The watch over the speed of a job's instances: poprun asks each for its collectives, every four seconds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from popdist.errors import name_instances
from poprun.observe.account.arrivals import Look, Window, measure_window, read_look
from poprun.observe.account.evidence import read_evidence
from poprun.observe.account.judgements import Slowness
from poprun.observe.account.state import InstanceStatus
from poprun.observe.judge.slowness import (
    MOST_WINDOWS,
    NUM_WINDOWS,
    find_pause,
    find_slow_link,
    find_slowness,
    has_ended,
    waits_for_workers,
)
from poprun.observe.judge.verdict import helper_frame
from poprun.plan.plan import Places
from poprun.text.ranges import counted

MOST_HELPERS: Final = 8
"""The largest number of a DataLoader's workers that are asked for their stacks."""

PERIOD_SECONDS: Final = 4.0
"""The time between two questions to all instances about their last collectives."""

_ANSWER_SECONDS: Final = 2.5
_MAX_SLOWDOWNS: Final = 50
_MAX_LINES: Final = 5
_NO_HOSTS: Final = Places()


class LookRound:
    """One question to all instances of an attempt about their last collectives, and the answers so far."""

    def __init__(self) -> None:
        self.stuck_workers: dict[int, str] = {}  # where a loader's worker was seen last, by instance
        self._asked_at_seconds = 0.0
        self._ahead_seconds: dict[int, float] = {}  # of the instances that have not answered yet
        self._looks: dict[int, Look] = {}

    def is_due(self, now_seconds: float) -> bool:
        """Whether it is time to ask all instances again for their last collectives."""
        return now_seconds - self._asked_at_seconds >= PERIOD_SECONDS

    def ask(self, ahead_seconds: Mapping[int, float], now_seconds: float) -> None:
        """Begin a round; ``ahead_seconds``: how far the clock of each asked instance is ahead of poprun's."""
        self._ahead_seconds, self._looks, self._asked_at_seconds = dict(ahead_seconds), {}, now_seconds

    def add(self, event: Mapping[str, Any], status: InstanceStatus, now_seconds: float) -> None:
        """Record the answer of one instance: its last collectives, and its DataLoader workers' stacks."""
        if status.index in self._ahead_seconds:
            ahead_seconds = self._ahead_seconds.pop(status.index)
            if event.get("stacks"):
                self._record_worker(status.index, event["stacks"])
            look = read_look(event, status, now_seconds, ahead_seconds)
            if look is not None:
                self._looks[status.index] = look

    def _record_worker(self, instance: int, stacks: Mapping[str, Any]) -> None:
        """Record the source line of a DataLoader's worker, if it runs the program's own code."""
        for helper in read_evidence(stacks).helpers:
            if (frame := helper_frame(helper)) is not None:
                self.stuck_workers[instance] = f"worker {helper.pid} is at {frame.file}:{frame.line}"

    def finish(self, now_seconds: float) -> dict[int, Look]:
        """Return the answers by instance once all have arrived or the time limit is over; {} before then."""
        is_late = now_seconds - self._asked_at_seconds >= _ANSWER_SECONDS
        if not self._looks or (self._ahead_seconds and not is_late):
            return {}
        looks, self._looks, self._ahead_seconds = self._looks, {}, {}
        return looks


class PerformanceWatch:
    """The measured speed of an attempt's instances, and which instances were slow, or paused, and when."""

    def __init__(self, began_at_seconds: float, places: Places = _NO_HOSTS) -> None:
        self.round = LookRound()
        self.slowdowns: list[Slowness] = []  # by time; the last slowness may still last
        self.pauses: dict[tuple[int, str], list[float]] = {}  # seconds, by instance and phase
        self.waiting_seconds: dict[int, float] = {}  # time in which an instance waited for the slowest
        self.slow_link: Slowness | None = None  # between hosts
        self.suspect: int | None = None  # an instance that seems to wait for the workers of its loader
        self.windows: list[Window] = []  # the last windows, by time
        self._began_at_seconds = began_at_seconds
        self._places = places
        self._trip_seconds = 0.0  # round trip of a message to the farthest host
        self._before: Mapping[int, Look] = {}
        self._newest_moment = 0.0

    @property
    def lasting(self) -> Slowness | None:
        """The slowness that has not ended yet; None if no instance is slow now."""
        return self.slowdowns[-1] if self.slowdowns and self.slowdowns[-1].until_seconds is None else None

    @property
    def all_slowdowns(self) -> list[Slowness]:
        """Every slowness of an instance so far, in order; before them the slow network link, if there is one."""
        return [*([self.slow_link] if self.slow_link else []), *self.slowdowns]

    def note_links(self, round_trips: Mapping[str, float], own_host: str | None) -> list[str]:
        """Search once for a slow link between hosts; return the lines to print about it."""
        if own_host is None and len(round_trips) == 1:
            return []  # all instances share a host, and poprun runs on another host
        self._trip_seconds = max(round_trips.values(), default=0.0)
        if self.slow_link is None and self.lasting is None:
            self.slow_link = find_slow_link(self.windows, round_trips, own_host)
            return [] if self.slow_link is None else [self.slow_link.text]
        return []

    def update(self, num_instances: int, now_seconds: float) -> list[str]:
        """Handle the instances' answers once all have answered; return lines about slow instances to print."""
        looks = self.round.finish(now_seconds)
        return self.add_looks(looks) if len(looks) == num_instances else []

    def add_looks(self, looks: Mapping[int, Look]) -> list[str]:
        """Compare the answers of all instances with their answers before; return lines about slow instances."""
        if self._before.keys() != looks.keys():
            self._before = looks
            return []
        window = measure_window(self._before, looks, self._began_at_seconds, self._newest_moment)
        if window is None:
            return []
        is_first, self._before = not self._newest_moment, looks
        self._newest_moment = window.newest_moment
        return [] if is_first else self._add_window(window, looks)

    def _add_window(self, window: Window, looks: Mapping[int, Look]) -> list[str]:
        """Record a measured period, or its pause; return lines about an instance that became slow or normal."""
        for index, seconds in window.waits.items():
            waited = seconds * window.num_steps
            self.waiting_seconds[index] = self.waiting_seconds.get(index, 0.0) + waited
        if (pause := find_pause(window)) is not None:
            instance, phase, seconds = pause
            self.pauses.setdefault((instance, phase), []).append(seconds)
            return []
        self.windows = [*self.windows[1 - MOST_WINDOWS :], window]
        slowness, lasting = find_slowness(self.windows, self._trip_seconds), self.lasting
        latest = max(window.delays, key=lambda index: window.delays[index])
        self.suspect = latest if not self.slowdowns and waits_for_workers([window], latest) else None
        if slowness is not None and lasting is not None and slowness.instance == lasting.instance:
            self.slowdowns[-1] = replace(lasting, delay_seconds=slowness.delay_seconds, share=slowness.share)
            return []
        if lasting is not None and slowness is None and not has_ended(lasting, self.windows):
            return []
        lines = []
        if lasting is not None:
            self.slowdowns[-1] = replace(lasting, until_seconds=window.began_seconds)
            self.windows = self.windows[-NUM_WINDOWS // 2 :]  # earlier windows are about the slowness that is over
            lines.append(f"{lasting.name} is as fast as the others again")
        if slowness is not None and slowness.instance is not None and len(self.slowdowns) < _MAX_SLOWDOWNS:
            place = looks[slowness.instance].places.get(slowness.phase)
            places = [f"at {place}"] if place else []
            if (worker := self.round.stuck_workers.get(slowness.instance)) and slowness.phase == "data":
                places = [worker]
            hosts = self._places.hosts_of([slowness.instance])
            slowness = replace(slowness, reasons=(*slowness.reasons, *places), hosts=hosts)
            self.slowdowns.append(slowness)
            lines.append(slowness.text)
        return lines

    def summary(self) -> list[str]:
        """Return at most five lines about the attempt's slow instances and pauses; [] if none."""
        lines = [*(it.text for it in self.all_slowdowns), *self.describe_pauses()]
        left = len(lines) - _MAX_LINES
        return lines if left <= 0 else [*lines[: _MAX_LINES - 1], f"and {left + 1} more: --report has all"]

    def describe_pauses(self) -> list[str]:
        """Return a line for each instance that saved or validated alone."""
        return [
            f"{name_instances([instance])} alone: {phase}, {counted(len(seconds), 'time')}, "
            f"{sum(seconds):.0f} s in all, while the others waited"
            for (instance, phase), seconds in self.pauses.items()
        ]
