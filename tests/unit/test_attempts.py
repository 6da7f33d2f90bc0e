"""Whether and when a failed job is started again; and what the hosts of one are examined with.

Holds poprun.hosts.job_network.
"""

import resource
from dataclasses import replace

import pytest

from poprun.attempts import restart_pause_seconds
from poprun.errors import HostsError
from poprun.hosts import job_network
from poprun.hosts.job_network import find_network
from poprun.launch.process.limits import users_open_files
from poprun.observe.account.state import NOT_FOUND, SHIM_KILLED, InstanceState, InstanceStatus
from poprun.observe.judge.job_end import JobEnd
from poprun.observe.show.printed_report import render_attempts
from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import parse_hosts
from tests.planning import CLUSTER_NODE, planned

BAD = InstanceStatus(index=0, state=InstanceState.ENDED, exit_code=7, exited_at_seconds=1.0)
FAILED = JobEnd(statuses=[BAD], seconds=12.34)
GOOD = JobEnd(statuses=[replace(BAD, exit_code=0)], seconds=2.0)


@pytest.mark.parametrize(
    ("restart_count", "pause"), [(0, 1), (1, 2), (2, 4), (4, 16), (5, 30), (99, 30), (100, None)]
)
def test_the_pause_grows_to_half_a_minute(restart_count: int, pause: float | None) -> None:
    """1, 2, 4, … 30 seconds, and no more restarts than there may be."""
    assert restart_pause_seconds(FAILED, restart_count, max_restarts=100) == pause


@pytest.mark.parametrize(
    "end",
    [
        GOOD,
        replace(FAILED, num_interrupts=1),
        replace(FAILED, is_terminated=True),
        replace(FAILED, is_output_closed=True),
        replace(FAILED, is_timed_out=True),
        replace(FAILED, statuses=[replace(BAD, exit_code=143)]),
        replace(FAILED, statuses=[replace(BAD, problem="cannot run x", exit_code=NOT_FOUND)]),
    ],
)
def test_what_is_not_started_again(end: JobEnd) -> None:
    """A job that ended well, that was asked to end or whose program was, or whose program is not there."""
    assert restart_pause_seconds(end, 0, max_restarts=3) is None


def test_a_launcher_that_failed_is_started_again() -> None:
    """A lost node is the usual cause, and may be back."""
    lost = replace(
        FAILED, statuses=[replace(BAD, exit_code=None, was_stopped=True)], stop_reason="the launcher died"
    )

    assert restart_pause_seconds(lost, 0, max_restarts=1) == 1


def test_who_was_let_down_did_not_leave_of_its_own() -> None:
    """An instance that lost its shim is asked to end by its agent, and may save before it does."""
    lost = replace(FAILED, statuses=[replace(BAD, exit_code=143, problem=SHIM_KILLED)])

    assert restart_pause_seconds(lost, 0, max_restarts=1) == 1


def test_several_attempts_are_listed() -> None:
    """One line each; a job of one attempt needs no list."""
    assert render_attempts([FAILED]) == []
    assert render_attempts([FAILED, GOOD]) == [
        "attempt 0: instance 0 failed first, exit code 7, 12.3 s",
        "attempt 1: ended well, 2 s",
    ]


def test_many_hosts_are_examined_with_open_files_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's limit is often 1,024, and a connection to a host has three pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []

    def examine(_: LaunchPlan) -> None:
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        raise HostsError("seen")

    monkeypatch.setattr(job_network, "_examine", examine)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(HostsError, match="seen"):
            find_network(planned(CLUSTER_NODE, hosts=parse_hosts("n[1-300]"), num_instances=300), {}, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        users_open_files.cache_clear()

    assert found[0] >= 4 * 300
