"""A report of a job that poprun wrote as JSON, read back: the values of it that are shown and compared. Pure.

Keys that are not read here are passed over, so that a report may have more of them. Texts are made fit for a
terminal as they are read: programs wrote some of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from poprun.errors import PlanError, UsageError
from poprun.text.fields import between, read_record
from poprun.text.input_files import parse_json
from poprun.text.ranges import Hosts
from poprun.text.screen import visible

VERSION: Final = 1
"""Of the file that a report is written as."""

MOST_BYTES: Final = 100 * 10**6

Text = Annotated[str, visible]
Index = Annotated[int, between(0, 10**6)]
Count = Annotated[int, between(0, 2**63)]
Seconds = Annotated[float, between(0.0, 1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A value in the course of an attempt, as its mean over windows of equal length."""

    seconds: tuple[Seconds, ...]  # the end of each window, since the attempt began
    values: tuple[float | None, ...] = ()  # None where it is not known
    median: tuple[float | None, ...] = ()  # in place of the values, where a curve stands for many instances

    @property
    def middle(self) -> tuple[float | None, ...]:
        """The values, or the medians over instances."""
        return self.values or self.median


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """One instance in one attempt."""

    index: Index
    host: Text
    replicas: Text = ""
    exit_code: int | None = None
    signal: Text = ""
    was_stopped: bool = False
    problem: Text = ""
    duration_seconds: Seconds | None = None
    num_steps: Count | None = None
    peak_memory_bytes: Count | None = None
    phase_seconds: Mapping[Text, Seconds] = field(default_factory=dict)
    curves: Mapping[Text, Curve] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReport:
    """Who is at fault for the end of an attempt."""

    cause: Text
    culprits: tuple[Index, ...] = ()
    places: Mapping[int, Text] = field(default_factory=dict)
    since: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownReport:
    """Who was slow, and why."""

    text: Text
    instance: Index | None = None  # None where the network was


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One attempt of a job."""

    started_at: Text
    duration_seconds: Seconds
    exit_code: int | None
    is_over: bool = True
    stop_reason: Text = ""
    printed: tuple[Text, ...] = ()  # what poprun has printed of its end
    first_failure: Index | None = None
    verdict: VerdictReport | None = None
    instances: tuple[InstanceReport, ...]
    slowdowns: tuple[SlowdownReport, ...] = ()
    warnings: tuple[Text, ...] = ()
    curves: Mapping[Text, Curve] = field(default_factory=dict)  # of a job with many instances

    def curves_of(self, name: str) -> list[Curve]:
        """The curve of each instance that has it; of a job with many, the one that stands for all."""
        own = [it.curves[name] for it in self.instances if name in it.curves]
        return own or ([self.curves[name]] if name in self.curves else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What was to run."""

    program: tuple[Text, ...]
    hosts: Hosts
    num_instances: Count
    num_replicas: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A whole job."""

    poprun_version: Text
    job_id: Text
    exit_code: int | None
    is_over: bool = True
    error: Text
    plan: PlanReport | None
    attempts: tuple[AttemptReport, ...]


def read_report(text: str, source: str) -> JobReport:
    """The report in ``text``, of the file ``source``; an error says what is wrong with it, and where."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UsageError(
            f"{source} is damaged, or no report in JSON ({error}): poprun --report FILE.json writes one"
        ) from None
    if not isinstance(values, dict) or not {"version", "poprun_version", "attempts"} <= values.keys():
        raise UsageError(f"{source} is no report of a job: poprun --report FILE.json writes one")
    try:
        return read_record(JobReport, values, source, noun="a report", version=VERSION, is_part=True)
    except PlanError as error:
        raise UsageError(str(error)) from None
