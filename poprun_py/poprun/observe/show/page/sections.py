"""The HTML of each part of a job's page, made from the record of the job. Pure."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from poprun.observe.account.job_record import AttemptRecord, JobRecord
from poprun.observe.account.time_shares import PARTS, JobTime, find_job_time, offsets
from poprun.observe.show.page.charts import charts_of, render_charts
from poprun.observe.show.report_rows import INSTANCE, Cell, instance_cells
from poprun.plan.render.picture.documents import render_fragment
from poprun.plan.render.words import facts_of, size_of
from poprun.text.ranges import describe_bytes, describe_seconds
from poprun.text.screen import without_codes
from popsize.svg import element, escaped

_LEAST_SHARE: Final = 0.0005  # of a bar: what is smaller is not seen
_MOST_BARS: Final = 64
_MOST_THICK: Final = 16  # bars of the usual height
_LETTERS_OF_A_LINE: Final = 240
_LETTERS_OF_LINES: Final = 400_000  # of all instances


def name_of(job: JobRecord) -> str:
    """Return the name of a job for its page: its command line, or its id if it has no program."""
    program = job.plan.program if job.plan else ()
    if not program:
        return f"job {job.job_id}"
    return shlex.join([os.path.basename(program[0]) or program[0], *program[1:]])


def render_sections(job: JobRecord) -> Iterator[str]:
    """Yield the HTML of each part of a job's page, in the order of the page."""
    time = find_job_time(job.attempts) if job.attempts else None
    yield _header(job, time)
    yield "<main>"
    yield _end(job)
    if time is not None:
        attempts = job.attempts
        began = offsets(attempts)
        yield _section("Where the time went", *_time(time))
        if remarks := _remarks(attempts):
            yield _section("Slowdowns and warnings", remarks)
        if charts := charts_of(attempts, began):
            yield _section("Over time", render_charts(charts, time.elapsed_seconds, began[1:]))
        yield _section("Instances", _table(attempts[-1]), _last_lines(attempts[-1]))
    yield _section("What ran", *_what_ran(job))
    yield "</main>"


def _section(title: str, *parts: str) -> str:
    return element("section", element("h2", title), *parts)


def _header(job: JobRecord, time: JobTime | None) -> str:
    facts = [] if job.plan is None else [size_of(job.plan)]
    if time is not None:
        facts.append(f"began {_moment(job.attempts[0].started_at)}")
    if not job.is_over:
        facts.append(f"as it stood {_moment(job.written_at)}; the page is written anew every 30 s")
    state, words = _state_of(job)
    return element(
        "header",
        element("p", escaped(words), class_=f"state {state}"),
        element("h1", escaped(name_of(job))),
        element("p", escaped(" · ".join(facts)), class_="faint"),
        _figures(job, time) if time is not None else "",
    )


def _state_of(job: JobRecord) -> tuple[str, str]:
    if not job.is_over:
        return "runs", "running"
    if job.error:
        return "failed", "given up" if job.attempts else "did not start"
    return ("well", "ended well") if job.exit_code == 0 else ("failed", f"exit code {job.exit_code}")


def _figures(job: JobRecord, time: JobTime) -> str:
    """Return the HTML of a job's most important numbers, such as steps per second, in large letters."""
    instances = job.attempts[-1].instances
    steps = [it.num_steps for it in instances if it.num_steps is not None]
    peaks = [it.peak_memory_bytes or 0 for it in instances]
    figures = {"elapsed": describe_seconds(time.elapsed_seconds)}
    if time.goodput is not None:
        figures["goodput"] = f"{time.goodput:.0%}"
    if steps:
        figures["steps of the last attempt" if len(job.attempts) > 1 else "steps"] = f"{max(steps):,}"
    if any(peaks):
        figures["most memory of an instance"] = describe_bytes(max(peaks))
    if len(job.attempts) > 1:
        figures["attempts"] = str(len(job.attempts))
    return element(
        "dl",
        *(element("div", element("dt", it), element("dd", escaped(value))) for it, value in figures.items()),
        class_="figures",
    )


def _end(job: JobRecord) -> str:
    """Return the HTML on how a job and its attempts ended; "" if its only attempt runs, or ended well."""
    attempts = job.attempts
    parts = [_text(job.error)]
    if len(attempts) == 1:
        parts.append(_text(_printed_end(attempts[0])))
    else:
        entries = [_attempt(number, attempt) for number, attempt in enumerate(attempts)]
        parts += [element("ul", *entries, class_="entries")] if entries else []
    return _section("How it ended", *parts) if any(parts) else ""


def _attempt(number: int, attempt: AttemptRecord) -> str:
    code = attempt.exit_code
    end = "ended well after" if code == 0 else f"exit code {code} after"
    state = end if attempt.is_over else "runs for"
    duration = describe_seconds(attempt.duration_seconds)
    name = element("b", f"attempt {number}")
    return element("li", name, escaped(f" {state} {duration}"), _text(_printed_end(attempt)))


def _printed_end(attempt: AttemptRecord) -> str:
    """Return the lines that poprun printed at an attempt's end; without lines, why poprun stopped the attempt."""
    return "\n".join(attempt.printed) or str(attempt.stop_reason)


