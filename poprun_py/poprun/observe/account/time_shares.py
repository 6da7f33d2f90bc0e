"""The time of a job, split into parts that add up: the one set of words for these parts. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from popdist.ground.progress import PhaseCounters
from poprun.observe.account.job_record import AttemptRecord, InstanceRecord

PARTS: Final = {
    "start": "start",
    "data": "data",
    "compute": "compute",
    "waiting": "waiting for the slowest",
    "communication": "communication",
    "checkpoint": "checkpoints",
    "restart": "restarts",
    "outside": "other code",
    "unknown": "not measured",
}
"""The parts of a job's time, in the order of the page, with their labels."""

_PART_OF: Final = {"forward": "compute", "backward": "compute", "optimizer": "compute"}
"""The part of each phase whose name is not the name of a part."""


def split_time(elapsed_seconds: float, counters: PhaseCounters, waiting_seconds: float = 0.0) -> dict[str, float]:
    """Return the seconds of each phase, with ``waiting_seconds``, the time spent waiting for the slowest instance.

    Time before the sampler's start counts as "start". In the backward pass of DistributedDataParallel a program
    waits in C++, so a backward pass without processor time counts as communication or waiting.
    """
    parts = dict(counters.seconds)
    parts["start"] += max(0.0, elapsed_seconds - sum(parts.values()))
    idle = min(counters.idle_backward_seconds, parts["backward"])
    parts["backward"] -= idle
    waiting = min(waiting_seconds, parts["communication"] + idle)
    parts["communication"] += idle - waiting
    return {**parts, "waiting": waiting}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """The elapsed time of a job, and how each instance spent this time."""

    elapsed_seconds: float
    instances: Sequence[Mapping[str, float]]  # of each the seconds by part, over all attempts

    @property
    def mean_seconds(self) -> dict[str, float]:
        """The mean time of an instance in each part that is not empty; the parts add up to the elapsed time."""
        means = {part: sum(it[part] for it in self.instances) / len(self.instances) for part in PARTS}
        return {part: seconds for part, seconds in means.items() if seconds > 0}

    @property
    def goodput(self) -> float | None:
        """The share of the elapsed time in which the instances computed; None if this share was not measured."""
        means = self.mean_seconds
        if not self.elapsed_seconds or "compute" not in means or means.get("unknown", 0.0) > means["compute"]:
            return None
        return means["compute"] / self.elapsed_seconds


def find_job_time(attempts: Sequence[AttemptRecord]) -> JobTime:
    """Return the time of a job, from its attempts, of which there is at least one."""
    times = [dict.fromkeys(PARTS, 0.0) for _ in attempts[0].instances]
    began = offsets(attempts)
    ended_seconds = 0.0
    for number, attempt in enumerate(attempts):
        for time, instance in zip(times, attempt.instances, strict=True):
            time["restart"] += max(0.0, began[number] - ended_seconds)
            for part, seconds in _parts(attempt, instance, "restart" if number else "start"):
                time[part] += max(0.0, seconds)
        ended_seconds = began[number] + attempt.duration_seconds
    return JobTime(elapsed_seconds=ended_seconds, instances=times)


def offsets(attempts: Sequence[AttemptRecord]) -> list[float]:
    """Return when each attempt began, in seconds after the beginning of the first attempt."""
    moments = [datetime.fromisoformat(attempt.started_at).timestamp() for attempt in attempts]
    return [moment - moments[0] for moment in moments]


def _parts(attempt: AttemptRecord, instance: InstanceRecord, start: str) -> Iterator[tuple[str, float]]:
    """Yield the parts of an instance's time in one attempt with their seconds; the first part is ``start``."""
    whole, before = attempt.duration_seconds, instance.began_seconds
    if before is None:  # the instance never ran
        yield start, whole
        return
    ran = instance.duration_seconds
    ran = whole - before if ran is None else min(ran, whole - before)
    phases = instance.phase_seconds
    measured = sum(phases.values())
    scale = min(1.0, ran / measured) if measured else 0.0  # what was measured until a moment later is cut
    for phase, seconds in phases.items():
        part = start if phase == "start" else _PART_OF.get(phase, phase)
        yield part if part in PARTS else "outside", seconds * scale
    yield "outside" if measured else "unknown", ran - measured * scale
    yield start, before
    yield "outside", whole - before - ran
