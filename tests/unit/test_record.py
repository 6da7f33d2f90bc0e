"""What an agent's event makes of its instance's status, and the snapshot that the policy then sees, as tables.

Holds poprun.observe.account.state.
"""

import errno
import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.contract import Endpoint
from popdist.ground.progress import USED_BYTES, Progress, ProgressPage
from poprun.job.record import Record, after_event
from poprun.job.signals import ReceivedSignals
from poprun.launch.launchers import StartWatch
from poprun.launch.messages.control import LOST
from poprun.launch.routes import HostRoute, JobKey, JobNetwork
from poprun.observe.account.job_identity import JobIdentity
from poprun.observe.account.state import (
    AGENT_FROZEN,
    AGENT_KILLED,
    FROZEN_SECONDS,
    HOST_LOST,
    NOT_BOUND,
    NOT_EXECUTABLE,
    NOT_FOUND,
    OWN_NETWORK_LOST,
    RUNTIME_KILLED,
    SHIM_KILLED,
    InstanceState,
    InstanceStatus,
    JobSnapshot,
    MemoryCurve,
    Phase,
    Usage,
)
from poprun.observe.judge.job_end import JobEnd, exit_code
from poprun.observe.show.printed_report import render_end
from tests.planning import CLUSTER_NODE, planned

IDENTITY = JobIdentity(job_id="j", restart_count=1, began_at_seconds=80.0)
NETWORK = JobNetwork(
    control_host="10.0.0.1",
    hosts=(HostRoute(name="localhost", address="10.0.0.1", interface="eth0"),),
    key=JobKey(text="", file=""),
)
NOW = 103.0

Events = list[tuple[int, dict[str, Any]]]


def hello(instance: int) -> tuple[int, dict[str, Any]]:
    """The first event of an instance's agent."""
    pid = 20 + instance
    message = {
        "event": "hello",
        "pid": pid,
        "shim": pid + 100,
        "runtime": 5,
        "address": "10.0.0.1",
        "ports": [1, 2],
    }
    return instance, message


def exited(instance: int, code: int = 0, at_seconds: float = 102.0) -> tuple[int, dict[str, Any]]:
    """The event at a program's end."""
    event = {"event": "exited", "code": code, "at_seconds": at_seconds, "was_stopped": False, "peak_bytes": 0}
    return instance, event


def recorded(events: Events, identity: JobIdentity = IDENTITY) -> Record:
    """The record of an attempt with two instances that began at 100 s."""
    record = Record(planned(num_instances=2), identity, now_seconds=100.0)
    for instance, event in events:
        record.add_event(instance, event, 102.5)
    return record


def snapshot(record: Record) -> JobSnapshot:
    """What the policy sees, when nobody has sent a signal."""
    return record.snapshot(
        ReceivedSignals(),
        StartWatch(100.0, None),
        awaits_stacks=False,
        awaits_culprit=False,
        has_launcher_ended=False,
        now_seconds=NOW,
    )


START = JobSnapshot(phase=Phase.STARTING, in_phase_seconds=3.0, in_job_seconds=23.0, num_instances=2)
STARTED = [(index, {"event": "started", "pid": 30 + index}) for index in range(2)]
HELLOS = [hello(0), hello(1)]
ENDED = {"event": "ended"}

TABLE: list[tuple[Events, JobSnapshot]] = [
    ([], START),
    ([hello(1)], replace(START, num_ready=1)),
    (HELLOS, replace(START, num_ready=2)),
    ([*HELLOS, *STARTED], START),
    ([*HELLOS, *STARTED, exited(0), (0, ENDED)], replace(START, num_ended=1)),
    ([*HELLOS, *STARTED, exited(1, 3)], replace(START, failed_instance=1)),
    ([*HELLOS, *STARTED, exited(1, 3), exited(0, 3, 101.0)], replace(START, failed_instance=0)),
    ([(1, {"event": LOST, "is_silent": False})], replace(START, num_ended=1, failed_instance=1)),
    ([hello(0), (0, {"event": "shim_lost"})], replace(START, num_ready=1, failed_instance=0)),
]


