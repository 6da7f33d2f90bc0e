"""The division of a job's time into parts that add up, such as compute and communication. Pure."""

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
"""The parts of a job's time in the order of the report, each with its label."""

_PART_OF: Final = {"forward": "compute", "backward": "compute", "optimizer": "compute"}
"""For each phase of a program whose name is not the name of a part of time, the part."""


def split_time(elapsed_seconds: float, counters: PhaseCounters, waiting_seconds: float = 0.0) -> dict[str, float]:
    """Return a program's seconds in each phase; ``waiting_seconds`` of communication count as waiting instead.

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
    """The elapsed time of a job, and the time of each instance divided into parts."""

    elapsed_seconds: float
    instances: Sequence[Mapping[str, float]]  # of each the seconds by part, over all attempts

    @property
    def mean_seconds(self) -> dict[str, float]:
        """The mean seconds of an instance in each part of the job's time; their sum is the elapsed time."""
        means = {part: sum(it[part] for it in self.instances) / len(self.instances) for part in PARTS}
        return {part: seconds for part, seconds in means.items() if seconds > 0}

    @property
    def goodput(self) -> float | None:
        """The share of the elapsed time in which the instances computed; None if it was not measured."""
        means = self.mean_seconds
        if not self.elapsed_seconds or "compute" not in means or means.get("unknown", 0.0) > means["compute"]:
            return None
        return means["compute"] / self.elapsed_seconds


def find_job_time(attempts: Sequence[AttemptRecord]) -> JobTime:
    """Return the elapsed time of a job over all ``attempts``, and the seconds of this time that each instance
    spent in each of the ``PARTS``, such as data, compute and communication.
    """
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
    """Return the seconds at which each attempt began, counted from the beginning of the first attempt."""
    moments = [datetime.fromisoformat(attempt.started_at).timestamp() for attempt in attempts]
    return [moment - moments[0] for moment in moments]


def _parts(attempt: AttemptRecord, instance: InstanceRecord, start: str) -> Iterator[tuple[str, float]]:
    """Yield name and seconds of each part of an instance's time; the time before it ran counts as ``start``."""
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
