"""The record of an attempt, as a table: what happened, and the snapshot that the policy then sees."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from popdist.contract import Endpoint
from poprun.hosts.routes import HostRoute, JobKey, JobNetwork
from poprun.job.identity import JobIdentity
from poprun.job.record import Record
from poprun.job.signals import ReceivedSignals
from poprun.job.state import InstanceState, JobSnapshot, Phase
from poprun.launch.launchers import StartWatch
from poprun.messages.control import LOST
from tests.planning import planned

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
        ReceivedSignals(), StartWatch(100.0), awaits_stacks=False, has_launcher_ended=False, now_seconds=NOW
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


def test_who_has_reported_and_where_the_stores_listen() -> None:
    """Agents and their shims; the ports are those of instance 0, whose program is to listen there."""
    record = recorded([hello(1)])
    assert (record.reported, record.endpoints) == ({21, 121}, [])

    record.add_event(*hello(0), 102.5)

    assert record.reported == {20, 21, 120, 121}
    assert record.endpoints == [Endpoint(host="10.0.0.1", port=1), Endpoint(host="10.0.0.1", port=2)]


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


def test_signals_shims_and_stacks_are_seen() -> None:
    """What others know is passed on as it is."""
    signals, watch = ReceivedSignals(), StartWatch(100.0)
    with signals:
        for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(signum)
    signals.is_output_closed = True
    watch.note_living({7}, set(), 101.0)
    watch.note_living(set(), set(), 102.0)
    watch.note_living(set(), set(), 102.5)

    seen = recorded([]).snapshot(signals, watch, awaits_stacks=True, has_launcher_ended=True, now_seconds=NOW)

    assert seen == replace(
        START,
        num_interrupts=2,
        is_terminated=True,
        is_output_closed=True,
        awaits_stacks=True,
        has_lost_shim=True,
        no_shim_seconds=0.5,
        has_launcher_ended=True,
    )
