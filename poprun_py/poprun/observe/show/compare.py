"""The comparison of the reports of two jobs: what became slower, where, and how much more than noise. Pure.

The noise is a property of the runs. The steps of each run are cut into parts of equal length, and two runs of
one program may differ as much as these parts differ. The time that instances waited for a core is subtracted
first, because the machine causes this time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import isfinite
from statistics import fmean, median
from typing import Final

from popdist.errors import name_instances
from poprun.errors import UsageError
from poprun.observe.account.job_record import AttemptRecord, Curve, InstanceRecord, JobRecord
from poprun.text.ranges import counted, describe_bytes, describe_seconds
from poprun.text.screen import visible

NUM_PARTS: Final = 6
LEAST_CHANGE: Final = 0.04
"""The smallest change of a step's time that counts: two runs of one program differ by nearly as much."""

LEAST_MEMORY_CHANGE: Final = 0.05
LEAST_MEMORY_BYTES: Final = 32 * 2**20

_MOST_NOISE: Final = 0.1  # with more noise, a difference that is not seen is not known
_LEAST_PART: Final = 0.25  # of a difference, for an instance and phase to be named
_RATES: Final = {"steps_per_second": "a step", "samples_per_second": "a sample"}
_RUN_DELAY: Final = "run_delay"  # the share of its time in which an instance waited for a core
_COMMUNICATION: Final = "communication"
_NOT_OWN: Final = ("start", "waiting", _COMMUNICATION)  # phases in which an instance does no work of a step's


class Change(StrEnum):
    """The ways in which a number, such as the time of a step, can differ between two reports."""

    NONE = "no difference"
    SLOWER = "slower"
    FASTER = "faster"
    MORE = "more"
    LESS = "less"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number, such as the time of a step, in two reports, and how it changed."""

    figure: str
    before: str  # the value in the first report, with its unit
    after: str
    change: Change
    share: float = 0.0  # by how much the second figure is larger: 0.1 for a tenth
    noise: float = 0.0  # the share by which two runs of one program may differ
    notes: tuple[str, ...] = ()  # where the difference comes from, or why there is no difference

    @property
    def is_known(self) -> bool:
        """Whether the two reports differ in this number by more than noise."""
        return self.change not in (Change.NONE, Change.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All compared numbers of two reports, and warnings if the jobs are hard to compare."""

    warnings: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def is_worse(self) -> bool:
        """Whether the second job is slower, or takes more memory, than the first job."""
        return any(it.change in (Change.SLOWER, Change.MORE) for it in self.differences)


def compare(before: JobRecord, after: JobRecord) -> Comparison:
    """Return the comparison of the last attempts of two jobs. Raises UsageError if a job never ran."""
    for name, job in (("first", before), ("second", after)):
        if not job.attempts:
            raise UsageError(f"the job of the {name} report never ran: {job.error}")
    first, second = before.attempts[-1], after.attempts[-1]
    differences = (_speed_difference(first, second), *_memory_difference(first, second))
    return Comparison(warnings=tuple(_warnings(before, after)), differences=differences)


def _warnings(before: JobRecord, after: JobRecord) -> Iterator[str]:
    """Yield reasons why two jobs may not be comparable, such as different programs or sizes."""
    first, second = before.plan, after.plan
    if first is not None and second is not None:
        if first.program != second.program:
            programs = " and ".join(visible(" ".join(plan.program)) for plan in (first, second))
            yield f"these are reports of two different programs: {programs}"
        sizes = [
            f"{counted(plan.num_instances, 'instance')} on {counted(len(plan.hosts), 'host')}"
            for plan in (first, second)
        ]
        if sizes[0] != sizes[1]:
            yield f"these jobs are not of one size: {' and '.join(sizes)}"
    for name, job in (("first", before), ("second", after)):
        if job.exit_code:
            yield f"the {name} job did not end well: exit code {job.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    """The seconds of a step, or of a sample, in each part of an attempt."""

    parts: Sequence[float]  # the mean seconds of a step, in each part of the attempt
    delay: float | None  # seconds in which all instances together waited for a core, per step; None if not known

    @property
    def seconds(self) -> float:
        return fmean(self.parts)

    @property
    def noise(self) -> float:
        """The relative noise: half the difference of the slowest and the fastest part, divided by the mean."""
        return (max(self.parts) - min(self.parts)) / 2 / self.seconds


def _speed_difference(before: AttemptRecord, after: AttemptRecord) -> Difference:
    """Return the change of a step's time between two attempts, without the change of waits for a processor."""
    speeds = _speeds(before, after)
    if speeds is None:
        return Difference(
            figure="the whole run",
            before=describe_seconds(before.duration_seconds),
            after=describe_seconds(after.duration_seconds),
            change=Change.UNKNOWN,
            notes=("a run with steps for less than about ten seconds does not tell its noise",),
        )
    figure, first, second = speeds
    longer = second.seconds - first.seconds
    waited = 0.0 if first.delay is None or second.delay is None else second.delay - first.delay
    of_machine = max(0.0, min(waited, longer)) if longer > 0 else min(0.0, max(waited, longer))
    own_change, noise = (longer - of_machine) / first.seconds, max(first.noise + second.noise, LEAST_CHANGE)
    is_none = abs(own_change) <= noise
    notes = () if is_none else tuple(_places(before, after, longer))
    if is_none and abs(longer) / first.seconds > noise:
        than = "longer" if waited > 0 else "less long"
        notes = (f"all instances together waited {_length(abs(waited))} a step {than} for a core",)
    change = Change.NONE if is_none else Change.SLOWER if own_change > 0 else Change.FASTER
    if is_none and noise > _MOST_NOISE:
        change = Change.UNKNOWN
        notes = (f"the runs vary by {noise:.0%}, so that a smaller difference cannot be seen", *notes)
    return Difference(
        figure=figure,
        before=_length(first.seconds),
        after=_length(second.seconds),
        change=change,
        share=longer / first.seconds,
        noise=noise,
        notes=notes,
    )


