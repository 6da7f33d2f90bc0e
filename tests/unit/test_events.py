"""What an agent's event makes of its instance's status, as a table: what was, what came, what is."""

import errno
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.progress import USED_BYTES, Progress, ProgressPage
from poprun.job.record import after_event
from poprun.job.state import (
    AGENT_KILLED,
    HOST_LOST,
    NOT_BOUND,
    NOT_EXECUTABLE,
    NOT_FOUND,
    SHIM_KILLED,
    InstanceState,
    InstanceStatus,
    MemoryCurve,
    Phase,
    Usage,
)
from poprun.messages.control import LOST

NOW = 50.0
AWAITED = InstanceStatus(index=0)
READY = replace(AWAITED, state=InstanceState.READY)
RUNNING = replace(READY, state=InstanceState.RUNNING, started_at_seconds=40.0)
ENDED = replace(RUNNING, state=InstanceState.ENDED, exit_code=0, exited_at_seconds=45.0)
FAILED = replace(RUNNING, state=InstanceState.EXITED, exit_code=3, exited_at_seconds=45.0)
LOST_SHIM = replace(RUNNING, problem=SHIM_KILLED, exited_at_seconds=NOW)

HELLO = {"event": "hello"}
EXITED = {"event": "exited", "code": 7, "at_seconds": 49.0, "was_stopped": False, "peak_bytes": 11}
SHIM_LOST = {"event": "shim_lost"}
HUNG_UP = {"event": LOST, "is_silent": False}
SILENT = {"event": LOST, "is_silent": True}

AFTER_EXIT = replace(
    RUNNING, state=InstanceState.EXITED, exit_code=7, exited_at_seconds=49.0, memory=MemoryCurve(peak_bytes=11)
)

TABLE: list[tuple[InstanceStatus, dict[str, Any], Phase, InstanceStatus]] = [
    (AWAITED, HELLO, Phase.STARTING, READY),
    (READY, {"event": "started", "pid": 9}, Phase.RUNNING, replace(RUNNING, started_at_seconds=NOW)),
    (RUNNING, EXITED, Phase.RUNNING, AFTER_EXIT),
    (RUNNING, {**EXITED, "was_stopped": True}, Phase.STOPPING, replace(AFTER_EXIT, was_stopped=True)),
    (RUNNING, EXITED, Phase.INTERRUPTED, replace(AFTER_EXIT, was_stopped=True)),
    (RUNNING, EXITED, Phase.STOPPING, AFTER_EXIT),  # it failed by itself before its agent heard the order
    (FAILED, {"event": "ended"}, Phase.STOPPING, replace(FAILED, state=InstanceState.ENDED)),
    (RUNNING, SHIM_LOST, Phase.RUNNING, LOST_SHIM),
    (RUNNING, SHIM_LOST, Phase.INTERRUPTED, RUNNING),
    (RUNNING, SHIM_LOST, Phase.STOPPING, RUNNING),
    (ENDED, SHIM_LOST, Phase.RUNNING, ENDED),
    (FAILED, SHIM_LOST, Phase.RUNNING, FAILED),
    (RUNNING, HUNG_UP, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED, problem=AGENT_KILLED)),
    (RUNNING, SILENT, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED, problem=HOST_LOST)),
    (RUNNING, HUNG_UP, Phase.STOPPING, replace(RUNNING, state=InstanceState.ENDED)),
    (RUNNING, SILENT, Phase.KILLING, replace(RUNNING, state=InstanceState.ENDED)),
    (FAILED, HUNG_UP, Phase.RUNNING, replace(FAILED, state=InstanceState.ENDED)),
    (LOST_SHIM, HUNG_UP, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED)),
    (ENDED, HUNG_UP, Phase.RUNNING, ENDED),
    (RUNNING, {"event": "signal_unhandled", "signal": 1}, Phase.RUNNING, RUNNING),
    (RUNNING, {"event": "stacks", "text": "", "processes": []}, Phase.RUNNING, RUNNING),
]


@pytest.mark.parametrize(("before", "event", "phase", "after"), TABLE)
def test_each_event_has_its_status(
    before: InstanceStatus, event: dict[str, Any], phase: Phase, after: InstanceStatus
) -> None:
    """One row, one event."""
    assert after_event(before, event, phase, NOW) == after


def test_an_agent_that_cannot_begin_says_why() -> None:
    """Before its program has started the error number is the reason; afterwards the program is lost with it."""
    lost = {"event": "agent_lost", "instance": 0, "errno": errno.EMFILE}
    cannot_start = replace(
        AWAITED,
        state=InstanceState.ENDED,
        exit_code=NOT_BOUND,
        problem="its agent cannot start: too many open files: raise the limit with `ulimit -n`",
        exited_at_seconds=NOW,
    )

    assert after_event(AWAITED, lost, Phase.STARTING, NOW) == cannot_start
    assert after_event(AWAITED, {**lost, "errno": 0}, Phase.STARTING, NOW).problem == AGENT_KILLED
    assert after_event(RUNNING, lost, Phase.RUNNING, NOW).problem == AGENT_KILLED
    assert after_event(AWAITED, lost, Phase.STOPPING, NOW).problem == ""