@pytest.mark.parametrize(("events", "seen"), TABLE)
def test_each_history_has_its_snapshot(events: Events, seen: JobSnapshot) -> None:
    """One row, one attempt so far."""
    assert snapshot(recorded(events)) == seen


def test_a_phase_has_its_own_clock() -> None:
    """The job's clock began with its first attempt."""
    record = recorded(HELLOS)
    record.enter(Phase.RUNNING, 102.0)

    seen = snapshot(record)

    assert (seen.phase, seen.in_phase_seconds, seen.in_job_seconds) == (Phase.RUNNING, 1.0, 23.0)


def test_who_records_its_calls_is_asked_once_after_a_failure() -> None:
    """For a moment; what was told before is forgotten, and where a program stood says nothing of its end."""
    page = bytearray(USED_BYTES)
    ProgressPage(memoryview(page)).write(Progress(pid=9, recorder=4))
    stats = {"event": "stats", "progress": page.hex()}
    stacks = {"event": "stacks", "text": "", "processes": ["process 9"]}
    before = [*HELLOS, *STARTED, (0, stats), (1, stats), (0, stacks), (1, stacks)]
    record = recorded([*before, exited(1, 3)])
    assert snapshot(record).has_recorders
    assert not snapshot(recorded(before)).has_recorders

    assert record.ask(103.0) == [0]
    assert record.evidence == {}
    assert (record.awaits_evidence(103.3), record.awaits_evidence(103.5)) == (True, False)
    record.add_event(0, stacks, 103.1)

    assert not record.awaits_evidence(103.1)
    assert list(record.evidence) == [0]
    assert not snapshot(record).has_recorders
    record.add_event(0, {**exited(0)[1], "was_stopped": True, "full_disks": ["/tmp"]}, 103.2)
    assert record.evidence[0].full_disks == ("/tmp",)
    assert record.evidence[0].stacks.processes == ("process 9",)


def test_who_has_reported_and_where_the_stores_listen() -> None:
    """Agents and their shims; the ports are those at which the program of the instance is to listen."""
    record = recorded([hello(1)])
    assert (record.reported, [*record.endpoints]) == ({21, 121}, [1])

    record.add_event(*hello(0), 102.5)

    assert record.reported == {20, 21, 120, 121}
    assert record.endpoints[0] == (Endpoint(host="10.0.0.1", port=1), Endpoint(host="10.0.0.1", port=2))


def test_who_says_nothing_is_frozen_but_not_in_a_pause_of_poprun_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come each second; a longer step is one in which poprun was stopped, too, and no hang either."""
    record = recorded([*HELLOS, *STARTED])
    pauses: list[float] = []
    monkeypatch.setattr(record.hang_watch, "begin_anew", pauses.append)
    record.enter(Phase.RUNNING, 100.0)
    seconds = [100.0 + second for second in range(int(FROZEN_SECONDS))]
    frozen = [record.frozen_instances(now) for now in (*seconds, 9000.0)]
    record.add_event(1, {"event": "stats", "progress": ""}, 9000.0)

    assert pauses == [9000.0]
    assert not any(frozen[:-1])
    assert frozen[-1] == [0, 1]
    assert record.frozen_instances(9001.0) == [0]
    record.enter(Phase.STOPPING, 9001.0)
    assert record.frozen_instances(19001.0) == []


def test_nobody_waits_for_agents_that_were_given_up() -> None:
    """Those that have reported still have to end."""
    record = recorded([hello(0)])
    record.give_up_awaited()

    assert [status.state for status in record.statuses] == [InstanceState.READY, InstanceState.ENDED]
    assert snapshot(record).failed_instance is None


def test_clocks_of_other_hosts_do_not_say_who_failed_first() -> None:
    """On one machine the agent's reading counts, between hosts the moment at which poprun heard of it."""
    here, far = (recorded([exited(0)], identity) for identity in (IDENTITY, replace(IDENTITY, network=NETWORK)))

    assert (here.statuses[0].exited_at_seconds, far.statuses[0].exited_at_seconds) == (102.0, 102.5)