def _length(seconds: float, form: str = ".4g") -> str:
    """Return ``seconds`` as text: in seconds from one second on, otherwise in milliseconds."""
    return f"{seconds:{form}} s" if abs(seconds) >= 1 else f"{seconds * 1000:{form}} ms"


def _speeds(before: AttemptRecord, after: AttemptRecord) -> tuple[str, _Speed, _Speed] | None:
    """Return which number both attempts measured, such as the time of a step, and its values; None if none."""
    for name, figure in _RATES.items():
        first, second = _speed_of(before, name), _speed_of(after, name)
        if first is not None and second is not None:
            return figure, first, second
    return None


def _speed_of(attempt: AttemptRecord, name: str) -> _Speed | None:
    """Return the time of a step in each part of an attempt, from its curves ``name``; None if too short."""
    windows = _training_windows(attempt.curves_of(name))
    ends = [len(windows) * number // NUM_PARTS for number in range(NUM_PARTS + 1)]
    rates = [fmean(rate for _, rate in windows[start:end]) for start, end in pairwise(ends) if start < end]
    if len(rates) < NUM_PARTS or not all(rates):
        return None
    parts = [1 / rate for rate in rates]
    waited = [
        value
        for curve in attempt.curves_of(_RUN_DELAY)
        for at_seconds, value in zip(curve.seconds, curve.middle, strict=False)
        if value is not None and windows[0][0] <= at_seconds <= windows[-1][0]
    ]
    delay = fmean(waited) * len(attempt.instances) * fmean(parts) if waited else None
    return _Speed(parts=parts, delay=delay)


def _training_windows(curves: Sequence[Curve]) -> Sequence[tuple[float, float]]:
    """Return the end and the median rate of steps of each window of ``curves`` between the first and the last
    window in which the job made steps.
    """
    if not curves:
        return ()
    rows = zip(*(it.middle for it in curves), strict=False)
    known_rates = [[rate for rate in row if rate is not None and isfinite(rate)] for row in rows]
    windows = [(end, median(rates)) for end, rates in zip(curves[0].seconds, known_rates, strict=False) if rates]
    busy = [index for index, (_, rate) in enumerate(windows) if rate > 0]
    return windows[busy[0] + 1 : busy[-1]] if busy else ()


def _places(before: AttemptRecord, after: AttemptRecord, longer: float) -> Iterator[str]:
    """Yield texts on which phases of which instances made a step ``longer`` by so many seconds."""
    first = {it.index: _step_phases(it) for it in before.instances}
    changes = {
        it.index: {phase: seconds - first[it.index].get(phase, 0.0) for phase, seconds in _step_phases(it).items()}
        for it in after.instances
        if it.index in first
    }
    hosts = {it.index: it.host for it in after.instances}
    phases = dict.fromkeys(phase for by_phase in changes.values() for phase in by_phase)
    late_by_phase = {
        phase: [index for index, by_phase in changes.items() if by_phase.get(phase, 0.0) / longer >= _LEAST_PART]
        for phase in phases
    }
    own_phases = [phase for phase in phases if late_by_phase[phase] and phase not in _NOT_OWN]
    for phase in own_phases or ([_COMMUNICATION] if late_by_phase.get(_COMMUNICATION) else []):
        change = median(changes[index][phase] for index in late_by_phase[phase])
        where = " over the network" if phase == _COMMUNICATION and len(set(hosts.values())) > 1 else ""
        yield f"{_who(late_by_phase[phase], hosts)}, in {phase}{where}: {_length(change, '+.3g')} a step"


def _who(indices: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return a text for ``indices``: all instances, a host if exactly its instances are meant, or numbers."""
    their_hosts = {hosts[index] for index in indices}
    if len(indices) == len(hosts):
        return "all instances"
    if len(their_hosts) == 1 and len(indices) == sum(host in their_hosts for host in hosts.values()):
        return f"host {their_hosts.pop()}"
    return name_instances(indices)


def _step_phases(instance: InstanceRecord) -> dict[str, float]:
    """Return the seconds that an instance spends in each phase of a step."""
    return {phase: seconds / (instance.num_steps or 1) for phase, seconds in instance.phase_seconds.items()}


def _memory_difference(before: AttemptRecord, after: AttemptRecord) -> Iterator[Difference]:
    """Yield the difference between the peak memory of two attempts, if both peaks are known."""
    (first, _), (second, index) = _fullest(before), _fullest(after)
    if not first or not second:
        return
    share = second / first - 1
    is_none = abs(share) <= LEAST_MEMORY_CHANGE or abs(second - first) <= LEAST_MEMORY_BYTES
    yield Difference(
        figure="most memory",
        before=describe_bytes(first),
        after=describe_bytes(second),
        change=Change.NONE if is_none else Change.MORE if share > 0 else Change.LESS,
        share=share,
        noise=LEAST_MEMORY_CHANGE,
        notes=() if is_none else (f"of instance {index}",),
    )


def _fullest(attempt: AttemptRecord) -> tuple[int, int]:
    """Return the largest peak memory of any instance in an attempt, and the index of this instance."""
    return max(((it.peak_memory_bytes or 0, it.index) for it in attempt.instances), default=(0, 0))
