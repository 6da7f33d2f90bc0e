"""Curves of a job: however much is measured they stay small, and say what was measured."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.progress import Progress
from poprun.observe.account.curves import (
    MAX_NUMBERS,
    MAX_WINDOWS,
    InstanceCurves,
    JobCurves,
    WindowedCurve,
    curves_of,
    fold_curves,
)
from poprun.observe.account.state import InstanceStatus
from poprun.text.fields import write_record

values = st.floats(-1e9, 1e9)
samples = st.lists(st.tuples(st.floats(0, 1e7), values), min_size=1, max_size=30)


@given(samples, st.lists(samples, max_size=3))
def test_a_curve_is_bounded_and_lies_between_what_was_measured(
    points: list[tuple[float, float]], others: list[list[tuple[float, float]]]
) -> None:
    """The last value is kept; a fold has the least below the middle below the most."""
    instances = []
    for some in (points, *others):
        instances.append(InstanceCurves())
        for at_seconds, value in some:
            instances[-1].add("loss", "", at_seconds, value)
        curve = instances[-1].by_name["loss"]
        means = [it for it in curve.values(curve.window_seconds) if it is not None]
        assert 1 <= len(means) <= len(curve.values(curve.window_seconds)) <= MAX_WINDOWS
        assert min(value for _, value in some) - 1e-3 <= min(means)
        assert max(means) <= max(value for _, value in some) + 1e-3
        assert curve.last == some[-1][1]
    fold: Any = write_record(fold_curves(instances)["loss"])

    assert len(fold["seconds"]) == len(fold["min"]) <= MAX_WINDOWS
    for low, middle, high in zip(fold["min"], fold["median"], fold["max"], strict=True):
        assert (low is None) == (middle is None) == (high is None)
        assert low is None or middle is None or high is None or low <= middle <= high


def test_means_are_numbers_of_json() -> None:
    """However large what a program reports is."""
    curve = WindowedCurve("")
    for value in (1e308, 1.7e308):
        curve.add(0.0, value)

    assert json.dumps(curve.values(curve.window_seconds), allow_nan=False)


@given(st.lists(st.tuples(st.floats(0.01, 500), st.integers(0, 50)), min_size=1, max_size=40))
def test_a_rate_says_how_much_was_done(looks: list[tuple[float, int]]) -> None:
    """The area below the curve is what was done, also for steps that last longer than a window."""
    curves, now, total = InstanceCurves(), 0.0, 0.0
    curves.add_total("steps", "1/s", now, total)
    for gap, amount in looks:
        now, total = now + gap, total + amount
        curves.add_total("steps", "1/s", now, total)
    curve = curves.by_name["steps"]
    area = sum(it or 0.0 for it in curve.values(curve.window_seconds)[:-1]) * curve.window_seconds
    begun = (curve.values(curve.window_seconds)[-1] or 0.0) * (now % curve.window_seconds or curve.window_seconds)

    assert math.isclose(area + begun, total, rel_tol=1e-6, abs_tol=1e-6)
    assert curve.last == pytest.approx(looks[-1][1] / looks[-1][0], rel=1e-3)


def test_a_total_that_shrinks_begins_anew() -> None:
    """A process of the tree has ended, and its time is no longer there."""
    curves = InstanceCurves()
    for at_seconds, total in ((0.0, 5.0), (1.0, 2.0), (2.0, 3.0)):
        curves.add_total("cpu", "cores", at_seconds, total)

    assert curves.by_name["cpu"].values(1.0)[:2] == [None, 1.0]


def test_what_an_agent_sees_becomes_curves() -> None:
    """Steps as popdist counts them, numbers at their own moments; lines that are none are left out."""
    job = JobCurves(1, 100.0)
    status = InstanceStatus(index=0, progress=Progress(num_steps=4))
    good = json.dumps([7.5, {"loss": 0.5}])
    wrong = ["", "{", "[]", "[1]", '["x", {}]', "[1, 2]", '[1, {"a": "b"}]', '[1e400, {"far": 1}]', "[" * 9999]
    lines = "\n".join([good, *wrong, json.dumps([8.0, {"loss": math.nan}])])
    look = {"num_processes": 1, "memory_bytes": 10, "cpu_seconds": 1.0, "numbers": lines, "read_at_seconds": 9.0}
    job.add_look(status, look, 102.0)
    job.add_look(
        replace(status, progress=Progress(step=6)),
        {"num_processes": 1, "memory_bytes": 30, "cpu_seconds": 2.0},
        103.0,
    )
    job.add_look(status, {"num_processes": 0, "memory_bytes": 0, "cpu_seconds": 0.0}, 104.0)  # all have ended
    job.add_look(status, {"progress": ""}, 104.0)
    told = {name: write_record(curve) for name, curve in curves_of(job.instances[0]).items()}

    assert told == {
        "cpu": {"unit": "cores", "seconds": [1.0, 2.0, 3.0], "values": [None, None, 1.0], "last": 1.0},
        "memory": {
            "unit": "bytes",
            "seconds": [1.0, 2.0, 3.0, 4.0],
            "values": [None, None, 10.0, 30.0],
            "last": 30,
        },
        "numbers/far": {"unit": "", "seconds": [1.0, 2.0, 3.0], "values": [None, None, 1.0], "last": 1.0},
        "numbers/loss": {"unit": "", "seconds": [1.0], "values": [0.5], "last": "nan"},
        "steps_per_second": {"unit": "1/s", "seconds": [1.0, 2.0, 3.0], "values": [None, None, 2.0], "last": 2.0},
    }
    assert json.dumps(told, allow_nan=False)


def test_an_instance_has_no_more_numbers_than_the_library_lets_it_report() -> None:
    """Whoever writes into the pipe by itself cannot fill poprun's memory."""
    curves = InstanceCurves()
    curves.add_lines("\n".join(json.dumps([1, {str(it): it}]) for it in range(1000)), 0.0, 5.0)

    assert len(curves.by_name) == MAX_NUMBERS


def test_many_instances_are_folded() -> None:
    """With windows as wide as the widest; who has ended, or has not begun, does not count."""
    instances = [InstanceCurves() for _ in range(3)]
    for index, curves in enumerate(instances[:2]):
        curves.add("memory", "bytes", 0.5, 10.0 * (index + 1))
        curves.add("memory", "bytes", MAX_WINDOWS + index - 1.0, 50.0)
    folded: Any = write_record(fold_curves(instances)["memory"])

    assert (folded["unit"], folded["seconds"][:2], len(folded["min"])) == (
        "bytes",
        [2.0, 4.0],
        MAX_WINDOWS // 2 + 1,
    )
    assert [folded[name][0] for name in ("min", "median", "max")] == [10.0, 15.0, 20.0]
