"""The parts of a job's page, each from its report as JSON has it. Pure."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, Final

from poprun.errors import PlanError
from poprun.page.charts import charts_of, describe_duration, render_charts
from poprun.page.time_shares import PARTS, InstanceTime, JobTime, find_job_time, offsets
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_from_dict
from poprun.render.picture.blocks import element, escaped
from poprun.render.picture.documents import render_fragment
from poprun.render.words import launcher_of, size_of, threads_of
from poprun.text.ranges import describe_bytes

_LEAST_SHARE: Final = 0.0005  # of a bar: what is smaller is not seen
_MOST_BARS: Final = 64
_MOST_THICK: Final = 16  # bars of the usual height
_LETTERS_OF_A_LINE: Final = 240
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # what programs send to a terminal beside text
_LETTERS_OF_LINES: Final = 400_000  # of all instances

Json = Mapping[str, Any]


def name_of(job: Json) -> str:
    """The name of a job: its program, or its id where there is none."""
    program = job["plan"]["program"] if job["plan"] else ()
    if not program:
        return f"job {job['job_id']}"
    return shlex.join([os.path.basename(program[0]) or program[0], *program[1:]])


def render_sections(job: Json) -> Iterator[str]:
    """Every part of the page, in order."""
    plan = _plan_of(job)
    time = find_job_time(job) if job["attempts"] else None
    yield _header(job, plan, time)
    yield "<main>"
    yield from _end(job)
    if time is not None:
        attempts = job["attempts"]
        began = offsets(attempts)
        yield _section("Where the time went", *_time(time))
        if remarks := _remarks(attempts):
            yield _section("Slowdowns and warnings", remarks)
        if charts := charts_of(attempts, began):
            drawn = render_charts(charts, time.elapsed_seconds, began[1:])
            yield _section("Over time", element("div", drawn, class_="charts"))
        yield _section("Instances", _table(attempts[-1]), *_last_lines(attempts[-1]))
    yield _section("What ran", *_what_ran(job, plan))
    yield "</main>"


def _plan_of(job: Json) -> LaunchPlan | None:
    try:
        return None if job["plan"] is None else plan_from_dict(job["plan"], "the report")
    except PlanError:
        return None


def _section(title: str, *parts: str) -> str:
    return element("section", element("h2", title), *parts)


def _header(job: Json, plan: LaunchPlan | None, time: JobTime | None) -> str:
    facts = [] if plan is None else [size_of(plan)]
    if time is not None:
        facts.append(f"began {_moment(job['attempts'][0]['started_at'])}")
    if not job["is_over"]:
        facts.append(f"as it stood {_moment(job['written_at'])}; the page is written anew every 30 s")
    state, words = _state_of(job)
    return element(
        "header",
        element("p", escaped(words), class_=f"state {state}"),
        element("h1", escaped(name_of(job))),
        element("p", escaped(" · ".join(facts)), class_="faint"),
        _figures(job, time) if time is not None else "",
    )


def _state_of(job: Json) -> tuple[str, str]:
    if not job["is_over"]:
        return "runs", "running"
    if job["error"]:
        return "failed", "given up" if job["attempts"] else "did not start"
    return ("well", "ended well") if job["exit_code"] == 0 else ("failed", f"exit code {job['exit_code']}")


def _figures(job: Json, time: JobTime) -> str:
    """What is asked first, in large letters."""
    instances = job["attempts"][-1]["instances"]
    steps = [it["num_steps"] for it in instances if it["num_steps"] is not None]
    peaks = [it["peak_memory_bytes"] or 0 for it in instances]
    figures = {"elapsed": describe_duration(time.elapsed_seconds)}
    if time.goodput is not None:
        figures["goodput"] = f"{time.goodput:.0%}"
    if steps:
        figures["steps"] = f"{max(steps):,}"
    if any(peaks):
        figures["most memory of an instance"] = describe_bytes(max(peaks))
    if len(job["attempts"]) > 1:
        figures["attempts"] = str(len(job["attempts"]))
    return element(
        "dl",
        *(element("div", element("dt", it), element("dd", escaped(value))) for it, value in figures.items()),
        class_="figures",
    )


def _end(job: Json) -> Iterator[str]:
    """How the job and its attempts ended; nothing of one that runs or ended well at once."""
    if job["error"]:
        yield _section("How it ended", element("pre", escaped(job["error"])))
    ends = [(it, it["printed"] or list(filter(None, [it["stop_reason"]]))) for it in job["attempts"]]
    if len(ends) == 1 and ends[0][1]:
        yield _section("How it ended", element("pre", escaped("\n".join(ends[0][1]))))
    elif len(ends) > 1:
        yield _section("Attempts", element("ul", *starmap(_attempt, enumerate(ends)), class_="entries"))


def _attempt(number: int, end: tuple[Json, Sequence[str]]) -> str:
    attempt, lines = end
    code = attempt["exit_code"]
    state = "runs" if not attempt["is_over"] else "ended well" if code == 0 else f"exit code {code}"
    told = f" {state} after {describe_duration(attempt['duration_seconds'])}"
    pre = element("pre", escaped("\n".join(lines))) if lines else ""
    return element("li", element("b", f"attempt {number}"), escaped(told), pre)


def _time(time: JobTime) -> Iterator[str]:
    means, elapsed = time.mean_seconds, time.elapsed_seconds
    yield _bar(means, elapsed, "the whole job")
    rows = [
        element(
            "li",
            f'<i class="{part}"></i>',
            element("span", PARTS[part]),
            element("span", escaped(f"{describe_duration(seconds)}, {seconds / elapsed:.1%}"), class_="value"),
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
        shown = _least_waiting(time.instances)
        class_ = "bars" if len(shown) <= _MOST_THICK else "bars thin"
        yield element("div", *(_row(it, elapsed) for it in shown), class_=class_)
        if len(time.instances) > _MOST_BARS:
            yield element("p", f"These are the {_MOST_BARS} instances that waited least.", class_="faint")


def _least_waiting(instances: Sequence[InstanceTime]) -> list[InstanceTime]:
    """All instances, or of many those that waited least: the others waited for them."""
    least = sorted(instances, key=lambda it: it.seconds["waiting"])[:_MOST_BARS]
    return sorted(least, key=lambda it: it.index)


def _row(time: InstanceTime, elapsed: float) -> str:
    return element("span", str(time.index)) + _bar(time.seconds, elapsed, f"instance {time.index}")


def _bar(seconds: Mapping[str, float], elapsed: float, name: str) -> str:
    shares = {part: it / elapsed for part, it in seconds.items() if elapsed and it / elapsed > _LEAST_SHARE}
    told = ", ".join(f"{PARTS[part]} {share:.1%}" for part, share in shares.items())
    parts = [
        element(
            "i",
            "",
            class_=part,
            style=f"flex:{share:.4f}",
            title=f"{PARTS[part]}: {describe_duration(seconds[part])}, {share:.1%}",
        )
        for part, share in shares.items()
    ]
    return element("div", *(parts or [" "]), class_="parts", role="img", aria_label=f"{name}: {told}")


def _remarks(attempts: Sequence[Json]) -> str:
    """Who was slow, and what the user was warned of, by attempt."""
    rows = [
        element("li", escaped(f"attempt {number}: {words}" if len(attempts) > 1 else words))
        for number, attempt in enumerate(attempts)
        for words in (*(slow["text"] for slow in attempt["slowdowns"]), *attempt["warnings"])
    ]
    return element("ul", *rows, class_="entries") if rows else ""


def _table(attempt: Json) -> str:
    """The instances of the last attempt; the page's script sorts them."""
    rows = [_cells(it, attempt) for it in attempt["instances"]]
    shown = [name for name in rows[0] if any(row[name][1] for row in rows)]
    head = [
        element(
            "th",
            element("button", name, type="button"),
            scope="col",
            aria_sort="ascending" if name == shown[0] else None,
        )
        for name in shown
    ]
    body = [
        element(
            "tr",
            *(
                element(
                    "th" if name == shown[0] else "td",
                    escaped(row[name][1]),
                    data_v=row[name][0],
                    scope="row" if name == shown[0] else None,
                )
                for name in shown
            ),
        )
        for row in rows
    ]
    table = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", table, class_="wide", tabindex="0", role="region", aria_label="the instances")