@pytest.mark.parametrize(
    ("own_address", "silent", "problem"),
    [
        ("10.0.0.1", (1, 2), OWN_NETWORK_LOST),
        ("10.0.0.1", (2,), HOST_LOST),
        ("10.0.0.9", (1, 2), HOST_LOST),
        ("10.0.0.9", (0, 1, 2), OWN_NETWORK_LOST),
    ],
)
def test_when_all_other_hosts_are_silent_the_network_is_poprun_s_own(
    own_address: str, silent: tuple[int, ...], problem: str
) -> None:
    """Also of those that are heard to be lost while the job is being stopped for the first one."""
    hosts = ("a", "b", "c")
    routes = tuple(HostRoute(name=it, address=f"10.0.0.{1 + n}", interface="") for n, it in enumerate(hosts))
    identity = replace(IDENTITY, network=replace(NETWORK, control_host=own_address, hosts=routes))
    record = Record(planned(CLUSTER_NODE, hosts=hosts, num_instances=3), identity, NOW)
    for index in range(3):
        record.add_event(index, {"event": "started"}, NOW)
    for index in silent:
        record.add_event(index, SILENT, NOW)
        record.enter(Phase.STOPPING, NOW)

    assert [it.problem for it in record.statuses] == [problem if index in silent else "" for index in range(3)]
    end = JobEnd(statuses=record.statuses)
    assert exit_code(end) == 68
    assert (render_end(end, record.plan) == [OWN_NETWORK_LOST]) is (problem == OWN_NETWORK_LOST)


def test_a_shim_that_can_be_heard_tells_that_its_agent_was_killed() -> None:
    """So its host is not lost, whichever of the two poprun hears first."""
    record = Record(planned(num_instances=1), IDENTITY, NOW)
    for event in ({"event": "started"}, SILENT, {"event": "agent_lost", "errno": 0}):
        record.add_event(0, event, NOW)

    assert record.statuses[0].problem == AGENT_KILLED


def test_signals_shims_and_stacks_are_seen() -> None:
    """What others know is passed on as it is."""
    signals, watch = ReceivedSignals(), StartWatch(100.0, None)
    with signals:
        for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(signum)
    signals.note_closed_output(BrokenPipeError(errno.EPIPE, "late, from the thread that writes"))
    watch.note_living({7}, set(), 101.0)
    watch.note_living(set(), set(), 102.0)
    watch.note_living(set(), set(), 102.5)

    seen = recorded([]).snapshot(
        signals, watch, awaits_stacks=True, awaits_culprit=True, has_launcher_ended=True, now_seconds=NOW
    )

    assert seen == replace(
        START,
        num_interrupts=2,
        is_terminated=True,
        is_output_closed=True,
        awaits_stacks=True,
        awaits_culprit=True,
        has_lost_shim=True,
        no_shim_seconds=0.5,
        has_launcher_ended=True,
    )


THEN = 50.0
AWAITED = InstanceStatus(index=0)
READY = replace(AWAITED, state=InstanceState.READY)
RUNNING = replace(READY, state=InstanceState.RUNNING, started_at_seconds=40.0)
HAS_ENDED = replace(RUNNING, state=InstanceState.ENDED, exit_code=0, exited_at_seconds=45.0)
FAILED = replace(RUNNING, state=InstanceState.EXITED, exit_code=3, exited_at_seconds=45.0)
LOST_SHIM = replace(RUNNING, problem=SHIM_KILLED, exited_at_seconds=THEN)

