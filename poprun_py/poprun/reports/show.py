"""A report of a job, or the comparison of two, in words and tables. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from popdist.errors import name_instances
from poprun.job.performance.slowness import describe_slowness
from poprun.job.verdict import describe_verdict
from poprun.render.table import terminal_text
from poprun.reports.compare import Change, Comparison, Difference
from poprun.reports.job_report import AttemptReport, InstanceReport, JobReport
from poprun.text.ranges import counted, describe_bytes, fold_hosts
from poprun.text.screen import visible

_MOST_ROWS: Final = 16
_LABEL_WIDTH: Final = 11
_TEXTS: Final = ("host", "replicas", "end", "phase", "figure", "change")  # columns that stand to the left
_MOST_SLOWDOWNS: Final = 8


def render_report(job: JobReport, *, width: int, has_color: bool) -> str:
    """The whole report in at most ``width`` columns; coloured if ``has_color``."""
    parts = chain(_job(job), *(_attempt(job, number) for number in range(len(job.attempts))))
    return terminal_text(*parts, width=width, has_color=has_color)


def render_comparison(found: Comparison, *, width: int, has_color: bool) -> str:
    """The comparison: in the first line what differs, then all figures, and where differences come from."""
    told = [f"{it.figure}: {_change(it)}" for it in found.differences if it.change is not Change.NONE]
    rows = [
        {
            "figure": it.figure,
            "first": it.before,
            "second": it.after,
            "change": _change(it),
            "noise": f"{it.noise:.1%}" if it.noise else "",
        }
        for it in found.differences
    ]
    notes = [f"{it.figure}: {note}" for it in found.differences for note in it.notes]
    head = "; ".join(told) or "no difference"
    return terminal_text(head, "", _table(rows), "", *notes, width=width, has_color=has_color)


def _change(difference: Difference) -> str:
    """The change of a figure, such as ``10.7% slower``."""
    return f"{abs(difference.share):.1%} {difference.change}" if difference.is_known else difference.change


def _job(job: JobReport) -> Iterator[Text]:
    """What was to run, and how it ended as a whole."""
    yield _fact("job", f"{job.job_id}, by poprun {job.poprun_version}")
    if job.plan is not None:
        plan = job.plan
        sizes = (counted(plan.num_instances, "instance"), counted(plan.num_replicas, "replica"))
        yield _fact("size", f"{', '.join(sizes)} on {fold_hosts(plan.hosts)}")
        yield _fact("program", shlex.join(plan.program))
    end = f"exit code {job.exit_code}" if job.attempts else "it never ran"
    end = end if job.is_over else "none: it was still running when this was written"
    yield _fact("end", f"{end}: {job.error}" if job.error else end)


def _attempt(job: JobReport, number: int) -> Iterator[Table | Text | str]:
    """One attempt: its end, its instances, and where their time went."""
    attempt = job.attempts[number]
    yield ""
    name = f"attempt {number}" if len(job.attempts) > 1 else "run"
    yield _fact(name, f"{attempt.started_at}, {attempt.duration_seconds:.1f} s: {_end_of(attempt)}")
    yield from _lines("verdict", list(_verdict(job, attempt)))
    failed = [it for it in attempt.instances if it.index == attempt.first_failure]
    yield from _lines("last words", [f"| {line}" for it in failed for line in it.excerpt])
    yield from _lines("slow", [visible(describe_slowness(it)) for it in attempt.slowdowns[:_MOST_SLOWDOWNS]])
    yield from _lines("warning", list(attempt.warnings))
    if not attempt.instances:
        return
    shown = _shown_instances(attempt)
    yield ""
    yield _table([_cells(it) for it in shown])
    if timed := [it for it in shown if it.phase_seconds]:
        yield ""
        yield "where the time of each instance went"
        yield _table(_shares(timed))
    if num_left := len(attempt.instances) - len(shown):
        yield f"and {counted(num_left, 'more instance')}, which neither failed nor were slow"


def _end_of(attempt: AttemptReport) -> str:
    """How an attempt ended, in a line."""
    failed = next((it for it in attempt.instances if it.index == attempt.first_failure), None)
    if failed is not None:
        return f"instance {failed.index} failed first, {_end_of_instance(failed)}"
    if not attempt.is_over:
        return "still running"
    return attempt.stop_reason or ("ended well" if not attempt.exit_code else f"exit code {attempt.exit_code}")


def _end_of_instance(instance: InstanceReport) -> str:
    if instance.problem:
        return instance.problem
    if instance.exit_code is None:
        return "running, or lost"
    end = instance.signal or f"exit code {instance.exit_code}"
    return f"{end}, ended by poprun" if instance.was_stopped else end


def _verdict(job: JobReport, attempt: AttemptReport) -> Iterator[str]:
    """Who is at fault, in lines."""
    if attempt.verdict is None or job.plan is None:
        return
    verdict = attempt.verdict.value
    who = name_instances(verdict.culprits) if verdict.culprits else ""
    places = sorted({verdict.at(index) for index in verdict.culprits})
    yield f"{attempt.verdict.cause}{f': {who}' if who else ''}{places[0] if places else ''}"
    if attempt.verdict.since is not None:
        yield f"since {attempt.verdict.since}"
    yield from describe_verdict(verdict, job.plan.parallelism)
    if verdict.victims:
        yield f"only because of that: {name_instances(verdict.victims)}"
    if verdict.torn_down:
        yield f"ended by poprun: {name_instances(verdict.torn_down)}"


def _shown_instances(attempt: AttemptReport) -> list[InstanceReport]:
    """The instances that are shown: all if they are few, else those that failed or were slow first."""
    verdict = attempt.verdict
    named = {*(it.instance for it in attempt.slowdowns), *(verdict.culprits if verdict else ())}
    named |= set() if attempt.first_failure is None else {attempt.first_failure}
    first = sorted(attempt.instances, key=lambda it: (it.index not in named, it.index))[:_MOST_ROWS]
    return sorted(first, key=lambda it: it.index)


def _cells(instance: InstanceReport) -> Mapping[str, str]:
    """The row of an instance: its cells by heading."""
    steps, seconds, memory = instance.num_steps, instance.duration_seconds, instance.peak_memory_bytes
    return {
        "instance": str(instance.index),
        "host": instance.host,
        "replicas": instance.replicas,
        "end": _end_of_instance(instance),
        "seconds": "" if seconds is None else f"{seconds:.1f}",
        "steps": "" if not steps else str(steps),
        "memory": "" if memory is None else describe_bytes(memory),
    }


def _shares(instances: Sequence[InstanceReport]) -> list[Mapping[str, str]]:
    """The rows of the phases that took time: each one's share in the time of each instance."""
    phases = dict.fromkeys(phase for it in instances for phase, seconds in it.phase_seconds.items() if seconds)
    wholes = {it.index: sum(it.phase_seconds.values()) or 1.0 for it in instances}
    return [
        {"phase": phase}
        | {str(it.index): f"{it.phase_seconds.get(phase, 0.0) / wholes[it.index]:.0%}" for it in instances}
        for phase in phases
    ]


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Rows under their headings, without columns that are empty; those of ``texts`` stand to the left."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    headings = [heading for heading in dict.fromkeys(chain(*rows)) if any(row.get(heading) for row in rows)]
    for heading in headings:
        table.add_column(Text(heading), justify="left" if heading in _TEXTS else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row.get(heading, "")) for heading in headings))
    return table


def _fact(label: str, value: str) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "bold"), value)


def _lines(label: str, lines: Sequence[str]) -> Iterator[Text]:
    """Lines of which the first has a label."""
    yield from (_fact("" if number else label, line) for number, line in enumerate(lines))
