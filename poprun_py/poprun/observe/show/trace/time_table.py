"""The parts of the traced time on each instance, and the time that an ideal job would save. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

from rich.table import Table
from rich.text import Text

from poprun.errors import PlanError
from poprun.observe.account.arrivals import Arrivals, delay_of, last_of
from poprun.observe.account.evidence import Call, CallKey
from poprun.observe.show.report_rows import text_table
from poprun.observe.show.trace.recorded import COLLECTIVE_NAME, DATA_NAME, Slice
from poprun.plan.render.table import terminal_text
from poprun.text.fields import read_record
from poprun.text.input_files import parse_json
from poprun.text.ranges import counted
from poprun.text.screen import visible

TABLE_FILE: Final = "table.json"
VERSION: Final = 1
_MOST_OPERATIONS: Final = 10
_MOST_ROWS: Final = 32
_NANOSECONDS: Final = 1e9
_COLLECTIVE_KERNEL: Final = "nccl"

Spans = list[tuple[int, int]]  # from a begin to an end, by time, without overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTimes:
    """The seconds of one instance in each part of the traced time, and how late it called collectives."""

    index: int
    seconds: Mapping[Annotated[str, visible], float]  # by part, see ``PARTS``; together the length of the window
    num_last: int  # number of collectives that the instance called last
    delay_seconds: float  # how much later than the median of the others the instance called these, in the mean


PARTS: Final = ("data", "compute", "waiting", "communication", "outside")
"""The parts of an instance's time in a trace, by the names that `time_shares` uses.

A moment belongs to the first part that covers the moment: the loop waits for its DataLoader; an operation of torch
runs; a collective waits for an instance that has not called it; a collective runs; the rest.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The number of calls and the time of one torch operation, or GPU kernel, on all instances together."""

    name: Annotated[str, visible]
    num_calls: int
    seconds: float  # without the time of inner operations


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable:
    """The table of a trace: the time of all traced steps, by instance and by operation."""

    num_steps: int
    num_collectives: int
    instances: tuple[InstanceTimes, ...]
    operations: tuple[Operation, ...]  # the operations with the largest time


def read_table(text: str, source: str) -> TraceTable:
    """Return the table of a trace in ``text``, from the folder ``source``. Raises PlanError if it is damaged."""
    try:
        return read_record(TraceTable, parse_json(text), source, noun="a trace's table", version=VERSION)
    except ValueError as error:
        raise PlanError(f"{source}: its {TABLE_FILE} is damaged: {error}") from None


def where_time_went(
    index: int,
    window: tuple[int, int],
    thread: str,
    slices: Sequence[Slice],
    calls: Sequence[Call],
    joint_calls: Mapping[CallKey, Arrivals],
) -> InstanceTimes:
    """Return the seconds of the traced ``window`` that an instance spent in each part, such as waiting for others,
    measured by its GPU kernels if it has any, otherwise by the operations of its main thread.
    """
    kernels = [it for it in slices if it.category == "kernel"]
    if kernels:
        busy = _spans(it for it in kernels if _COLLECTIVE_KERNEL not in it.name.lower())
        communicating = _spans(it for it in kernels if _COLLECTIVE_KERNEL in it.name.lower())
    else:
        own_slices = [it for it in slices if it.row == thread and it.category == "cpu_op"]
        busy = _spans(it for it in own_slices if not it.name.startswith(COLLECTIVE_NAME))
        communicating = _spans(it for it in own_slices if it.name.startswith(COLLECTIVE_NAME))
    collectives = [*communicating, *((it.begin_ns, it.end_ns) for it in calls)]
    waiting = [
        (it.begin_ns, min(it.end_ns, int(arrivals[last_of(arrivals)])))
        for it in calls
        if (arrivals := joint_calls.get(it.key))
    ]
    data = _spans(it for it in slices if it.row == thread and it.name.startswith(DATA_NAME))
    covered: Spans = []
    ends = [0.0]  # the seconds that the first parts cover together
    for spans in (data, busy, waiting, collectives, [window]):
        covered = union((*covered, *spans))
        ends.append(seconds_within(covered, window))
    parts = (end - begin for begin, end in pairwise(ends))
    delays = [delay_of(index, it) for it in joint_calls.values() if last_of(it) == index]
    return InstanceTimes(
        index=index,
        seconds=dict(zip(PARTS, parts, strict=True)),
        num_last=len(delays),
        delay_seconds=sum(delays) / len(delays) / _NANOSECONDS if delays else 0.0,
    )


def add_own_times(slices: Sequence[Slice], num_calls: Counter[str], own_ns: Counter[str]) -> None:
    """Add each operation's calls to ``num_calls``, and its time without inner operations to ``own_ns``."""
    category = "kernel" if any(it.category == "kernel" for it in slices) else "cpu_op"
    around: list[Slice] = []
    for one in slices:
        if one.category != category:
            continue
        while around and (around[-1].row != one.row or around[-1].end_ns <= one.begin_ns):
            around.pop()
        num_calls[one.name] += 1
        own_ns[one.name] += one.end_ns - one.begin_ns
        if around:
            own_ns[around[-1].name] -= one.end_ns - one.begin_ns
        around.append(one)


