"""The record of a job, whose dataclasses define the keys of a report's JSON. Pure.

Other keys are ignored, so that the report of a later poprun can be read. A missing key has a default. Control
codes in texts are made visible when a report is read, because programs wrote some of the texts.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from poprun.errors import PlanError, UsageError
from poprun.launch.messages.clock import ClockFit
from poprun.observe.account.evidence import InstanceEvidence
from poprun.observe.account.field_types import Count, Index, Seconds, Text
from poprun.observe.account.judgements import Slowness, Verdict
from poprun.plan.plan import LaunchPlan
from poprun.text import IF_USED
from poprun.text.fields import read_record
from poprun.text.input_files import parse_json

VERSION: Final = 1
"""The version of the format of a job's report."""

MOST_BYTES: Final = 100 * 10**6
_MILLISECONDS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A measured quantity over the time of an attempt: its mean in each of several equal windows."""

    unit: Text = ""
    seconds: tuple[Seconds, ...]  # the end of each window, since the attempt began
    values: tuple[float | None, ...] | None = field(default=None, metadata=IF_USED)
    # the last value; ``nan``, ``inf`` and ``-inf``, which JSON lacks, are texts
    last: Any = field(default=None, metadata=IF_USED)
    # the curve of a large job has these three instead of the values
    min: tuple[float | None, ...] | None = field(default=None, metadata=IF_USED)
    median: tuple[float | None, ...] | None = field(default=None, metadata=IF_USED)
    max: tuple[float | None, ...] | None = field(default=None, metadata=IF_USED)

    @property
    def middle(self) -> tuple[float | None, ...]:
        """The values of one instance's curve, or the medians over the instances in a curve of many instances."""
        return self.values or self.median or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """The entry of one instance in a job's report, for one attempt. The fields are the keys in JSON."""

    index: Index
    host: Text
    replicas: Text = ""
    place: Mapping[Text, int] | None = field(default=None, metadata=IF_USED)  # in a shared replica
    ipus: Text = ""
    devices: tuple[Text, ...] = ()
    exit_code: int | None = None
    signal: Text = ""
    was_stopped: bool = False
    problem: Text = ""
    hint: Text = ""
    excerpt: tuple[Text, ...] = ()
    began_seconds: Seconds | None = None
    duration_seconds: Seconds | None = None
    peak_memory_bytes: Count | None = None
    memory: tuple[tuple[float, ...], ...] = ()  # pairs of seconds and bytes
    num_steps: Count | None = None
    last_lines: tuple[Text, ...] = ()
    curves: Mapping[Text, Curve] = field(default_factory=dict)
    phase_seconds: Mapping[Text, Seconds] = field(default_factory=dict)
    evidence: InstanceEvidence | None = None

    def describe_end(self, *, is_over: bool = True) -> str:
        """Return how the instance ended, in words; ``is_over`` says whether its attempt has ended."""
        if self.problem:
            return self.problem
        if self.exit_code is None:
            ran = "not seen" if is_over else "runs"
            return "never ran" if self.began_seconds is None else ran
        end = self.signal or (f"exit code {self.exit_code}" if self.exit_code else "well")
        return f"{end}, ended by poprun" if self.was_stopped else end


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """The entry of one attempt (one start of all instances) in a job's report. The fields are the keys in JSON."""

    started_at: Text
    duration_seconds: Seconds
    exit_code: int | None
    is_over: bool = True
    ended_at: Text | None = None
    stop_reason: Text = ""
    first_failure: Index | None = None
    launcher_exit_code: int | None = None
    launcher_excerpt: tuple[Text, ...] = ()
    survivors: tuple[Count, ...] = ()
    printed: tuple[Text, ...] = ()  # the lines that poprun printed at the end of the attempt
    verdict: Verdict | None = None
    warnings: tuple[Text, ...] = ()
    slowdowns: tuple[Slowness, ...] = ()
    clocks: Mapping[Text, ClockFit] = field(default_factory=dict)
    instances: tuple[InstanceRecord, ...]
    curves: Mapping[Text, Curve] = field(default_factory=dict)  # of a job with many instances

    def curves_of(self, name: str) -> list[Curve]:
        """Return each instance's curve ``name``; in a large job, the one curve that stands for all instances."""
        curves = [it.curves[name] for it in self.instances if name in it.curves]
        return curves or ([self.curves[name]] if name in self.curves else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The devices of one host that a job had leased, as a report contains them."""

    host: Text
    held: tuple[Text, ...]
    partition: Text | None
    pool: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The whole report of a job: its plan, its leased devices and all attempts."""

    poprun_version: Text
    job_id: Text
    is_over: bool = True
    written_at: Text = ""
    exit_code: int | None
    error: Text
    plan: LaunchPlan | None
    leases: tuple[LeaseRecord, ...] = ()
    attempts: tuple[AttemptRecord, ...]
    provenance: Mapping[Text, Text] = field(default_factory=dict)


def utc(epoch_seconds: float) -> str:
    """Return the time ``epoch_seconds``, in seconds since 1970, as ISO 8601 text in UTC, with milliseconds."""
    milliseconds = round(epoch_seconds * _MILLISECONDS)
    whole, rest = divmod(milliseconds, _MILLISECONDS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:03}Z"


def read_report(text: str, source: str) -> JobRecord:
    """Return the report in the JSON ``text`` of the file ``source``. Raise UsageError if it is no valid report."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UsageError(
            f"{source} is damaged, or no report in JSON ({error}): poprun --report FILE.json writes one"
        ) from None
    if not isinstance(values, dict) or not {"version", "poprun_version", "attempts"} <= values.keys():
        raise UsageError(f"{source} is no report of a job: poprun --report FILE.json writes one")
    try:
        return read_record(JobRecord, values, source, noun="a report", version=VERSION, is_part=True)
    except PlanError as error:
        raise UsageError(str(error)) from None
