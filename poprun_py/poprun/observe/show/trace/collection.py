"""The collection of the recordings that programs made in an attempt, and their merging into one trace.

A program is left out if it was killed, its recording is damaged, or its clock was never compared.
"""

import errno
import gzip
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from popdist.errors import name_instances
from popdist.ground.trusted_paths import opened_own_folder
from poprun.errors import UsageError
from poprun.launch.messages.clock import Exchange, fit_clock
from poprun.observe.account.evidence import Call
from poprun.observe.show.trace.document import instance_events, joint_events, write_document
from poprun.observe.show.trace.joint_calls import find_joint_calls, with_ends
from poprun.observe.show.trace.recorded import About, Recorded, read_about, read_recorded
from poprun.observe.show.trace.time_table import (
    TABLE_FILE,
    VERSION,
    InstanceTimes,
    TraceTable,
    add_own_times,
    costliest,
    where_time_went,
)
from poprun.plan.plan import LaunchPlan
from poprun.plan.program_environment import check_folder_name
from poprun.text.atomic_file import write_whole
from poprun.text.fields import write_record
from poprun.text.ranges import describe_bytes

TRACE_FILE: Final = "trace.json.gz"
_METHOD: Final = "the closest of several answers of the agent, before and after; between hosts every second"
_COMPRESSION: Final = 5
_MOST_WARNINGS: Final = 4
_SECOND: Final = 1_000_000_000
_MUCH_BYTES: Final = 200 * 10**6  # which takes ten seconds or so to merge
_NUM_BEFORE: Final = 3
_UNKNOWN_DRIFT: Final = 1e-4  # more than the clocks of computers differ in speed

Rounds = Mapping[str, Sequence[Exchange]]


@dataclass(frozen=True, slots=True)
class InstanceClock:
    """The conversion of an instance's times to poprun's clock, and how exact the conversion is."""

    to_ours: Callable[[int], int]
    offset_seconds: float  # lead of the program's clock when the traced window began
    drift: float
    uncertainty_seconds: float


def prepare_folder(plan: LaunchPlan, job_id: str, restart_count: int) -> None:
    """Make the folder in which an attempt's programs write their recordings. Raise UsageError if that fails."""
    check_folder_name("--trace", job_id)
    parts = plan.trace_parts(job_id, restart_count)
    try:
        with (
            opened_own_folder(os.path.dirname(parts), makes=True, may_be_for_all=True),
            opened_own_folder(parts, makes=True),
        ):
            return
    except OSError as error:
        raise UsageError(f"--trace {plan.trace.folder} cannot be written: {error.strerror}") from None


def collect_trace(
    plan: LaunchPlan,
    job_id: str,
    restart_count: int,
    rounds: Rounds | None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """Merge all programs' recordings of an attempt into a trace; yield the lines to print about it.

    ``rounds`` are the exchanges with the clocks of other hosts, or None if the attempt started no program.
    ``is_stopped`` returns whether the user has ended the merging.
    """
    parts = plan.trace_parts(job_id, restart_count)
    folder = os.path.dirname(parts)
    if rounds is None:
        shutil.rmtree(parts, ignore_errors=True)
        return
    merging = Merging(plan, parts, rounds, is_stopped)
    try:
        if (num_bytes := _size_of(parts)) >= _MUCH_BYTES:
            yield f"merges {describe_bytes(num_bytes)} of traces; Ctrl-C ends that"
        table = merging.write(folder)
    except OSError as error:
        yield f"warning: the trace cannot be written to {folder}: {error.strerror}"
        yield f"  what was recorded is in {parts}"
        return
    if not merging.is_damaged:
        shutil.rmtree(parts, ignore_errors=True)
    for problem, instances in [*merging.problems.items()][:_MOST_WARNINGS]:
        yield f"warning: trace of {name_instances(instances)}: {problem}"
    if table is not None:
        who = name_instances([it.index for it in table.instances])
        yield f"trace of {who}: {os.path.join(folder, TRACE_FILE)}"
        yield f"  open it at ui.perfetto.dev; in short: poprun-report trace {folder}"


def _size_of(folder: str) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)


