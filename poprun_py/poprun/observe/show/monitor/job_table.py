"""The table that the live view of a job draws: state, speed, memory and last output of each instance. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

from poprun.launch.messages.view import InstanceView, JobView
from poprun.text.ranges import counted, describe_bytes, describe_rate, describe_seconds
from poprun.text.screen import visible, without_codes

_LINES_AROUND: Final = 7
_LINES_OF_SLOW: Final = 2
_INSTANCE: Final = "instance"
_HOST: Final = "host"
_STATE: Final = "state"
_LAST_LINE: Final = "last line"
_PLACES: Final = ("replica", "stage", "shard", "part")
_HEADINGS: Final = (_INSTANCE, *_PLACES, _HOST, _STATE, "step", "steps/s", "loss", "CPU", "memory", _LAST_LINE)
_ALWAYS: Final = frozenset({_INSTANCE, _HOST, _STATE, _LAST_LINE})
_FIRST_TO_GO: Final = (_LAST_LINE, _STATE, "CPU", "memory", _HOST, "loss", "steps/s", *_PLACES, "step")
"""The order in which columns are left out if the terminal is narrow. Of the column with the state, at first only
the words after a colon are left out."""

_WIDEST: Final = 32
_LEAST_OF_LAST_LINE: Final = 16
_GAP, _EDGES = 3, 2  # columns between two cells, and around a row
Row = dict[str, Text]  # a row of the table: its cells by heading
_WELL: Final = frozenset({"running", "ended"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The speed of an instance: its steps per second, and how many processors it keeps busy."""

    steps_per_second: float | None = None  # optimizer steps, or reported steps; None if not known
    # processors that the processes keep busy, 1.0 for one processor; None if not known
    cpu_share: float | None = None


def rates(before: JobView | None, after: JobView) -> list[Rate]:
    """Return each instance's speed between two states of a job; unknown without ``before``, or over a restart."""
    if before is None or before.restart_count != after.restart_count:
        return [Rate()] * len(after.instances)
    return [_rate(old, new) for old, new in zip(before.instances, after.instances, strict=True)]


def _rate(before: InstanceView, after: InstanceView) -> Rate:
    """Return the speed of one instance from two of its states; unknown if a state has no measurement."""
    if before.looked_at_seconds is None or after.looked_at_seconds is None:
        return Rate()
    seconds = after.looked_at_seconds - before.looked_at_seconds
    num_steps = _steps(after) - _steps(before)
    cpu_seconds = (after.cpu_seconds or 0.0) - (before.cpu_seconds or 0.0)
    if seconds <= 0 or num_steps < 0 or cpu_seconds < 0:
        return Rate()
    return Rate(steps_per_second=num_steps / seconds if _steps(after) else None, cpu_share=cpu_seconds / seconds)


def _steps(view: InstanceView) -> int:
    return view.num_steps or view.step or 0


def render(job: JobView, speeds: Sequence[Rate], height: int, width: int) -> Group:
    """Return the drawing of a job in ``height`` lines of ``width``: a title, and rows of instances that fit."""
    words = wrap(visible(job.slow), width, max_lines=_LINES_OF_SLOW, placeholder=" …")
    slow = [Text(fit(line, width), style="yellow") for line in words]
    shown = _most_telling(job, max(1, height - _LINES_AROUND - len(slow)))
    places = [job.parallelism.place_of(index) for index in shown]
    rows = [_cells(job.instances[index], speeds[index], place) for index, place in zip(shown, places, strict=True)]
    kept = [heading for heading in _HEADINGS if heading in _ALWAYS or any(row[heading].plain for row in rows)]
    if len({instance.host for instance in job.instances}) == 1:
        kept.remove(_HOST)
    kept = _narrow(kept, rows, width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=_LAST_LINE in kept)
    for heading in kept:
        _add_column(table, heading)
    room = width - _width_of([heading for heading in kept if heading != _LAST_LINE], rows) - _GAP
    for row in rows:
        row[_LAST_LINE].plain = fit(row[_LAST_LINE].plain, room)
        table.add_row(*(row[heading] for heading in kept))
    num_hidden = len(job.instances) - len(shown)
    more = fit(f"and {counted(num_hidden, 'more instance')}, further on than these", width)
    return Group(*_title(job, width), *slow, table, *([Text(more, style="dim")] if num_hidden else []))


