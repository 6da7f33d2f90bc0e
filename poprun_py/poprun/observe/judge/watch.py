"""Watches how fast a job's instances are: asks them in turn, and tells who keeps the others waiting."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from popdist.errors import name_instances
from poprun.observe.account.arrivals import Look, Window, measure_window, read_look
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
from poprun.plan.plan import Places
from poprun.text.ranges import counted

MOST_HELPERS: Final = 8
"""So many workers of a loader are asked where they stand."""

PERIOD_SECONDS: Final = 4.0
"""How often all instances are asked for the moments of their last collectives."""

_ANSWER_SECONDS: Final = 2.5
_MAX_SLOWDOWNS: Final = 50
_MAX_LINES: Final = 5
_NO_HOSTS: Final = Places()


class PerformanceWatch:
    """The last windows of one attempt, and what was found in them."""

    def __init__(self, began_at_seconds: float, places: Places = _NO_HOSTS) -> None:
        self.slowdowns: list[Slowness] = []  # by time; the last one may still last
        self.pauses: dict[tuple[int, str], list[float]] = {}  # seconds, by instance and phase
        self.waiting_seconds: dict[int, float] = {}  # for the slowest, by instance
        self.slow_link: Slowness | None = None  # between hosts
        self.suspect: int | None = None  # one that seems to wait for its loader's workers
        self._stuck_workers: dict[int, str] = {}  # where workers stood when they were asked last, by instance
        self._began_at_seconds = began_at_seconds
        self._places = places
        self._asked_at_seconds = 0.0
        self._asked: set[int] = set()
        self._ahead_seconds: Mapping[int, float] = {}
        self._trip_seconds = 0.0  # to the farthest host and back
        self._looks: dict[int, Look] = {}
        self._before: Mapping[int, Look] = {}
        self.windows: list[Window] = []  # the last ones
        self._newest_moment = 0.0

    @property
    def lasting(self) -> Slowness | None:
        """The slowness that lasts now; None where nobody keeps the others waiting."""
        return self.slowdowns[-1] if self.slowdowns and self.slowdowns[-1].until_seconds is None else None

    @property
    def all_slowdowns(self) -> list[Slowness]:
        """The slow link between hosts, if there is one, and the slow instances."""
        return [*([self.slow_link] if self.slow_link else []), *self.slowdowns]

    def is_due(self, now_seconds: float) -> bool:
        """Whether it is time to ask again."""
        return now_seconds - self._asked_at_seconds >= PERIOD_SECONDS

    def note_links(self, round_trips: Mapping[str, float], own_host: str | None) -> list[str]:
        """Look for a slow link between hosts, which is said once; the lines to be said now."""
        if own_host is None and len(round_trips) == 1:
            return []  # all instances share a host, and poprun is elsewhere
        self._trip_seconds = max(round_trips.values(), default=0.0)
        if self.slow_link is None and self.lasting is None:
            self.slow_link = find_slow_link(self.windows, round_trips, own_host)
            return [] if self.slow_link is None else [self.slow_link.text]
        return []

    def ask(self, ahead_seconds: Mapping[int, float], now_seconds: float) -> None:
        """Begin to wait for answers: by instance, by how much the clock of its host is ahead of poprun's."""
        self._ahead_seconds, self._looks = ahead_seconds, {}
        self._asked, self._asked_at_seconds = set(ahead_seconds), now_seconds

    def add(self, event: Mapping[str, Any], status: InstanceStatus, now_seconds: float) -> None:
        """Keep the answer of an instance."""
        if status.index in self._asked:
            self._asked.discard(status.index)
            if event.get("stacks"):
                self._note_workers(status.index, event["stacks"])
            look = read_look(event, status, now_seconds, self._ahead_seconds[status.index])
            if look is not None:
                self._looks[status.index] = look

    def _note_workers(self, instance: int, stacks: Mapping[str, Any]) -> None:
        """Keep where a loader's worker stands, if one does in the program's own code."""
        from poprun.observe.account.evidence import read_evidence
        from poprun.observe.judge.verdict import helper_frame

        for helper in read_evidence(stacks).helpers:
            if (frame := helper_frame(helper)) is not None:
                self._stuck_workers[instance] = f"worker {helper.pid} is at {frame.file}:{frame.line}"

    def update(self, num_instances: int, now_seconds: float) -> list[str]:
        """Look for who is slow once all have answered; the lines to be said now."""
        is_late = now_seconds - self._asked_at_seconds >= _ANSWER_SECONDS
        if not self._looks or (self._asked and not is_late):
            return []
        looks, self._looks, self._asked = self._looks, {}, set()
        return self.add_looks(looks) if len(looks) == num_instances else []

    def add_looks(self, looks: Mapping[int, Look]) -> list[str]:
        """Add what all instances have told at one moment; the lines to be said now."""
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
        """Add a window: what begins with it and what ends, in words; one of a pause by design does not count."""
        for index, seconds in window.waits.items():
            waited = seconds * window.num_steps
            self.waiting_seconds[index] = self.waiting_seconds.get(index, 0.0) + waited
        if (pause := find_pause(window)) is not None:
            instance, phase, seconds = pause
            self.pauses.setdefault((instance, phase), []).append(seconds)
            return []
        self.windows = [*self.windows[1 - MOST_WINDOWS :], window]
        found, lasting = find_slowness(self.windows, self._trip_seconds), self.lasting
        latest = max(window.delays, key=lambda index: window.delays[index])
        self.suspect = latest if not self.slowdowns and waits_for_workers([window], latest) else None
        if found is not None and lasting is not None and found.instance == lasting.instance:
            self.slowdowns[-1] = replace(lasting, delay_seconds=found.delay_seconds, share=found.share)
            return []
        if lasting is not None and found is None and not has_ended(lasting, self.windows):
            return []
        lines = []
        if lasting is not None:
            self.slowdowns[-1] = replace(lasting, until_seconds=window.began_seconds)
            self.windows = self.windows[-NUM_WINDOWS // 2 :]  # those before tell of what is over
            lines.append(f"{lasting.name} is as fast as the others again")
        if found is not None and found.instance is not None and len(self.slowdowns) < _MAX_SLOWDOWNS:
            place = looks[found.instance].places.get(found.phase)
            places = [f"at {place}"] if place else []
            if (worker := self._stuck_workers.get(found.instance)) and found.phase == "data":
                places = [worker]
            hosts = self._places.hosts_of([found.instance])
            found = replace(found, reasons=(*found.reasons, *places), hosts=hosts)
            self.slowdowns.append(found)
            lines.append(found.text)
        return lines

    def summary(self) -> list[str]:
        """At most five lines about a whole attempt; none when it was balanced."""
        lines = [*(it.text for it in self.all_slowdowns), *self.describe_pauses()]
        left = len(lines) - _MAX_LINES
        return lines if left <= 0 else [*lines[: _MAX_LINES - 1], f"and {left + 1} more: --report has all"]

    def describe_pauses(self) -> list[str]:
        """Which instances have saved or validated alone, a line each."""
        return [
            f"{name_instances([instance])} alone: {phase}, {counted(len(seconds), 'time')}, "
            f"{sum(seconds):.0f} s in all, while the others waited"
            for (instance, phase), seconds in self.pauses.items()
        ]
