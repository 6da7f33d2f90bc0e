"""The numbers that a program reports: what its pipe gets, and who else is told."""

import json
import math
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import popdist
from popdist.ground.progress import progress_page
from popdist.metrics import reported_numbers
from popdist.metrics.reported_numbers import MAX_NAMES, NumberPipe, _Reporting


@pytest.fixture(autouse=True)
def _reporting_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported_numbers, "_reporting", _Reporting())


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """A pipe as an agent makes it: where to read, and where to write."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def opened(writer: int) -> NumberPipe:
    """A pipe that writes there."""
    pipe = NumberPipe()
    pipe.open(f"{writer}:{os.fstat(writer).st_ino}")
    return pipe


def lines(reader: int) -> list[dict[str, float]]:
    """The numbers in each line that can be read now."""
    return [json.loads(line)[1] for line in os.read(reader, 2**16).splitlines()]


def test_the_last_value_of_each_number_is_written(ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come fast share a line, and those of another report stay in it; nothing waits for a reader."""
    now = [100.0]
    monkeypatch.setattr("popdist.metrics.reported_numbers.time.monotonic", lambda: now[0])
    reader, writer = ends
    pipe = opened(writer)
    pipe.send({"loss": 1.0})
    pipe.send({"loss": 2.0, "a": 5.0})
    pipe.send({"loss": math.nan})
    now[0] += 1
    pipe.send({"b": 6.0})

    first, second = lines(reader)
    assert first == {"loss": 1.0}
    assert math.isnan(second.pop("loss"))
    assert second == {"a": 5.0, "b": 6.0}
    for _ in range(2000):  # more than it holds
        now[0] += 1
        pipe.send({"x" * 90: now[0]})
    assert len(lines(reader)) < 2000
    pipe.flush()
    assert lines(reader) == [{"x" * 90: now[0]}]


@given(st.dictionaries(st.text(st.characters(categories=["L", "P", "S"]), min_size=1, max_size=25), st.floats()))
def test_every_line_is_whole(numbers: dict[str, float]) -> None:
    """However many numbers there are: a pipe takes that much at once."""
    reader, writer = os.pipe()
    pipe = opened(writer)
    pipe.send(numbers)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = file.read().splitlines(keepends=True)

    assert all(len(line) <= 4096 for line in told)
    assert {name for line in told for name in json.loads(line)[1]} == numbers.keys()


def test_a_pipe_of_another_process_is_left_alone(ends: tuple[int, int]) -> None:
    """A program may have inherited the variable, and not the pipe: the number may be that of a file of its own."""
    reader, writer = ends
    for place in ("", "x:y", f"{writer}:1", "9999:1", f"{2**80}:1", f"{writer}"):
        pipe = NumberPipe()
        pipe.open(place)
        pipe.send({"loss": 1.0})
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)


def test_a_reader_that_is_gone_is_no_error() -> None:
    """The agent was killed: the kernel ends the program, and until then it goes on."""
    reader, writer = os.pipe()
    pipe = opened(writer)
    os.close(reader)
    pipe.send({"loss": 1.0})
    pipe.send({"loss": 2.0})
    os.close(writer)


def test_outside_poprun_a_report_does_nothing() -> None:
    """The same program runs alone."""
    popdist.report(step=3, loss=1, accuracy=None)

    assert not progress_page.is_watched


@pytest.mark.parametrize("step", [-1, 1.5, "3", True])
def test_a_step_is_a_whole_number(step: int) -> None:
    """Anything else is refused, by name, also where nobody listens."""
    with pytest.raises(popdist.PopdistError, match="step="):
        popdist.report(step=step)


@pytest.mark.parametrize("value", ["0.5", b"1", [1.0], object(), 10**400])
def test_a_value_is_a_number(value: float) -> None:
    """As above."""
    with pytest.raises(popdist.PopdistError, match="loss="):
        popdist.report(loss=value)
    with pytest.raises(popdist.PopdistError, match="accuracy="):
        popdist.report(accuracy=value)


def test_names_are_few_and_printable() -> None:
    """A name is a curve: one that holds a step's number would make thousands of them."""
    for name in ("", "a\nb", "x" * 101, "\ud800"):
        with pytest.raises(popdist.PopdistError, match="printable"):
            popdist.report(**{name: 1.0})  # type: ignore[arg-type]  # names decide
    for number in range(MAX_NAMES):
        popdist.report(**{f"loss {number}": 1.0})  # type: ignore[arg-type]  # as above
    with pytest.raises(popdist.PopdistError, match=f"{MAX_NAMES} are possible"):
        popdist.report(another=1.0)


Told = list[tuple[dict[str, float], int | None]]


def test_callbacks_are_told_on_instance_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last step, before and after a job, until they are removed."""
    told: Told = []

    def listen(numbers: dict[str, float], step: int | None) -> None:
        told.append((numbers, step))
        popdist.report(step=99)  # tells nobody

    remove = popdist.on_report(listen)
    monkeypatch.setattr("popdist.metrics.reported_numbers.instance_index", lambda: 1)
    popdist.on_report(lambda *_: pytest.fail("instance 1 was told"))
    popdist.report(loss=0.5)
    popdist.report(step=7)
    popdist.init()
    popdist.report(step=8, loss=1, **{"accuracy/test": 0.25})
    popdist.finalize()
    popdist.report(loss=0.25)
    remove()
    remove()
    popdist.report(loss=9)

    assert told == [({"loss": 0.5}, None), ({"loss": 1.0, "accuracy/test": 0.25}, 8), ({"loss": 0.25}, 99)]


def test_a_callback_that_fails_is_told_of_once() -> None:
    """The training goes on, and so do the other callbacks."""
    told: Told = []

    def fail(numbers: dict[str, float], step: int | None) -> None:
        numbers.clear()
        raise ConnectionError(f"no server at step {step}")

    popdist.on_report(fail)
    popdist.on_report(lambda numbers, step: told.append((numbers, step)))
    with pytest.warns(
        popdist.PopdistWarning, match="fail, given to .* raised ConnectionError: no server at step 1"
    ):
        popdist.report(step=1, loss=2)
    popdist.report(step=2, loss=1)

    assert told == [({"loss": 2.0}, 1), ({"loss": 1.0}, 2)]
    with pytest.raises(popdist.PopdistError, match="expected a function"):
        popdist.on_report(None)  # type: ignore[arg-type]
