"""The merged trace of made-up recordings: aligned, well-formed, and with a table that says what was injected.

Holds poprun.observe.show.trace.recorded, poprun.observe.show.trace.joint_calls,
poprun.observe.show.trace.document, poprun.observe.show.trace.collection and
poprun.observe.show.trace.time_table.
"""

import gzip
import json
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poprun.errors import PlanError, UsageError
from poprun.launch.messages.clock import Exchange
from poprun.observe.account.arrivals import last_of
from poprun.observe.account.evidence import Call
from poprun.observe.show.trace.collection import TRACE_FILE, clock_of, collect_trace, prepare_folder
from poprun.observe.show.trace.document import lanes_of
from poprun.observe.show.trace.joint_calls import find_joint_calls
from poprun.observe.show.trace.recorded import About, read_about
from poprun.observe.show.trace.time_table import (
    TABLE_FILE,
    TraceTable,
    gains,
    read_table,
    render_table,
    seconds_within,
    union,
)
from poprun.plan.request import TraceSettings
from tests.planning import planned
from tests.trace_checks import faults

MS = 1_000_000
BEGAN_NS = 1_800_000_000_000 * MS
FORWARD, BACKWARD, REDUCE, OPTIMIZER = 4 * MS, 6 * MS, 2 * MS, 1 * MS


class Clock:
    """A program's clock that is ``ahead`` of poprun's and gains a ten-thousandth."""

    def __init__(self, ahead_ns: int) -> None:
        self._ahead_ns = ahead_ns

    def at(self, true_ns: int) -> int:
        """What it shows."""
        return true_ns + self._ahead_ns + (true_ns - BEGAN_NS) // 10_000

    def exchange(self, true_ns: int) -> list[int]:
        """One with the agent that takes 20 microseconds."""
        return [self.at(true_ns - 10_000), true_ns, self.at(true_ns + 10_000)]


def record(parts: str, index: int, steps: list[list[int]], data_ns: int, clock: Clock) -> dict[str, Any]:
    """Write what an instance has recorded of ``steps``, in which each instance sleeps as long as they say.

    Returns the truth, in nanoseconds: how long it waited for others, and for data.
    """
    events, calls, now, waited = [], [], BEGAN_NS, 0

    def add(name: str, category: str, true_ns: int, length: int, row: int = 7) -> None:
        begin, end = clock.at(true_ns), clock.at(true_ns + length)
        place = {"ph": "X", "pid": 5, "tid": row, "name": name, "cat": category}
        events.append({**place, "ts": (begin - BEGAN_NS) / 1000, "dur": (end - begin) / 1000})

    for number, sleeps in enumerate(steps):
        add("enumerate(DataLoader)#_Iter.__next__", "user_annotation", now, data_ns)
        add("aten::mm", "cpu_op", now + data_ns, FORWARD)
        arrives = [now + data_ns + FORWARD + sleep + BACKWARD for sleep in sleeps]
        arrival, ready = arrives[index], max(arrives)
        add("autograd::engine::evaluate_function: MmBackward0", "cpu_op", arrival - BACKWARD, BACKWARD)
        add("aten::mm", "cpu_op", arrival - BACKWARD, BACKWARD // 2)
        add("gloo:all_reduce", "user_annotation", arrival + 1000, ready + REDUCE - arrival - 1000, row=8)
        call = {"process_group": ["0"], "collective_seq_id": number, "profiling_name": "gloo:all_reduce"}
        calls.append({**call, "time_created_ns": clock.at(arrival), "is_p2p": False})
        add("Optimizer.step#SGD.step", "user_annotation", ready + REDUCE, OPTIMIZER)
        add("aten::add_", "cpu_op", ready + REDUCE, OPTIMIZER)
        waited += ready - arrival
        now = ready + REDUCE + OPTIMIZER
    arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 5, "tid": 7}
    ends = [{**arrow, "ph": kind, "ts": events[place]["ts"]} for kind, place in (("s", 1), ("f", 2))]
    trace = {"baseTimeNanoseconds": BEGAN_NS, "traceEvents": [*events, *ends, {**ends[0], "id": 2}]}
    about = {
        "pid": 5,
        "num_steps": len(steps),
        "problem": "",
        "thread": 7,
        "first_step": 0,
        "begun_ns": clock.at(BEGAN_NS),
        "ended_ns": clock.at(now),
        "exchanges": [clock.exchange(BEGAN_NS - MS), clock.exchange(now + MS)],
        "recorder": json.dumps({"entries": calls}),
        "waits": [[[], number, "step", clock.at(now - 100 + number), clock.at(now)] for number in (1, 2)],
    }
    Path(parts, f"instance-{index}.json").write_text(json.dumps(trace), encoding="utf-8")
    Path(parts, f"instance-{index}.about").write_text(json.dumps(about), encoding="utf-8")
    loaded = json.dumps([9, "__getitem__ (train.py)", clock.at(BEGAN_NS), clock.at(BEGAN_NS + MS)])
    Path(parts, f"instance-{index}.workers").write_text(f"{loaded}\ndamaged\n", encoding="utf-8")
    return {"waited": waited / 1e9, "data": data_ns * len(steps) / 1e9}