HELLO = {"event": "hello"}
EXITED = {"event": "exited", "code": 7, "at_seconds": 49.0, "was_stopped": False, "peak_bytes": 11}
SHIM_LOST = {"event": "shim_lost"}
HUNG_UP = {"event": LOST, "is_silent": False}
NO_RUNTIME = {"event": "runtime_lost", "instance": 0}
FROZEN = {"event": LOST, "is_frozen": True}
SILENT = {"event": LOST, "is_silent": True}

AFTER_EXIT = replace(
    RUNNING, state=InstanceState.EXITED, exit_code=7, exited_at_seconds=49.0, memory=MemoryCurve(peak_bytes=11)
)

EVENTS: list[tuple[InstanceStatus, dict[str, Any], Phase, InstanceStatus]] = [
    (AWAITED, HELLO, Phase.STARTING, READY),
    (READY, {"event": "started", "pid": 9}, Phase.RUNNING, replace(RUNNING, started_at_seconds=THEN)),
    (RUNNING, EXITED, Phase.RUNNING, AFTER_EXIT),
    (RUNNING, {**EXITED, "was_stopped": True}, Phase.STOPPING, replace(AFTER_EXIT, was_stopped=True)),
    (RUNNING, EXITED, Phase.INTERRUPTED, replace(AFTER_EXIT, was_stopped=True)),
    (RUNNING, EXITED, Phase.STOPPING, AFTER_EXIT),  # it failed by itself before its agent heard the order
    (FAILED, {"event": "ended"}, Phase.STOPPING, replace(FAILED, state=InstanceState.ENDED)),
    (RUNNING, SHIM_LOST, Phase.RUNNING, LOST_SHIM),
    (RUNNING, SHIM_LOST, Phase.INTERRUPTED, RUNNING),
    (RUNNING, SHIM_LOST, Phase.STOPPING, RUNNING),
    (HAS_ENDED, SHIM_LOST, Phase.RUNNING, HAS_ENDED),
    (FAILED, SHIM_LOST, Phase.RUNNING, FAILED),
    (RUNNING, HUNG_UP, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED, problem=AGENT_KILLED)),
    (RUNNING, NO_RUNTIME, Phase.STOPPING, replace(LOST_SHIM, problem=RUNTIME_KILLED)),
    (
        AWAITED,
        NO_RUNTIME,
        Phase.STARTING,
        replace(AWAITED, state=InstanceState.ENDED, problem=RUNTIME_KILLED, exited_at_seconds=THEN),
    ),
    (RUNNING, FROZEN, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED, problem=AGENT_FROZEN)),
    (RUNNING, SILENT, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED, problem=HOST_LOST)),
    (RUNNING, HUNG_UP, Phase.STOPPING, replace(RUNNING, state=InstanceState.ENDED)),
    (RUNNING, SILENT, Phase.KILLING, replace(RUNNING, state=InstanceState.ENDED)),
    (FAILED, HUNG_UP, Phase.RUNNING, replace(FAILED, state=InstanceState.ENDED)),
    (LOST_SHIM, HUNG_UP, Phase.RUNNING, replace(LOST_SHIM, state=InstanceState.ENDED)),
    (HAS_ENDED, HUNG_UP, Phase.RUNNING, HAS_ENDED),
    (RUNNING, {"event": "signal_unhandled", "signal": 1}, Phase.RUNNING, RUNNING),
    (RUNNING, {"event": "stacks", "text": "", "processes": []}, Phase.RUNNING, RUNNING),
]


@pytest.mark.parametrize(("before", "event", "phase", "after"), EVENTS)
def test_each_event_has_its_status(
    before: InstanceStatus, event: dict[str, Any], phase: Phase, after: InstanceStatus
) -> None:
    """One row, one event."""
    assert after_event(before, event, phase, THEN) == after