def _text(text: str) -> str:
    """Return the HTML of ``text`` with its line breaks; "" if ``text`` is empty."""
    return element("pre", escaped(text)) if text else ""


def _time(time: JobTime) -> Iterator[str]:
    means, elapsed = time.mean_seconds, time.elapsed_seconds
    yield _bar(means, elapsed, "the whole job")
    rows = [
        element(
            "li",
            f'<i class="{part}"></i>',
            element("span", PARTS[part]),
            element("span", escaped(f"{describe_seconds(seconds)}, {seconds / elapsed:.1%}"), class_="value"),
        )
        for part, seconds in means.items()
    ]
    yield element("ul", *rows, class_="legend")
    if means.get("unknown", 0.0) > elapsed / 2:
        yield element(
            "p",
            "Phases of the programs were not measured: that needs several instances and torch.",
            class_="faint",
        )
    if len(time.instances) > 1:
        by_waiting = sorted(range(len(time.instances)), key=lambda it: time.instances[it]["waiting"])
        shown = sorted(by_waiting[:_MOST_BARS])  # the other instances waited for the instances that waited least
        bars = (element("span", str(it)) + _bar(time.instances[it], elapsed, f"instance {it}") for it in shown)
        yield element("div", *bars, class_="bars" if len(shown) <= _MOST_THICK else "bars thin")
        if len(time.instances) > _MOST_BARS:
            yield element("p", f"These are the {_MOST_BARS} instances that waited least.", class_="faint")


def _bar(seconds: Mapping[str, float], elapsed: float, name: str) -> str:
    shares = {part: it / elapsed for part, it in seconds.items() if elapsed and it / elapsed > _LEAST_SHARE}
    label = ", ".join(f"{PARTS[part]} {share:.1%}" for part, share in shares.items())
    parts = [
        element(
            "i",
            "",
            class_=part,
            style=f"flex:{share:.4f}",
            title=f"{PARTS[part]}: {describe_seconds(seconds[part])}, {share:.1%}",
        )
        for part, share in shares.items()
    ]
    return element("div", *(parts or [" "]), class_="parts", role="img", aria_label=f"{name}: {label}")


def _remarks(attempts: Sequence[AttemptRecord]) -> str:
    """Return the HTML list of all attempts' slow instances and warnings; "" if there are none."""
    rows = [
        element("li", escaped(f"attempt {number}: {words}" if len(attempts) > 1 else words))
        for number, attempt in enumerate(attempts)
        for words in (*(slow.text for slow in attempt.slowdowns), *attempt.warnings)
    ]
    return element("ul", *rows, class_="entries") if rows else ""


def _table(attempt: AttemptRecord) -> str:
    """Return the HTML table of the last attempt's instances, which the page's script can sort."""
    rows = [instance_cells(it, attempt) for it in attempt.instances]
    shown = [name for name in rows[0] if any(row[name].text for row in rows)]
    head = [
        element(
            "th",
            element("button", name, type="button"),
            scope="col",
            aria_sort="ascending" if name == INSTANCE else None,
        )
        for name in shown
    ]
    body = [element("tr", *(_cell(name, row[name]) for name in shown)) for row in rows]
    table = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", table, class_="wide", tabindex="0", role="region", aria_label="the instances")


def _cell(column: str, cell: Cell) -> str:
    if column == INSTANCE:
        return element("th", escaped(cell.text), data_v=cell.value, scope="row")
    return element("td", escaped(cell.text), data_v=cell.value)


def _last_lines(attempt: AttemptRecord) -> str:
    with_lines = [it for it in attempt.instances if it.last_lines or it.excerpt]
    if not with_lines:
        return element("p", "The programs printed nothing that poprun has kept.", class_="faint")
    most = max(3, _LETTERS_OF_LINES // (_LETTERS_OF_A_LINE * len(with_lines)))
    details = []
    for instance in with_lines:
        printed = (instance.last_lines or instance.excerpt)[-most:]
        summary = element("summary", f"last lines of instance {instance.index}")
        is_first = instance.index == attempt.first_failure
        lines = _text("\n".join(without_codes(line)[:_LETTERS_OF_A_LINE] for line in printed))
        details.append(element("details", summary, lines, open="" if is_first else None))
    return element("div", *details, class_="said")


def _what_ran(job: JobRecord) -> Iterator[str]:
    facts = {} if job.plan is None else facts_of(job.plan)
    versions = {"poprun": job.poprun_version, **job.provenance}
    if revision := versions.pop("revision", ""):
        facts["revision"] = revision
    facts["versions"] = ", ".join(f"{name} {it}" for name, it in versions.items())
    facts["job"] = job.job_id
    yield element(
        "dl", *(element("dt", name) + element("dd", escaped(it)) for name, it in facts.items()), class_="facts"
    )
    if job.plan is not None:
        picture = render_fragment(job.plan)
        yield element("div", picture, class_="picture wide", tabindex="0", role="region", aria_label="the plan")


def _moment(text: str) -> str:
    return f"{text[:10]} {text[11:19]} UTC"