def merged(folder: str, num_instances: int) -> tuple[list[str], Any, TraceTable]:
    """What is said of the merging of one attempt, the trace, and its table."""
    plan = planned(num_instances=num_instances, trace=TraceSettings(folder=folder))
    said = list(collect_trace(plan, "job", 0, {}))
    with gzip.open(Path(folder, TRACE_FILE), "rt", encoding="utf-8") as file:
        document = json.load(file)
    return said, document, read_table(Path(folder, TABLE_FILE).read_text(encoding="utf-8"), folder)


def parts_of(folder: str, num_instances: int) -> str:
    """The folder for the recordings of such a job, which is made."""
    plan = planned(num_instances=num_instances, trace=TraceSettings(folder=folder))
    prepare_folder(plan, "job", 0)
    return plan.trace_parts("job", 0)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Sleeps by step and instance, waits for data, and how far each clock is ahead; in nanoseconds."""
    number = draw(st.integers(1, 4))
    sleeps = st.lists(st.integers(0, 50 * MS), min_size=number, max_size=number)
    aheads = st.integers(-10_000 * MS, 10_000 * MS)
    return (
        draw(st.lists(sleeps, min_size=1, max_size=4)),
        draw(st.lists(st.integers(0, 9 * MS), min_size=number, max_size=number)),
        draw(st.lists(aheads, min_size=number, max_size=number)),
    )


@settings(max_examples=30)
@given(jobs())
def test_the_table_says_what_was_injected(job: tuple[list[list[int]], list[int], list[int]]) -> None:
    """On whatever clocks it was recorded; and the trace is well-formed, with the lines of all collectives."""
    steps, data, aheads = job
    data = [data[0]] * len(data)  # the others would wait for it
    number = len(aheads)
    with tempfile.TemporaryDirectory() as folder:
        parts = parts_of(folder, number)
        truths = [record(parts, index, steps, data[index], Clock(ahead)) for index, ahead in enumerate(aheads)]
        said, document, table = merged(folder, number)
        assert {it.name for it in Path(folder).iterdir()} == {TRACE_FILE, TABLE_FILE}

    assert faults(document) == []
    assert len(said) == 2
    for times, truth in zip(table.instances, truths, strict=True):
        about = 1e-4 * len(steps)
        assert times.seconds["waiting"] == pytest.approx(truth["waited"], abs=about)
        assert times.seconds["data"] == pytest.approx(truth["data"], rel=1e-3, abs=1e-8)
        computed = (FORWARD + BACKWARD + OPTIMIZER) * len(steps) / 1e9
        assert times.seconds["compute"] == pytest.approx(computed, rel=1e-3)
    lasts = [step.index(max(step)) for step in steps]
    if number > 1 and all(max(step) - sorted(step)[-2] > MS for step in steps):
        reduced = [it for it in document["traceEvents"] if it["name"] == "gloo:all_reduce" and it["ph"] == "f"]
        assert sorted(it["pid"] - 1 for it in reduced) == sorted(lasts)
    lines = render_table(table, width=80, has_color=False).splitlines()
    headings = "instance data compute waiting communication outside" + " came last by ms" * (number > 1)
    assert (" ".join(lines[1].split()), len(lines) > 10) == (headings, True)
    assert sum(gains(table).values()) <= 1.0


def test_phases_and_rows_of_a_trace(tmp_path: Path) -> None:
    """Instances in order and named; rows of phases, collectives and workers; and how clocks were aligned."""
    parts = parts_of(str(tmp_path), 2)
    for index in range(2):
        record(parts, index, [[0, 30 * MS]], MS, Clock(index * 3000 * MS))
    _, document, table = merged(str(tmp_path), 2)

    events = document["traceEvents"]
    names = {it["tid"]: it["args"]["name"] for it in events if it["name"] == "thread_name"}
    assert list(names.values())[:6] == [
        *("phases", "collectives", "collectives 2", "main thread", "loader worker 9", "thread 8")
    ]
    phases = [it["name"] for it in events if it["ph"] == "X" and names[it["tid"]] == "phases" and it["pid"] == 2]
    assert phases == ["data", "forward", "backward", "optimizer"]
    titles = [it["args"]["name"] for it in events if it["name"] == "process_name"]
    assert titles == ["instance 0 (localhost, process 5)", "instance 1 (localhost, process 5)"]
    clock = document["poprun"]["instances"]["1"]
    assert clock["offset_seconds"] == pytest.approx(3.0, abs=1e-5)
    assert clock["drift"] == pytest.approx(1e-4, rel=1e-2)
    assert clock["uncertainty_seconds"] < 3e-5
    late = table.instances[1]
    assert (late.num_last, table.num_collectives) == (1, 3)  # to the others both came at the same time
    assert late.delay_seconds == pytest.approx(0.030, abs=1e-3)


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    """A killed program, a damaged recording, a clock that nobody compared, a program with its own profiler."""
    parts = parts_of(str(tmp_path), 6)
    for index in range(5):
        record(parts, index, [[0] * 6], MS, Clock(0))
    Path(parts, "instance-1.json").write_text('{"traceEvents": [{', encoding="utf-8")
    Path(parts, "instance-2.about").write_text("", encoding="utf-8")
    for index, changes in ((3, {"exchanges": [[]]}), (4, {"problem": "the program profiles itself"})):
        file = Path(parts, f"instance-{index}.about")
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    said, document, table = merged(str(tmp_path), 6)

    assert faults(document) == []
    assert [it.index for it in table.instances] == [0, 4]
    wanted = ("5: there is none", "2: it cannot be read: it is empty", "3: its clock", "4: the program profiles")
    assert all(any(f"instance {text}" in line for line in said) for text in wanted)
    assert Path(parts).is_dir()


def test_a_trace_of_nobody(tmp_path: Path) -> None:
    """Nothing is written, and why is said; an attempt that started nothing says nothing."""
    plan = planned(num_instances=1, trace=TraceSettings(folder=str(tmp_path)))
    parts = parts_of(str(tmp_path), 1)
    told = {"pid": 1, "num_steps": 3, "problem": "it ended after 3 optimizer steps"}
    Path(parts, "instance-0.about").write_text(json.dumps(told), encoding="utf-8")

    assert list(collect_trace(plan, "job", 0, {})) == [
        "warning: trace of instance 0: it ended after 3 optimizer steps"
    ]
    prepare_folder(plan, "job", 0)
    assert list(collect_trace(plan, "job", 0, None)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """It is an error before the job; a disk that is full afterwards is a warning."""
    (tmp_path / "file").touch()
    plan = planned(trace=TraceSettings(folder=str(tmp_path / "file" / "traces")))
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        prepare_folder(plan, "job", 0)
    record(parts_of(str(tmp_path / "there"), 1), 0, [[0]], 0, Clock(0))
    (tmp_path / "there" / TRACE_FILE).mkdir()
    plan = planned(trace=TraceSettings(folder=str(tmp_path / "there")))
    assert [line for line in collect_trace(plan, "job", 0, {}) if "cannot be written" in line]


def test_a_user_who_does_not_wait_for_the_merging(tmp_path: Path) -> None:
    """Nothing that was recorded is lost."""
    parts = parts_of(str(tmp_path), 1)
    record(parts, 0, [[0]], 0, Clock(0))
    plan = planned(num_instances=1, trace=TraceSettings(folder=str(tmp_path)))
    first, second = collect_trace(plan, "job", 0, {}, lambda: True)

    assert first.endswith(f"cannot be written to {tmp_path}: it was interrupted")
    assert second == f"  what was recorded is in {parts}"
    assert not Path(tmp_path, TRACE_FILE).exists()
    assert Path(parts, "instance-0.json").exists()


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (TraceSettings(steps=range(1, 2)), "give --trace DIR"),
        (TraceSettings(folder="t", steps=range(25, 20)), "--trace-steps 25:20 has no step"),
        (TraceSettings(folder="t", steps=range(20, 20)), "has no step"),
        (TraceSettings(folder="t", steps=range(1, 2), seconds=3.0), "cannot go together"),
        (TraceSettings(folder="t", seconds=0.0), "--trace-seconds 0 is not possible"),
        (TraceSettings(folder="t", seconds=float("nan")), "--trace-seconds nan is not possible"),
        (TraceSettings(folder=""), "--trace '' is not possible"),
    ],
)
def test_windows_that_are_refused(asked: TraceSettings, text: str) -> None:
    """The message says what to give."""
    with pytest.raises(PlanError, match=text):
        planned(trace=asked)


def test_clocks_of_other_hosts_count_with_their_uncertainty() -> None:
    """Exchanges around the window count; a host that never answered leaves the clock unknown."""
    about = About(
        pid=1,
        num_steps=1,
        begun_ns=BEGAN_NS,
        ended_ns=BEGAN_NS + 100 * MS,
        exchanges=(
            Exchange(BEGAN_NS - 2, BEGAN_NS + 5, BEGAN_NS),
            Exchange(BEGAN_NS + 100 * MS, BEGAN_NS + 100 * MS + 7, BEGAN_NS + 100 * MS + 2),
        ),
    )
    rounds = [
        Exchange(at, at + 4000 * MS + MS // 2, at + MS) for at in range(BEGAN_NS - 9000 * MS, BEGAN_NS, 1000 * MS)
    ]

    clock = clock_of(about, rounds)
    assert clock is not None
    assert clock.to_ours(BEGAN_NS) == pytest.approx(BEGAN_NS - 4000 * MS, abs=100)
    assert clock.offset_seconds == pytest.approx(4.0)
    assert 5e-4 < clock.uncertainty_seconds < 2e-3
    assert clock_of(about, []) is None
    assert clock_of(replace(about, ended_ns=BEGAN_NS - 60_000 * MS), rounds) is not None  # it was set back


def test_groups_of_popdists_are_told_apart() -> None:
    """Two that do the same at the same time, and all instances, who follow."""
    about = {"pid": 1, "num_steps": 1, "problem": "", "thread": 1, "first_step": 0, "begun_ns": 0, "ended_ns": 9}
    calls = {}
    for index, members in enumerate(([0, 2], [1, 3], [0, 2], [1, 3])):
        waits = [[members, 1, "step", index, 9], [[], 2, "barrier", index, 9]]
        text = json.dumps({**about, "exchanges": [], "recorder": "", "waits": waits})
        calls[index] = read_about(text).calls
    joint = find_joint_calls(calls)

    assert [sorted(it) for it in joint.values()] == [[0, 2], [0, 1, 2, 3], [1, 3]]
    assert [last_of(it) for it in joint.values()] == [2, 3, 3]


def test_names_of_operations_move_no_terminal() -> None:
    """Programs have written them."""
    operation = {"name": "add\x1b[2J", "num_calls": 1, "seconds": 1.0}
    table = {"version": 1, "num_steps": 1, "num_collectives": 0, "instances": [], "operations": [operation]}
    assert read_table(json.dumps(table), "traces").operations[0].name == "add\\x1b[2J"


def test_a_damaged_table_is_refused() -> None:
    """In words, with the folder's name."""
    for text in ("{", "[]", '{"version": 9}', '{"version": 1}'):
        with pytest.raises(PlanError, match="traces"):
            read_table(text, "traces")


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=8)


@given(spans, st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted))
def test_spans_are_sets(some: list[tuple[int, int]], window: tuple[int, int]) -> None:
    """Their union has all places that they cover, in order, and as many seconds of a window as places in it."""
    places = {at for begin, end in some for at in range(begin, end)}
    covered = union(some)

    assert [at for begin, end in covered for at in range(begin, end)] == sorted(places)
    assert seconds_within(covered, window) == len(places.intersection(range(*window))) / 1e9


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=12))
def test_calls_of_a_row_do_not_overlap(made: list[tuple[int, int]]) -> None:
    """Several collectives at once stand on rows of their own."""
    placed = lanes_of(
        Call(group="0", number=number, name="a", begin_ns=begin, end_ns=end)
        for number, (begin, end) in enumerate(made)
    )
    for lane in {lane for lane, _ in placed}:
        own = [call for other, call in placed if other == lane]
        assert all(one.end_ns <= following.begin_ns for one, following in pairwise(own))