def test_an_agent_that_cannot_begin_says_why() -> None:
    """Before its program has started the error number is the reason; afterwards the program is lost with it."""
    lost = {"event": "agent_lost", "instance": 0, "errno": errno.EMFILE}
    cannot_start = replace(
        AWAITED,
        state=InstanceState.ENDED,
        exit_code=NOT_BOUND,
        problem="its agent cannot start: too many open files: raise the limit with `ulimit -n`",
        exited_at_seconds=THEN,
    )

    assert after_event(AWAITED, lost, Phase.STARTING, THEN) == cannot_start
    assert after_event(AWAITED, {**lost, "errno": 0}, Phase.STARTING, THEN).problem == AGENT_KILLED
    assert after_event(RUNNING, lost, Phase.RUNNING, THEN).problem == AGENT_KILLED
    assert after_event(AWAITED, lost, Phase.STOPPING, THEN).problem == ""


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
    status = after_event(READY, event, Phase.RUNNING, THEN)

    assert (status.state, status.exit_code, status.problem) == (InstanceState.EXITED, exit_code, problem)
    assert status.exited_at_seconds == THEN
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
    first = after_event(RUNNING, look, Phase.RUNNING, THEN)
    second = after_event(first, {**look, "memory_bytes": 80}, Phase.RUNNING, THEN + 1)

    assert first.usage == Usage(at_seconds=THEN, memory_bytes=100, cpu_seconds=2.5, num_processes=3)
    assert (first.progress, first.progressed_at_seconds) == (STEP, THEN)
    assert (second.progress, second.progressed_at_seconds) == (STEP, THEN)
    assert (second.memory.peak_bytes, second.memory.samples) == (100, ((THEN, 100), (THEN + 1, 80)))


def test_the_last_look_is_at_the_page_only() -> None:
    """The program has ended: nothing of it can be measured."""
    status = after_event(RUNNING, {"event": "stats", "progress": page(STEP)}, Phase.RUNNING, THEN)

    assert (status.progress, status.usage) == (STEP, None)


@pytest.mark.parametrize("words", ["", "00", page(STEP)[:-2], "02" + page(STEP)[2:]])
def test_a_page_that_is_no_whole_one_says_nothing(words: str) -> None:
    """It was too short, or read in the middle of a change."""
    assert after_event(RUNNING, {"event": "stats", "progress": words}, Phase.RUNNING, THEN) == RUNNING


LATE = [HUNG_UP, SILENT, SHIM_LOST, {"event": "ended"}, {"event": "stacks"}, {"event": "signal_unhandled"}]


@given(st.lists(st.sampled_from(LATE)), st.sampled_from(Phase))
def test_what_has_ended_stays_so_and_the_first_problem_wins(events: list[dict[str, Any]], phase: Phase) -> None:
    """Whatever is heard late, no instance lives again, and why it ended is not forgotten."""
    status = after_event(RUNNING, HUNG_UP, Phase.RUNNING, THEN)
    for event in events:
        status = after_event(status, event, phase, THEN + 1)

    assert (status.state, status.problem, status.exited_at_seconds) == (
        InstanceState.ENDED,
        AGENT_KILLED,
        THEN,
    )


def test_an_instance_is_busy_when_its_processes_compute_or_change() -> None:
    """A few ticks of the processor between two looks are none; a look after one more process is."""
    look = {"event": "stats", "memory_bytes": 1, "num_processes": 1, "progress": page(STEP), "cpu_seconds": 2.0}
    first = after_event(RUNNING, look, Phase.RUNNING, THEN)
    idle = after_event(first, {**look, "cpu_seconds": 2.04}, Phase.RUNNING, THEN + 1)

    assert (first.busy_at_seconds, idle.busy_at_seconds) == (THEN, THEN)
    for change in ({"cpu_seconds": 2.5}, {"num_processes": 2}, {"cpu_seconds": 1.0}):
        assert after_event(idle, {**look, **change}, Phase.RUNNING, THEN + 2).busy_at_seconds == THEN + 2