def _cells(instance: Json, attempt: Json) -> dict[str, tuple[object, str]]:
    """For each column the value to sort by, and its text."""
    seconds, peak, steps = instance["duration_seconds"], instance["peak_memory_bytes"], instance["num_steps"]
    place = instance.get("place", {})
    speed = steps / seconds if steps and seconds else None
    cpu = instance["curves"].get("cpu", {}).get("values", ())
    known = [it for it in cpu if it is not None]
    busy = sum(known) / len(known) if known else None
    waiting = (instance.get("phase_seconds") or {}).get("waiting")
    end = _end_of(instance, attempt)
    return {
        "instance": (instance["index"], str(instance["index"])),
        **{name: (value, str(value)) for name, value in place.items()},
        "host": (instance["host"], instance["host"]),
        "end": (end, end),
        "ran for": (seconds or 0, "" if seconds is None else describe_duration(seconds)),
        "steps": (steps or 0, "" if steps is None else f"{steps:,}"),
        "steps/s": (speed or 0, "" if speed is None else f"{speed:.3g}"),
        "waited": (waiting or 0, "" if waiting is None else describe_duration(waiting)),
        "processors": (busy or 0, "" if busy is None else f"{busy:.2f}"),
        "peak memory": (peak or 0, "" if peak is None else describe_bytes(peak)),
        "replicas": (instance["replicas"], instance["replicas"]),
    }


