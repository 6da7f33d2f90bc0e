"""The page of a job: what it says of any report, and that nothing a program printed is more than text.

Holds poprun.observe.show.page.sections, poprun.observe.show.page.charts and
poprun.observe.account.time_shares.
"""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poprun.observe.account.job_record import AttemptRecord, Curve, InstanceRecord, JobRecord
from poprun.observe.account.state import InstanceStatus
from poprun.observe.account.time_shares import find_job_time
from poprun.observe.show.page import render_page
from poprun.observe.show.page.charts import Chart, Line, charts_of, render_charts
from poprun.observe.show.report_file import record_job
from tests.measured_jobs import NETWORK, measured_end, measured_job
from tests.planning import planned

FOUR = measured_job(4, 600.0, first="\x1b[1;32mepoch 1\x1b[0m", second="epoch 2")


class Elements(HTMLParser):
    """What a page is made of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        """Its text."""
        self.words.append(data)


def text_of(job: JobRecord) -> str:
    """What a reader of a job's page reads."""
    return "\n".join(Elements(render_page(job)).words)


def test_the_page_says_what_ran_and_how_fast() -> None:
    """The figures and the parts of the time, the curves, the instances and their last lines."""
    text = text_of(FOUR)

    for words in (
        *("ended well", "python train.py", "10 min", "goodput", "59%", "most memory of an instance", "2.0 GiB"),
        *(
            "waiting for the slowest",
            "loss",
            "number 1",
            "steps a second",
            "processors in use",
            "last lines of instance 3",
        ),
        *("epoch 1\nepoch 2", "localhost", "35,560"),
        *("the network is slow since step 120: communication takes 48 ms a step (39%)", "the memory grows"),
    ):
        assert words in text, words
    assert "not measured" not in text


def test_the_parts_of_the_time_add_up() -> None:
    """Of every instance, over a restart too; what nobody measured is said to be so."""
    whole = find_job_time(FOUR.attempts)
    assert whole.goodput == pytest.approx(0.6 * 0.98)
    assert sum(whole.mean_seconds.values()) == pytest.approx(600)

    plan = planned(num_instances=2)
    lost = InstanceStatus(index=1)
    first = replace(measured_end(2, 100.0), statuses=[measured_end(1, 100.0).statuses[0], lost])
    job = record_job(plan, "j", [first, measured_end(2, 300.0, 102.0)])
    time = find_job_time(job.attempts)

    assert time.elapsed_seconds == pytest.approx(402)
    assert [sum(it.values()) for it in time.instances] == pytest.approx([402, 402])
    assert time.instances[0]["restart"] == pytest.approx(2 + 3)
    assert time.instances[1]["start"] == pytest.approx(100)
    assert time.goodput is None
    text = text_of(job)
    assert "Phases of the programs were not measured" in text
    assert "attempt 1\n ended well after 5 min" in text


def test_a_job_that_runs_or_never_ran_has_a_page() -> None:
    """From the first moment on; an error of poprun itself is there, too."""
    running = replace(measured_end(2, 50.0), is_over=False)
    starting = replace(running, statuses=[InstanceStatus(index=0)], curves=None, seconds=0.0)
    plan = planned(num_instances=2)

    assert "running" in text_of(record_job(plan, "j", [running]))
    text = text_of(record_job(plan, "j", [running, running], error="no such host"))
    assert "no such host\nattempt 0\n runs for 50 s" in text
    assert text.count("How it ended") == 1
    assert "never ran" in text_of(record_job(planned(), "j", [starting]))
    text = text_of(record_job(None, "j", [], error="no such host"))
    assert "job j" in text
    assert "no such host" in text


HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\0\ud800&lt;"


def test_hostile_text_stays_text() -> None:
    """In what is printed, in names of numbers, in the program, in a slowdown and in a warning."""
    job = measured_job(4, 60.0, line=HOSTILE)
    word = HOSTILE.replace("\0", "").replace("\ud800", "")  # what no program can be given
    (attempt,) = job.attempts
    assert job.plan is not None
    hostile = replace(
        attempt,
        printed=(HOSTILE,),
        slowdowns=(replace(NETWORK, reasons=(HOSTILE,)),),
        warnings=(HOSTILE,),
        instances=tuple(map(_hostile, attempt.instances)),
    )
    job = replace(
        job,
        plan=replace(job.plan, program=("python", word)),
        error=HOSTILE,
        job_id=HOSTILE,
        provenance={"torch": HOSTILE, "revision": HOSTILE},
        attempts=(hostile,),
    )
    page = render_page(job)
    elements = Elements(page)

    assert elements.tags.count("script") == 1
    assert not {"img", "a", "iframe", "link"} & {*elements.tags}
    assert page.encode()
    assert not {"\x1b", "\0"} & {*page}


