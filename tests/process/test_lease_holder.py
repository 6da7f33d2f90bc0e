"""Who holds a job's lease on a host: on this machine, without ssh, as it is on every other.

Holds poprun.devices.lease.lease_holder, poprun.devices.lease.host_leases and poprun.launch.fetched_lease.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from poprun.devices.lease import host_leases
from poprun.devices.lease.host_leases import LeaseHolder
from poprun.devices.pool.pool import Pool
from poprun.errors import HostsError, IpusTakenError, PartitionError
from poprun.launch.fetched_lease import fetch_lease, give_up_lease
from poprun.plan.inventory import cpu_cluster
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_to_dict
from poprun.plan.request import VipuSettings
from tests.leftovers import wait_until_none
from tests.planning import LAPTOP, planned
from tests.running import DEADLINE_SECONDS


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    """A pool of the test's own."""
    return Pool(str(tmp_path / "pool"))


@pytest.fixture
def holders() -> Iterator[list[LeaseHolder]]:
    """The holders that a test starts; they have gone afterwards."""
    started: list[LeaseHolder] = []
    yield started
    for holder in started:
        holder.release()
        holder.end(until())


def plan_for(pool: Pool, num_instances: int, *, waits: bool = False) -> LaunchPlan:
    """A job of one host that takes virtual IPUs of ``pool``, which has 4."""
    vipu = VipuSettings(pool=pool.path, ipus_per_host=4, waits_for_devices=waits)
    return planned(LAPTOP, num_instances=num_instances, vipu=vipu, working_directory="/")


def holder_of(plan: LaunchPlan, holders: list[LeaseHolder]) -> LeaseHolder:
    """A holder that has said which machine it is on."""
    holder = LeaseHolder("here", None)
    holders.append(holder)
    holder.send({"plan": json.dumps(plan_to_dict(plan)), "is_fixed": False})
    assert holder.answer("machine", until())["machine"]
    return holder


def until() -> float:
    """When a holder must have answered."""
    return time.monotonic() + DEADLINE_SECONDS


def held(pool: Pool) -> list[str]:
    """What jobs hold."""
    return sorted(pool.state().taken)


def test_what_it_takes_is_the_jobs_until_the_last_agent_has_gone(pool: Pool, holders: list[LeaseHolder]) -> None:
    """Others are refused with who has it; neither its own death nor that of poprun frees what agents hold."""
    holder = holder_of(plan_for(pool, 3), holders)
    granted = holder.acquire(until())
    assert holder.is_there()
    agent = fetch_lease(granted["address"])
    with pytest.raises(
        IpusTakenError, match=r"host here: the job needs 2 virtual IPUs, and 1 is free of 4(.|\n)*cpu/0-2"
    ):
        holder_of(plan_for(pool, 2), holders).acquire(until())
    os.kill(holder.pid, signal.SIGKILL)
    assert not holder.is_there()
    holder.end(until())

    assert granted["held"] == [[["cpu/0", "cpu/1", "cpu/2"], pool.path, None]]
    assert granted["devices"] == []
    assert held(pool) == ["cpu/0", "cpu/1", "cpu/2"]
    for descriptor in agent:
        os.close(descriptor)
    assert held(pool) == []
    with pytest.raises(OSError, match=r"[Rr]efused"):
        fetch_lease(granted["address"])


def test_it_gives_back_when_it_is_told_to(pool: Pool, holders: list[LeaseHolder]) -> None:
    """And nothing of the lease is left; who waits gets its turn, and is told of the waiting."""
    first, second = holder_of(plan_for(pool, 4), holders), holder_of(plan_for(pool, 1, waits=True), holders)
    first.acquire(until())
    second.send({"order": "acquire"})
    told = second._receive(until())
    first.release()
    first.end(until())
    granted = second.answer("held", until())

    assert told["log"].startswith("waiting: the job needs 1 virtual IPU, and 0 are free of 4")
    assert granted["held"][0][0] == ["cpu/0"]
    assert len(pool.state().leases) == 1


def test_it_ends_when_an_agent_says_that_poprun_is_lost(pool: Pool, holders: list[LeaseHolder]) -> None:
    """The way to poprun does not tell it for hours."""
    holder = holder_of(plan_for(pool, 1), holders)
    give_up_lease(holder.acquire(until())["address"])
    holder.end(until())

    assert wait_until_none(lambda: held(pool)) == []


def test_errors_come_back_as_what_they_are(
    pool: Pool, holders: list[LeaseHolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the host's name; and one that cannot even start says why."""
    pool.cluster = lambda: cpu_cluster("box", 4)
    pool.create_partition("p", 4)
    plan = plan_for(pool, 1)
    with pytest.raises(PartitionError, match="host here: partition p has 4 IPUs, and the job fits one of 1"):
        holder_of(replace(plan, vipu=replace(plan.vipu, partition="p")), holders).acquire(until())
    monkeypatch.setattr(host_leases, "_COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such thing')"))
    with pytest.raises(
        HostsError, match=r"host here: the process that holds its virtual IPUs hung up \(no such thing\)"
    ):
        holder_of(plan_for(pool, 1), holders)