def _end_of(instance: Json, attempt: Json) -> str:
    if instance["problem"]:
        return str(instance["problem"])
    if instance["exit_code"] is None:
        return (
            "never ran" if instance["began_seconds"] is None else "runs" if not attempt["is_over"] else "not seen"
        )
    end = instance["signal"] or (f"exit code {instance['exit_code']}" if instance["exit_code"] else "well")
    return f"{end}, ended by poprun" if instance["was_stopped"] else str(end)


def _last_lines(attempt: Json) -> Iterator[str]:
    told = [it for it in attempt["instances"] if it["last_lines"] or it["excerpt"]]
    most = max(3, _LETTERS_OF_LINES // (_LETTERS_OF_A_LINE * max(1, len(told))))
    if not told:
        yield element("p", "The programs printed nothing that poprun has kept.", class_="faint")
    details = []
    for instance in told:
        lines = [_without_colours(it) for it in (instance["last_lines"] or instance["excerpt"])[-most:]]
        summary = element("summary", f"last lines of instance {instance['index']}")
        is_first = instance["index"] == attempt["first_failure"]
        words = element("pre", escaped("\n".join(lines)))
        details.append(element("details", summary, words, open="" if is_first else None))
    yield element("div", *details, class_="said")


def _without_colours(line: str) -> str:
    """A line as a terminal shows it in the end, in black and white, cut if it is long."""
    return _COLOURS.sub("", line).rpartition("\r")[2][:_LETTERS_OF_A_LINE]


def _what_ran(job: Json, plan: LaunchPlan | None) -> Iterator[str]:
    facts = {"program": shlex.join(plan.program)} if plan is not None and plan.program else {}
    if plan is not None:
        facts |= {"folder": plan.working_directory, "launcher": launcher_of(plan), "threads": threads_of(plan)}
    versions = {"poprun": job["poprun_version"], **job.get("provenance", {})}
    revision = versions.pop("revision", "")
    facts |= {"revision": revision} if revision else {}
    facts["versions"] = ", ".join(f"{name} {it}" for name, it in versions.items())
    facts["job"] = job["job_id"]
    yield element(
        "dl", *(element("dt", name) + element("dd", escaped(it)) for name, it in facts.items()), class_="facts"
    )
    if plan is not None:
        yield element(
            "div", render_fragment(plan), class_="picture wide", tabindex="0", role="region", aria_label="the plan"
        )


def _moment(text: str) -> str:
    return f"{text[:10]} {text[11:19]} UTC"