def fit(text: str, width: int) -> str:
    """Return ``text`` cut to ``width`` columns, after a whole word if possible, with ``…`` at its end."""
    if cell_len(text) <= width:
        return text
    start = set_cell_size(text, max(0, width - 1)).rstrip()
    is_between = text[len(start) : len(start) + 1].isspace()
    words = start if is_between else start.rpartition(" ")[0] or start
    return f"{words.rstrip()}…"


def _narrow(kept: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """Return the headings of columns that fit in ``width``; states are cut before most columns are removed."""
    kept = list(kept)
    for heading in _FIRST_TO_GO:
        if _width_of(kept, rows) <= width:
            break
        if heading == _STATE:
            for row in rows:
                row[_STATE].plain = row[_STATE].plain.partition(":")[0]
        elif heading in kept:
            kept.remove(heading)
    return kept


def _width_of(kept: Sequence[str], rows: Sequence[Row]) -> int:
    widths = [max(cell_len(heading), *(cell_len(row[heading].plain) for row in rows)) for heading in kept]
    if _LAST_LINE in kept:
        widths[kept.index(_LAST_LINE)] = _LEAST_OF_LAST_LINE
    return sum(widths) + _GAP * (len(kept) - 1) + _EDGES


def _add_column(table: Table, heading: str) -> None:
    if heading == _LAST_LINE:
        table.add_column(heading, no_wrap=True, ratio=1, style="dim")
    else:
        table.add_column(heading, justify="left" if heading in (_HOST, _STATE) else "right", no_wrap=True)


def _title(job: JobView, width: int) -> list[Text]:
    memory = sum(instance.memory_bytes or 0 for instance in job.instances)
    is_reported = all(instance.step is not None for instance in job.instances)
    parts = [
        f"{job.phase} for {describe_seconds(int(job.seconds))}",
        *(
            [f"attempt {job.restart_count}{'' if is_reported else ', whose steps are counted from 0'}"]
            if job.restart_count
            else []
        ),
        counted(len(job.instances), "instance"),
        counted(job.num_replicas, "replica"),
        describe_bytes(memory),
    ]
    while len(parts) > 1 and cell_len(" · ".join(parts)) > width:
        parts.pop()
    name = f"poprun {job.pid}"
    program = visible(shlex.join(job.program).replace("\n", " "))
    first = fit(f"{name}  job {visible(job.job_id)}  {program}", width)
    return [Text.assemble((first[: len(name)], "bold"), first[len(name) :]), Text(fit(" · ".join(parts), width))]


def _most_telling(job: JobView, num_rows: int) -> list[int]:
    """Return the indices of the instances to show: all if there is room; otherwise the failed instances first,
    then instances that do not wait for others, then the instances with the fewest steps.
    """
    if len(job.instances) <= num_rows:
        return list(range(len(job.instances)))

    def need(instance: InstanceView) -> tuple[bool, bool, int, int]:
        is_well = instance.state in _WELL and not instance.exit_code
        return is_well, bool(instance.waits_in), instance.num_steps or instance.step or 0, instance.index

    return sorted(instance.index for instance in sorted(job.instances, key=need)[:num_rows])


def _cells(instance: InstanceView, rate: Rate, place: Mapping[str, int]) -> Row:
    state, style = _state(instance)
    step = instance.step if instance.step is not None else instance.num_steps or None
    plain = {
        _INSTANCE: str(instance.index),
        **{name: str(place.get(name, "")) for name in _PLACES},
        _HOST: fit(visible(instance.host), _WIDEST),
        _STATE: fit(visible(state), _WIDEST),
        "step": "" if step is None else str(step),
        "steps/s": "" if rate.steps_per_second is None else describe_rate(rate.steps_per_second),
        "loss": "" if instance.loss is None else f"{instance.loss:.4g}",
        "CPU": "" if rate.cpu_share is None else f"{rate.cpu_share:.0%}",
        "memory": "" if instance.memory_bytes is None else describe_bytes(instance.memory_bytes),
        _LAST_LINE: visible(without_codes(instance.last_line)),
    }
    return {heading: Text(text, style=style if heading == _STATE else "") for heading, text in plain.items()}


def _state(instance: InstanceView) -> tuple[str, str]:
    """Return the text for an instance's state, and the text's colour."""
    if instance.exit_code:
        kind = f"exit code {instance.exit_code}" if instance.exit_code > 0 else f"signal {-instance.exit_code}"
        return kind, "red"
    if instance.exit_code == 0:
        return "ended", "green"
    if instance.waits_in:
        return f"waits: {instance.waits_in}", "yellow"
    return instance.state, "" if instance.state == "running" else "cyan"
