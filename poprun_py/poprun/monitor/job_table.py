"""A view of a job as a table for a person, with how fast each instance is. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from poprun.messages.view import InstanceView, JobView
from poprun.text.screen import visible

_LINES_AROUND: Final = 7
_SECONDS_PER_MINUTE: Final = 60
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT_STEP: Final = 1024
_HOST: Final = "host"
_STATE: Final = "state"
_LAST_LINE: Final = "last line"
_HEADINGS: Final = ("instance", _HOST, _STATE, "step", "steps/s", "loss", "CPU", "memory", _LAST_LINE)
_ALWAYS: Final = frozenset({"instance", _HOST, _STATE, _LAST_LINE})
_WIDEST: Final = 32
_WELL: Final = frozenset({"running", "ended"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The speed of an instance.

    Attributes:
        steps_per_second: Optimizer steps, or reported ones; None when it is not known.
        cpu_share: Processors that its processes keep busy, 1.0 for one; None when it is not known.
    """

    steps_per_second: float | None = None
    cpu_share: float | None = None


def rates(before: JobView | None, after: JobView) -> list[Rate]:
    """The rate of each instance between two views of one job; unknown across a restart and with one view only."""
    if before is None or before.restart_count != after.restart_count:
        return [Rate()] * len(after.instances)
    return [_rate(old, new) for old, new in zip(before.instances, after.instances, strict=True)]


def _rate(before: InstanceView, after: InstanceView) -> Rate:
    """The rate between the two looks that the views tell of."""
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


def render(job: JobView, speeds: Sequence[Rate], height: int) -> Group:
    """The job in at most ``height`` lines: a title, and a row for each instance or for those that tell most.

    A column that would be empty, or the same in every row, is left out.
    """
    shown = _most_telling(job, max(1, height - _LINES_AROUND))
    rows = [_cells(job.instances[index], speeds[index]) for index in shown]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    kept = [
        number
        for number, heading in enumerate(_HEADINGS)
        if heading in _ALWAYS or any(row[number] for row in rows)
    ]
    if len({instance.host for instance in job.instances}) == 1:
        kept.remove(_HEADINGS.index(_HOST))
    for number in kept:
        _add_column(table, _HEADINGS[number])
    for row in rows:
        table.add_row(*(row[number] for number in kept))
    num_hidden = len(job.instances) - len(shown)
    caption = [Text(f"and {num_hidden} more instances, further on than these", style="dim")] if num_hidden else []
    return Group(*_title(job), table, *caption)


def _add_column(table: Table, heading: str) -> None:
    if heading == _LAST_LINE:
        table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    elif heading in (_HOST, _STATE):
        table.add_column(heading, no_wrap=True, max_width=_WIDEST)
    else:
        table.add_column(heading, justify="right", no_wrap=True)


def _title(job: JobView) -> list[Text]:
    attempt = f" · attempt {job.restart_count}" if job.restart_count else ""
    memory = sum(instance.memory_bytes or 0 for instance in job.instances)
    return [
        _one_line(Text.assemble((f"poprun {job.pid}", "bold"), f"  job {job.job_id}  {_program(job)}")),
        _one_line(
            Text(
                f"{job.phase} for {describe_seconds(job.seconds)}{attempt} · {len(job.instances)} instances · "
                f"{job.num_replicas} replicas · {describe_bytes(memory)}"
            )
        ),
    ]


def _program(job: JobView) -> str:
    return visible(shlex.join(job.program), keeps="\n")


def _one_line(text: Text) -> Text:
    whole = Text(" ").join(text.split("\n"))
    whole.no_wrap, whole.overflow = True, "ellipsis"
    return whole


def _most_telling(job: JobView, num_rows: int) -> list[int]:
    """The instances to show, in order: all, or those that failed and those that are furthest behind."""
    if len(job.instances) <= num_rows:
        return list(range(len(job.instances)))

    def need(instance: InstanceView) -> tuple[bool, bool, int, int]:
        is_well = instance.state in _WELL and not instance.exit_code
        return is_well, bool(instance.waits_in), instance.num_steps or instance.step or 0, instance.index

    return sorted(instance.index for instance in sorted(job.instances, key=need)[:num_rows])


def _cells(instance: InstanceView, rate: Rate) -> list[Text | str]:
    state, style = _state(instance)
    step = instance.step if instance.step is not None else instance.num_steps or None
    return [
        str(instance.index),
        Text(visible(instance.host)),
        Text(visible(state), style=style),
        "" if step is None else str(step),
        "" if rate.steps_per_second is None else f"{rate.steps_per_second:.1f}",
        "" if instance.loss is None else f"{instance.loss:.4g}",
        "" if rate.cpu_share is None else f"{rate.cpu_share:.0%}",
        "" if instance.memory_bytes is None else describe_bytes(instance.memory_bytes),
        Text(visible(instance.last_line)),
    ]


def _state(instance: InstanceView) -> tuple[str, str]:
    """The state in words, and its colour."""
    if instance.exit_code:
        kind = f"exit code {instance.exit_code}" if instance.exit_code > 0 else f"signal {-instance.exit_code}"
        return kind, "red"
    if instance.exit_code == 0:
        return "ended", "green"
    if instance.waits_in:
        return f"waits: {instance.waits_in}", "yellow"
    return instance.state, "" if instance.state == "running" else "cyan"


def describe_seconds(seconds: float) -> str:
    """A duration as ``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(int(seconds), _SECONDS_PER_MINUTE)
    hours, minutes = divmod(minutes, _SECONDS_PER_MINUTE)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def describe_bytes(num_bytes: int) -> str:
    """A size with three digits and its unit: ``11.8 GiB``."""
    size = float(num_bytes)
    for unit in _UNITS:
        if size < _UNIT_STEP or unit == _UNITS[-1]:
            break
        size /= _UNIT_STEP
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"  # noqa: PLR2004 - three digits