def _hostile(instance: InstanceRecord) -> InstanceRecord:
    curves = dict(instance.curves)
    curves[f"numbers/{HOSTILE}"] = curves.pop("numbers/loss")
    return replace(instance, problem=HOSTILE, host=HOSTILE, curves=curves)


def test_the_page_of_a_large_job_is_small() -> None:
    """Of an hour of 64 instances that report 20 numbers and print long lines; beyond 16 they are folded."""
    end = replace(measured_end(64, 3600.0, names=20), last_lines={it: ["<" * 2000] * 20 for it in range(64)})
    plan = planned(num_instances=64)
    job = record_job(plan, "j", [end])
    page = render_page(job)

    assert len(page.encode()) < 2_000_000
    assert page.count('class="curve middle"') == len(charts_of(job.attempts, [0.0]))


def test_a_number_that_was_never_finite_has_no_line() -> None:
    """The chart still says what it is at the end."""
    job = measured_job(4, 60.0)
    (attempt,) = job.attempts
    first = replace(attempt.instances[0], curves={"numbers/loss": Curve(seconds=(), values=(), last="nan")})
    job = replace(job, attempts=(replace(attempt, instances=(first, *attempt.instances[1:])),))
    loss, *others = charts_of(job.attempts, [0.0])

    assert (loss.title, loss.last) == ("loss", "nan")
    assert [line.name for line in loss.lines] == ["instance 1", "instance 2", "instance 3"]
    assert len(others) == 4
    assert "nan" in text_of(job)


@example([[(0.0, -9007199254740996.0)]], "1/s", 0.0)
@example([[(0.0, 5e-324)]], "", 0.0)
@given(
    st.lists(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e300, 1e300)), max_size=9), max_size=3),
    st.sampled_from(["", "1/s", "bytes"]),
    st.floats(0, 1e7),
)
def test_any_curve_has_a_chart(parts: list[list[tuple[float, float]]], unit: str, seconds: float) -> None:
    """All its points lie on the grid."""
    chart = Chart(title="x", unit=unit, lines=[Line(name="a", parts=parts, style="h0")])
    drawn = render_charts([chart], seconds, [])
    path = drawn.partition('class="curve h0"')[2].partition('d="')[2].partition('"')[0]

    places = [point.split() for point in path.replace("h0", "").replace("M", "L").split("L")[1:]]
    assert len(places) == sum(map(len, parts))
    assert all(0 <= int(number) <= 1000 for place in places for number in place)


def test_one_legend_stands_above_charts_with_the_same_lines() -> None:
    """A chart with other lines has its own; a chart of poprun's without any value is left out."""
    both = [
        Line(name=f"instance {index}", style=f"h{index}", parts=[[(0.0, 1.0), (1.0, 2.0)]]) for index in range(2)
    ]
    charts = [Chart(title=title, unit="", lines=both) for title in ("cpu", "memory")]
    drawn = render_charts([*charts, Chart(title="loss", unit="", lines=both[:1])], 2.0, [])
    idle, busy = (Curve(seconds=(1.0, 2.0), values=values, last=0.0) for values in ((0.0, 0.0), (0.0, 1.0)))
    one = InstanceRecord(index=0, host="n1", curves={"steps_per_second": idle, "cpu": busy, "numbers/loss": idle})
    attempt = AttemptRecord(started_at="", duration_seconds=2.0, exit_code=0, instances=(one,))

    assert drawn.count('class="key h1">instance 1<') == 1
    assert drawn.count('class="key h0">instance 0<') == 2
    assert drawn.index('class="series"') < drawn.index("<figure")
    assert [chart.title for chart in charts_of([attempt], [0.0])] == ["loss", "processors in use"]
