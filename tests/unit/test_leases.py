"""What a job holds, in words; and what each host of a job gives it.

Holds poprun.job.orders and poprun.observe.account.job_identity.
"""

from dataclasses import replace

import pytest

from popdist.ground.contract import Endpoint
from poprun.devices.lease.claims import LeasedPlan
from poprun.devices.lease.host_leases import check_machines
from poprun.devices.lease.local_lease import ipu_claims
from poprun.devices.pool.records import HeldLease, fold_names
from poprun.errors import HostsError
from poprun.job.orders import start_order
from poprun.launch.routes import HostRoute, JobKey, JobNetwork, remote_words
from poprun.observe.account.job_identity import JobIdentity
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import make_plan
from poprun.plan.pods import named_pod
from poprun.plan.request import LaunchRequest, VipuSettings
from poprun.plan.topology import MachineFacts
from tests.planning import planned, with_gpus

MEETING = {index: [Endpoint(host="10.0.0.1", port=port) for port in range(1, 5)] for index in range(4)}


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
    """Programs see those of their own host, others than the plan names, and agents the address of its lease."""
    plan = planned(with_gpus("ff"), num_instances=4, hosts=("a", "b"))
    given = (("0", "1"), ("2", "3"))
    routes = tuple(
        HostRoute(name=host, address="10.0.0.1", interface="eth0", devices=devices, lease_address=f"lease-{host}")
        for host, devices in zip(plan.hosts, given, strict=True)
    )
    network = JobNetwork(control_host="10.0.0.1", hosts=routes, key=JobKey(text="", file=""))
    identity = JobIdentity(job_id="j", restart_count=0, began_at_seconds=0.0, network=network)

    orders = [start_order(plan, index, {}, identity, MEETING) for index in range(4)]
    here = start_order(replace(plan, hosts=("a",)), 0, {}, replace(identity, network=None), MEETING)

    seen = [order["environment"] for order in orders]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen if isinstance(env, dict)] == ["0,1", "0,1", "2,3", "2,3"]
    assert [order["lease_address"] for order in orders] == ["lease-a", "lease-a", "lease-b", "lease-b"]
    assert here["lease_address"] == ""


def test_what_leases_gave_stands_beside_the_plan() -> None:
    """Programs get the GPUs and cores of the leases, and the plan still names those that it was made for."""
    plan = planned(with_gpus("ff"), num_instances=2)
    given = replace(plan.named_devices, devices=("7", "5"))
    identity = JobIdentity(job_id="j", restart_count=0, began_at_seconds=0.0, given=given)

    environment = start_order(plan, 1, {}, identity, MEETING)["environment"]

    assert isinstance(environment, dict)
    assert environment["CUDA_VISIBLE_DEVICES"] == "7,5"
    assert (plan.instance(1, given).devices, plan.instance(1).devices) == (("5",), ("1",))
    assert LeasedPlan(plan=plan, given=given).shown_plan == replace(plan, devices=("7", "5"))


def counts(plan: LaunchPlan, machine: MachineFacts) -> list[tuple[str, int]]:
    """What a job asks the pool of this machine for: kinds of cluster, and how many of it."""
    return [
        (claim.cluster.kind, claim.request().num_ipus)
        for claim in ipu_claims(plan, plan.vipu.partition, machine, is_fixed=False)
    ]


@pytest.mark.parametrize(
    ("gpus", "vipu", "expected"),
    [
        ("", {"ipus_per_host": 16}, [("cpu", 16)]),
        ("", {"partition": "p"}, [("cpu", 16)]),
        ("", {"pool": "/p"}, [("cpu", 16)]),
        ("", {"pod": "POD16"}, [("pod", 16)]),
        ("ffff", {}, [("gpu", 4)]),
        ("ffff", {"ipus_per_host": 16, "partition": "p"}, [("gpu", 4)]),
        ("ffff", {"pod": "POD16", "partition": "p"}, [("pod", 16), ("gpu", 4)]),
        ("ffff", {"server_host": "h", "partition": "p"}, [("gpu", 4)]),
        ("", {"server_host": "h"}, []),
        ("ffff", {"pod": "POD16", "is_offline": True}, []),
    ],
)
def test_what_is_counted(gpus: str, vipu: dict[str, object], expected: list[tuple[str, int]]) -> None:
    """GPUs by instances, whose replicas take turns; virtual IPUs by replicas; those of a pod with GPUs beside."""
    machine = with_gpus(gpus)
    settings = VipuSettings(**vipu)  # type: ignore[arg-type]
    plan = planned(machine, num_instances=2, num_replicas=8, ipus_per_replica=2, vipu=settings)

    assert counts(plan, machine) == expected


def test_gpus_beside_a_pod_are_in_no_partition() -> None:
    """It is one of the pod's IPUs; of GPUs alone it has the power of two that holds them."""
    asked = {"num_instances": 3, "num_replicas": 12}
    for vipu, sizes in (
        (VipuSettings(pod="POD16", partition="p"), [16, None]),
        (VipuSettings(partition="p"), [4]),
    ):
        plan = planned(with_gpus("fff"), vipu=vipu, **asked)
        requests = [claim.request().partition for claim in ipu_claims(plan, "p", with_gpus("fff"), is_fixed=False)]
        assert [request and request.size for request in requests] == sizes


def test_a_host_gives_its_part_of_the_domains() -> None:
    """A job of two hosts in four IPU-Link domains has two of them on each."""
    asked = LaunchRequest(num_instances=4, num_replicas=256, hosts=("a", "b"), vipu=VipuSettings(pod="POD256"))
    plan = make_plan(asked, with_gpus(""), named_pod("POD256"))
    (claim,) = ipu_claims(plan, None, None, is_fixed=False)
    chosen = claim.request().choose(())

    assert (plan.num_ilds, len(chosen), {ipu.domain for ipu in chosen}) == (4, 128, {0, 1})
    few = ipu_claims(planned(vipu=VipuSettings(pod="POD256", num_ilds=1)), None, None, is_fixed=False)[0]
    assert [ipu.index for ipu in few.request().choose(())] == [0]


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


def test_the_way_to_a_lease_holder() -> None:
    """It notices a lost host and shares no connection; in Slurm's job it is a step of its own."""
    words = remote_words("/c", None, "n1", ("python", "a b"), is_kept=True)
    step = remote_words(None, "7", "n1", ("python", "a b"), is_kept=True)

    assert words[:3] == ("ssh", "-F", "/c")
    assert {"BatchMode=yes", "ControlPath=none", "ServerAliveInterval=5"} <= set(words)
    assert words[-4:] == ("-T", "--", "n1", "python 'a b'")
    assert (step[0], step[-2:]) == ("srun", ("python", "a b"))
    assert {"--jobid=7", "--ntasks=1", "--nodelist=n1"} <= set(step)
