"""The report of a job, and the comparison of two reports, as text and tables for a terminal. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from rich.table import Table
from rich.text import Text

from popdist.errors import name_instances
from poprun.observe.account.job_record import AttemptRecord, InstanceRecord, JobRecord, utc
from poprun.observe.account.judgements import Verdict
from poprun.observe.show.compare import Change, Comparison, Difference
from poprun.observe.show.report_rows import INSTANCE, instance_cells, text_table
from poprun.plan.render.table import terminal_text
from poprun.text.ranges import counted, describe_seconds, fold_hosts
from poprun.text.screen import visible

_MOST_ROWS: Final = 16
_LABEL_WIDTH: Final = 11
_COLUMNS: Final = (INSTANCE, "host", "replicas", "end", "ran for", "steps", "peak memory")
_MOST_SLOWDOWNS: Final = 8


def render_report(job: JobRecord, *, width: int, has_color: bool) -> str:
    """Return a job's report as text in at most ``width`` columns, coloured if ``has_color``."""
    parts = chain(_job(job), *(_attempt(job, number) for number in range(len(job.attempts))))
    return terminal_text(*parts, width=width, has_color=has_color)


def render_comparison(found: Comparison, *, width: int, has_color: bool) -> str:
    """Return the comparison of two reports as text: differences first, then all numbers and causes."""
    changes = [f"{it.figure}: {_change(it)}" for it in found.differences if it.change is not Change.NONE]
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
    head = "; ".join(changes) or "no difference"
    return terminal_text(head, "", text_table(rows), "", *notes, width=width, has_color=has_color)


def _change(difference: Difference) -> str:
    """Return a compared number's change as text, such as ``10.7% slower``, or ``no difference`` within noise."""
    return f"{abs(difference.share):.1%} {difference.change}" if difference.is_known else difference.change


def _job(job: JobRecord) -> Iterator[Text]:
    """Yield lines about the whole job: its id, size, program and end."""
    yield _fact("job", f"{job.job_id}, by poprun {job.poprun_version}")
    if job.plan is not None:
        plan = job.plan
        sizes = (counted(plan.num_instances, "instance"), counted(plan.num_replicas, "replica"))
        yield _fact("size", f"{', '.join(sizes)} on {fold_hosts(plan.hosts)}")
        yield _fact("program", visible(shlex.join(plan.program)))
    end = f"exit code {job.exit_code}" if job.attempts else "it never ran"
    end = end if job.is_over else "none: it was still running when this was written"
    yield _fact("end", f"{end}: {job.error}" if job.error else end)


def _attempt(job: JobRecord, number: int) -> Iterator[Table | Text | str]:
    """Yield lines and tables about one attempt: its end, its instances, and where their time went."""
    attempt = job.attempts[number]
    yield ""
    name = f"attempt {number}" if len(job.attempts) > 1 else "run"
    yield _fact(name, f"{attempt.started_at}, {describe_seconds(attempt.duration_seconds)}: {_end_of(attempt)}")
    if number and any(it.num_steps for it in attempt.instances):
        yield _fact("steps", "counted from 0 again in this attempt")
    yield from _lines("verdict", [] if attempt.verdict is None else [_verdict(attempt.verdict)])
    yield from _lines("printed", attempt.printed)
    yield from _lines("slow", [it.text for it in attempt.slowdowns[:_MOST_SLOWDOWNS]])
    yield from _lines("warning", attempt.warnings)
    if not attempt.instances:
        return
    shown = _shown_instances(attempt)
    yield ""
    yield text_table([_cells(it, attempt) for it in shown])
    if timed := [it for it in shown if it.phase_seconds]:
        yield ""
        yield "where the time of each instance went"
        yield text_table([_shares(it) for it in timed])
    if num_left := len(attempt.instances) - len(shown):
        yield f"and {counted(num_left, 'more instance')}, which neither failed nor were slow"


def _end_of(attempt: AttemptRecord) -> str:
    """Return one line on how an attempt ended."""
    if not attempt.is_over:
        return "still running"
    if attempt.printed or not attempt.stop_reason:
        return f"exit code {attempt.exit_code}" if attempt.exit_code else "ended well"
    return attempt.stop_reason


def _verdict(verdict: Verdict) -> str:
    """Return one line on who is at fault, where in the code, and since when the others waited."""
    names = [name_instances(verdict.culprits)] if verdict.culprits else []
    places = sorted({f"at {verdict.places[it]}" for it in verdict.culprits if it in verdict.places})
    since = [] if (began := verdict.since_epoch_seconds) is None else [f"since {utc(began)}"]
    facts = ", ".join([*names, *places[:1], *since])
    return f"{verdict.cause}: {facts}" if facts else verdict.cause


def _shown_instances(attempt: AttemptRecord) -> list[InstanceRecord]:
    """Return the instances to show: all if at most 16, else failed and slow ones, then others up to 16."""
    verdict = attempt.verdict
    named = {*(it.instance for it in attempt.slowdowns), *(verdict.culprits if verdict else ())}
    named |= set() if attempt.first_failure is None else {attempt.first_failure}
    first = sorted(attempt.instances, key=lambda it: (it.index not in named, it.index))[:_MOST_ROWS]
    return sorted(first, key=lambda it: it.index)


def _cells(instance: InstanceRecord, attempt: AttemptRecord) -> Mapping[str, str]:
    """Return the texts of an instance's row in the printed table, by heading."""
    cells = instance_cells(instance, attempt)
    return {heading: cells[heading].text for heading in _COLUMNS}


def _shares(instance: InstanceRecord) -> Mapping[str, str]:
    """Return the row of an instance in the table of phases: the share of its time in each phase."""
    whole = sum(instance.phase_seconds.values()) or 1.0
    shares = {
        phase: f"{seconds / whole:.0%}" if seconds else "" for phase, seconds in instance.phase_seconds.items()
    }
    return {INSTANCE: str(instance.index), **shares}


def _fact(label: str, value: str) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "bold"), value)


def _lines(label: str, lines: Sequence[str]) -> Iterator[Text]:
    """Yield ``lines`` as lines of the report, with the label ``label`` before the first line only."""
    yield from (_fact("" if number else label, line) for number, line in enumerate(lines))