def costliest(num_calls: Mapping[str, int], own_ns: Counter[str]) -> tuple[Operation, ...]:
    """Return the operations with the most own time, that is, without the time of operations inside them."""
    most = own_ns.most_common(_MOST_OPERATIONS)
    return tuple(Operation(name=name, num_calls=num_calls[name], seconds=ns / _NANOSECONDS) for name, ns in most)


def _spans(slices: Iterable[Slice]) -> list[tuple[int, int]]:
    return [(it.begin_ns, it.end_ns) for it in slices]


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the ``spans`` (begin, end) merged where they overlap or touch, in ascending order."""
    spans_of_union: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if spans_of_union and begin <= spans_of_union[-1][1]:
            spans_of_union[-1] = spans_of_union[-1][0], max(spans_of_union[-1][1], end)
        elif end > begin:
            spans_of_union.append((begin, end))
    return spans_of_union


def seconds_within(spans: Spans, window: tuple[int, int]) -> float:
    """Return how many seconds of ``window`` the periods ``spans`` cover."""
    lengths = (min(end, window[1]) - max(begin, window[0]) for begin, end in spans)
    return sum(length for length in lengths if length > 0) / _NANOSECONDS


def render_table(table: TraceTable, *, width: int, has_color: bool) -> str:
    """Return a trace's table as text: each instance's time per step, costliest operations, possible gains."""
    return terminal_text(*_parts(table), width=width, has_color=has_color)


def _parts(table: TraceTable) -> Iterator[Table | Text | str]:
    num_steps = max(1, table.num_steps)
    what = "of a step" if table.num_steps else "in all"
    yield Text(
        f"{counted(len(table.instances), 'instance')}, {counted(table.num_steps, 'step')}: milliseconds {what}"
    )
    rows = [
        {
            "instance": str(it.index),
            **{part: f"{it.seconds[part] * 1000 / num_steps:.1f}" for part in PARTS},
            "came last": f"{it.num_last} of {table.num_collectives}" if table.num_collectives else "",
            "by ms": f"{it.delay_seconds * 1000:.1f}" if it.num_last else "",
        }
        for it in table.instances[:_MOST_ROWS]
    ]
    yield text_table(rows)
    if num_left := len(table.instances) - len(rows):
        yield f"and {counted(num_left, 'more instance')}"
    compute = sum(it.seconds["compute"] for it in table.instances)
    if table.operations:
        yield ""
        yield Text("the operations that took most time, on all instances together")
        yield text_table(
            [
                {
                    "operation": it.name,
                    "calls": str(it.num_calls),
                    "ms": f"{it.seconds * 1000:.1f}",
                    "of compute": f"{it.seconds / compute:.0%}" if compute else "",
                }
                for it in table.operations
            ]
        )
    yield ""
    yield Text("an ideal job would need less time")
    for reason, share in gains(table).items():
        yield f"  {share:4.0%} less {reason}"


_GAINS: Final = {
    "if the instances shared the work evenly": "waiting",
    "if data were always there": "data",
    "if communication were hidden behind compute": "communication",
}
"""For each improvement of an ideal job, the part of the time that the job would save."""


def gains(table: TraceTable) -> dict[str, float]:
    """Return by improvement, such as hidden communication, the share of all instances' time that it would save."""
    seconds = {part: sum(it.seconds[part] for it in table.instances) for part in PARTS}
    whole = sum(seconds.values()) or 1.0
    return {reason: seconds[part] / whole for reason, part in _GAINS.items()}
