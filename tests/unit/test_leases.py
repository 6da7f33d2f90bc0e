"""What a job holds, in words; and what each host of a job gives it."""

from dataclasses import replace

import pytest

from popdist.contract import Endpoint
from poprun.errors import HostsError
from poprun.hosts.routes import HostRoute, JobKey, JobNetwork, remote_words
from poprun.job.orders import JobIdentity, start_order
from poprun.lease.host_leases import check_machines
from poprun.plan.program_environment import VISIBLE_DEVICES
from poprun.pool.records import HeldLease, fold_names
from tests.planning import planned, with_gpus

MEETING = [Endpoint(host="10.0.0.1", port=1), Endpoint(host="10.0.0.1", port=2)]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("GPU 0", "GPU 1", "GPU 3"), "GPU 0-1,3"),
        (("cpu/2",), "cpu/2"),
        (("GPU 0", "cpu/1"), "GPU 0, cpu/1"),
        (("GPU-ab", "GPU-cd"), "GPU-ab, GPU-cd"),
        ((), ""),
    ],
)
def test_neighbours_are_folded(names: tuple[str, ...], told: str) -> None:
    """Names that differ in a number at their end are one range."""
    assert fold_names(names) == told


def test_a_lease_says_what_where_and_from_which_pool() -> None:
    """The line that ``-v`` prints."""
    lease = HeldLease(host="n1", names=("GPU 0", "GPU 1"), pool="/pool", partition="p")

    assert str(lease) == "GPU 0-1 (partition p) on n1, from the pool /pool"


def test_each_host_has_the_devices_that_it_gave() -> None:
    """Programs see those of their own host, which may be others than the plan names, and agents its keeper."""
    plan = planned(with_gpus("ff"), num_instances=4, hosts=("a", "b"))
    given = (("0", "1"), ("2", "3"))
    routes = tuple(
        HostRoute(name=host, address="10.0.0.1", interface="eth0", devices=devices, keeper=f"keeper-{host}")
        for host, devices in zip(plan.hosts, given, strict=True)
    )
    network = JobNetwork(control_host="10.0.0.1", hosts=routes, key=JobKey(text="", file=""))
    identity = JobIdentity(job_id="j", restart_count=0, began_at_seconds=0.0, network=network)

    orders = [start_order(plan, index, {}, identity, MEETING) for index in range(4)]
    here = start_order(replace(plan, hosts=("a",)), 0, {}, replace(identity, network=None), MEETING)

    seen = [order["environment"] for order in orders]
    assert [env[VISIBLE_DEVICES] for env in seen if isinstance(env, dict)] == ["0,1", "0,1", "2,3", "2,3"]
    assert [order["keeper"] for order in orders] == ["keeper-a", "keeper-a", "keeper-b", "keeper-b"]
    assert here["keeper"] == ""


def test_only_descriptors_of_this_host_go_to_its_agents() -> None:
    """A lease that another process keeps has none; an instance without streams of its own gets nothing."""
    kept = HeldLease(host="n1", names=("cpu/0",), pool="/pool")
    leases = (replace(kept, descriptor=7), kept)
    identity = JobIdentity(job_id="j", restart_count=0, began_at_seconds=0.0, leases=leases)

    assert identity.with_leases([3, 4, 5]) == [3, 4, 5, 7]
    assert identity.with_leases([]) == []


def test_two_hosts_with_one_pool_are_refused() -> None:
    """The job would wait for itself."""
    check_machines({"a": "boot 1", "b": "boot 2"})
    with pytest.raises(HostsError, match="a and c have one pool of virtual IPUs"):
        check_machines({"a": "boot 1", "b": "boot 2", "c": "boot 1"})


def test_the_way_to_a_keeper() -> None:
    """It notices a lost host and shares no connection; in Slurm's job it is a step of its own."""
    words = remote_words("/c", None, "n1", ("python", "a b"), is_kept=True)
    step = remote_words(None, "7", "n1", ("python", "a b"), is_kept=True)

    assert words[:3] == ("ssh", "-F", "/c")
    assert {"BatchMode=yes", "ControlPath=none", "ServerAliveInterval=5"} <= set(words)
    assert words[-4:] == ("-T", "--", "n1", "python 'a b'")
    assert (step[0], step[-2:]) == ("srun", ("python", "a b"))
    assert {"--jobid=7", "--ntasks=1", "--nodelist=n1"} <= set(step)