def clock_of(about: About, rounds: Sequence[Exchange] | None) -> InstanceClock | None:
    """Return the conversion of a program's times to poprun's clock; None if the two clocks were not compared."""
    if not about.exchanges or (rounds is not None and not rounds):
        return None
    own_fit = fit_clock(about.exchanges)
    if rounds is None:
        uncertainty = own_fit.uncertainty_seconds
        return InstanceClock(own_fit.to_theirs, -own_fit.offset_at(about.begun_ns), -own_fit.drift, uncertainty)
    begun_ns, ended_ns = own_fit.to_theirs(about.begun_ns), own_fit.to_theirs(about.ended_ns)
    ended_ns = max(begun_ns, ended_ns)  # a clock that was set back in between
    after = next((number for number, it in enumerate(rounds) if it.answered_ns > ended_ns), len(rounds))
    before = next((number for number, it in enumerate(rounds) if it.answered_ns >= begun_ns), len(rounds))
    near = rounds[max(0, before - _NUM_BEFORE) : after + 1]
    host = fit_clock(near)
    outside_ns = max(0, near[0].answered_ns - begun_ns, ended_ns - near[-1].answered_ns)
    drift_outside = outside_ns / _SECOND * (host.drift_uncertainty or _UNKNOWN_DRIFT)
    return InstanceClock(
        lambda at_ns: host.to_ours(own_fit.to_theirs(at_ns)),
        (about.begun_ns - host.to_ours(begun_ns)) / _SECOND,
        host.drift - own_fit.drift,
        own_fit.uncertainty_seconds + host.uncertainty_seconds + drift_outside,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One instance's recording without its events: its description, its clock, and its collectives."""

    about: About
    clock: InstanceClock
    calls: list[Call]  # the collectives that the instance has called, by poprun's clock


class Merging:
    """The merging of all instances' recordings of an attempt into one trace file."""

    def __init__(self, plan: LaunchPlan, parts: str, rounds: Rounds, is_stopped: Callable[[], bool]) -> None:
        self._plan = plan
        self._parts = parts
        self._is_stopped = is_stopped
        self.problems: dict[str, list[int]] = defaultdict(list)  # instances by the text of their problem
        self.is_damaged = False  # whether a recording cannot be read
        traced = {index: self._read_traced(index, rounds) for index in range(plan.num_instances)}
        self._traced = {index: it for index, it in traced.items() if it is not None}
        self._joint = find_joint_calls({index: it.calls for index, it in self._traced.items()})
        begins_ns = (it.clock.to_ours(it.about.begun_ns) for it in self._traced.values())
        self._origin_ns = min(begins_ns, default=0)
        self._times: list[InstanceTimes] = []
        self._num_calls: Counter[str] = Counter()
        self._own_ns: Counter[str] = Counter()

    def _read_traced(self, index: int, rounds: Rounds) -> Traced | None:
        about = self._read_about(index)
        if about is None or not about.begun_ns:
            return None
        clock = clock_of(about, rounds.get(self._plan.instance(index).host))
        if clock is None:
            self.problems["its clock could not be compared with poprun's"].append(index)
            return None
        to_ours = clock.to_ours
        calls = [
            replace(it, begin_ns=to_ours(it.begin_ns), end_ns=it.end_ns and to_ours(it.end_ns))
            for it in about.calls
        ]
        return Traced(about=about, clock=clock, calls=calls)

    def _read_about(self, index: int) -> About | None:
        try:
            about = read_about(self._read(index, "about"))
        except OSError:
            is_far = len(self._plan.hosts) > 1
            why = ", or its host does not share the folder" if is_far else ""
            self.problems[f"there is none: its program was killed, or was no Python{why}"].append(index)
            return None
        except ValueError as error:
            self._note_damage(index, error)
            return None
        if about.problem:
            self.problems[about.problem].append(index)
        return about

    def _read(self, index: int, ending: str) -> str:
        with open(os.path.join(self._parts, f"instance-{index}.{ending}"), encoding="utf-8") as file:
            return file.read()

    def _note_damage(self, index: int, error: Exception) -> None:
        self.is_damaged = True
        self.problems[f"it cannot be read: {error}; it stays in {self._parts}"].append(index)

    def write(self, folder: str) -> TraceTable | None:
        """Write the trace and its table of times to ``folder``; return the table, None if nothing was recorded."""
        if not self._traced:
            return None
        file = os.path.join(self._parts, TRACE_FILE)
        with gzip.open(file, "wt", _COMPRESSION, encoding="utf-8") as stream:
            stream.writelines(write_document(self._describe(), self._events()))
        if not self._times:
            return None
        os.replace(file, os.path.join(folder, TRACE_FILE))
        table = self._table()
        write_whole(os.path.join(folder, TABLE_FILE), json.dumps(write_record(table, version=VERSION)))
        return table

    def _describe(self) -> dict[str, object]:
        """Return the trace file's description: each instance's host, clock offset and the offset's uncertainty."""
        clocks = {
            index: {
                "host": self._plan.instance(index).host,
                "offset_seconds": it.clock.offset_seconds,
                "drift": it.clock.drift,
                "uncertainty_seconds": it.clock.uncertainty_seconds,
            }
            for index, it in self._traced.items()
        }
        return {"version": VERSION, "clock": _METHOD, "zero_epoch_ns": self._origin_ns, "instances": clocks}

    def _events(self) -> Iterator[Mapping[str, object]]:
        """Yield the trace's events, one instance after the other, because all events may not fit in memory."""
        calls = {}
        for index, traced in self._traced.items():
            try:
                recorded = self._read_recorded(index, traced)
            except (OSError, ValueError) as error:
                self._note_damage(index, error)
                continue
            calls[index] = with_ends(traced.calls, recorded.slices)
            self._add_times(index, traced, recorded, calls[index])
            title = f"instance {index} ({self._plan.instance(index).host}, process {traced.about.pid})"
            thread = traced.about.thread
            for event in instance_events(index, title, recorded, thread, calls[index], self._origin_ns):
                if self._is_stopped():
                    raise InterruptedError(errno.EINTR, "it was interrupted")
                yield event
        yield from joint_events(self._joint, calls, self._origin_ns)

    def _read_recorded(self, index: int, traced: Traced) -> Recorded:
        profile, workers = self._read(index, "json"), ""
        with suppress(FileNotFoundError):  # a program without workers of loaders
            workers = self._read(index, "workers")
        return read_recorded(profile, workers, traced.about.thread, traced.clock.to_ours)

    def _add_times(self, index: int, traced: Traced, recorded: Recorded, calls: Sequence[Call]) -> None:
        about, to_ours = traced.about, traced.clock.to_ours
        window = to_ours(about.begun_ns), to_ours(about.ended_ns)
        self._times.append(where_time_went(index, window, about.thread, recorded.slices, calls, self._joint))
        add_own_times(recorded.slices, self._num_calls, self._own_ns)

    def _table(self) -> TraceTable:
        abouts = [it.about for it in self._traced.values()]
        return TraceTable(
            num_steps=max(about.num_steps - about.first_step for about in abouts),
            num_collectives=len(self._joint),
            instances=tuple(self._times),
            operations=costliest(self._num_calls, self._own_ns),
        )