FAILED_STARTS = [
    (
        {"event": "failed_to_start", "errno": errno.EAGAIN, "place": "x"},
        NOT_BOUND,
        "cannot run x: too many processes: raise the limit with `ulimit -u`, or that of the control group",
    ),
    (
        {"event": "failed_to_start", "errno": errno.ENOENT, "place": "x"},
        NOT_FOUND,
        "cannot run x: No such file or directory",
    ),
    (
        {"event": "failed_to_start", "errno": errno.EACCES, "place": "x"},
        NOT_EXECUTABLE,
        "cannot run x: Permission denied",
    ),
    (
        {"event": "failed_to_start", "errno": errno.ENOEXEC, "place": "x"},
        NOT_EXECUTABLE,
        "cannot run x: it is neither a program for this machine nor a script that begins with #!",
    ),
    (
        {"event": "failed_to_bind", "errno": errno.EINVAL, "cores": [3, 2, 7]},
        NOT_BOUND,
        (
            "cannot be bound to cores 2-3,7, not all of which are to be had here (Invalid argument): "
            "make the plan on such a machine, or use --process-placement disabled"
        ),
    ),
    (
        {"event": "failed_to_hold", "errno": errno.ECONNREFUSED},
        NOT_BOUND,
        "who kept the job's lease on this host has ended (Connection refused): start it again",
    ),
]


@pytest.mark.parametrize(("event", "exit_code", "problem"), FAILED_STARTS)
def test_a_program_that_cannot_be_started(event: dict[str, Any], exit_code: int, problem: str) -> None:
    """The instance has failed, with an exit code of a shell's and a reason; it would not run the next time."""
    status = after_event(READY, event, Phase.RUNNING, NOW)

    assert (status.state, status.exit_code, status.problem) == (InstanceState.EXITED, exit_code, problem)
    assert status.exited_at_seconds == NOW
    assert status.cannot_run


def page(progress: Progress) -> str:
    """The bytes of a page on which this stands, as an event has them."""
    memory = bytearray(USED_BYTES)
    ProgressPage(memoryview(memory)).write(progress)
    return memory.hex()


STEP = Progress(pid=1, has_joined=True, num_steps=4)


def test_a_look_at_a_program_says_what_it_uses_and_how_far_it_is() -> None:
    """A look that shows the same progress changes nothing of when it was made."""
    look = {
        "event": "stats",
        "memory_bytes": 100,
        "cpu_seconds": 2.5,
        "num_processes": 3,
        "progress": page(STEP),
    }
    first = after_event(RUNNING, look, Phase.RUNNING, NOW)
    second = after_event(first, {**look, "memory_bytes": 80}, Phase.RUNNING, NOW + 1)

    assert first.usage == Usage(at_seconds=NOW, memory_bytes=100, cpu_seconds=2.5, num_processes=3)
    assert (first.progress, first.progressed_at_seconds) == (STEP, NOW)
    assert (second.progress, second.progressed_at_seconds) == (STEP, NOW)
    assert (second.memory.peak_bytes, second.memory.samples) == (100, ((NOW, 100), (NOW + 1, 80)))


def test_the_last_look_is_at_the_page_only() -> None:
    """The program has ended: nothing of it can be measured."""
    status = after_event(RUNNING, {"event": "stats", "progress": page(STEP)}, Phase.RUNNING, NOW)

    assert (status.progress, status.usage) == (STEP, None)


@pytest.mark.parametrize("words", ["", "00", page(STEP)[:-2], "02" + page(STEP)[2:]])
def test_a_page_that_is_no_whole_one_says_nothing(words: str) -> None:
    """It was too short, or read in the middle of a change."""
    assert after_event(RUNNING, {"event": "stats", "progress": words}, Phase.RUNNING, NOW) == RUNNING


LATE = [HUNG_UP, SILENT, SHIM_LOST, {"event": "ended"}, {"event": "stacks"}, {"event": "signal_unhandled"}]


@given(st.lists(st.sampled_from(LATE)), st.sampled_from(Phase))
def test_what_has_ended_stays_so_and_the_first_problem_wins(events: list[dict[str, Any]], phase: Phase) -> None:
    """Whatever is heard late, no instance lives again, and why it ended is not forgotten."""
    status = after_event(RUNNING, HUNG_UP, Phase.RUNNING, NOW)
    for event in events:
        status = after_event(status, event, phase, NOW + 1)

    assert (status.state, status.problem, status.exited_at_seconds) == (InstanceState.ENDED, AGENT_KILLED, NOW)


def test_an_instance_is_busy_when_its_processes_compute_or_change() -> None:
    """A few ticks of the processor between two looks are none; a look after one more process is."""
    look = {"event": "stats", "memory_bytes": 1, "num_processes": 1, "progress": page(STEP), "cpu_seconds": 2.0}
    first = after_event(RUNNING, look, Phase.RUNNING, NOW)
    idle = after_event(first, {**look, "cpu_seconds": 2.04}, Phase.RUNNING, NOW + 1)

    assert (first.busy_at_seconds, idle.busy_at_seconds) == (NOW, NOW)
    for change in ({"cpu_seconds": 2.5}, {"num_processes": 2}, {"cpu_seconds": 1.0}):
        assert after_event(idle, {**look, **change}, Phase.RUNNING, NOW + 2).busy_at_seconds == NOW + 2
