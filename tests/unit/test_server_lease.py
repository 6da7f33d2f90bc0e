"""What a server hands out, where it can be used, and that it is sent and read as it is.

Holds poprun.devices.server.server_messages.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.devices.lease.claims import Granted
from poprun.devices.pool.records import Holder, Lease, Partition, PoolState
from poprun.devices.pool.requests import IpuRequest, PartitionRequest
from poprun.devices.server.server_lease import as_here, check_place, facts_under, given_ipus, hosts_in
from poprun.devices.server.server_messages import (
    LeaseRequest,
    ServedPool,
)
from poprun.errors import PartitionError, PlanError
from poprun.plan.inventory import Cluster, cpu_cluster, gpu_cluster
from poprun.plan.plan import LaunchPlan
from poprun.plan.pods import named_pod, read_pod
from poprun.plan.topology import Gpu, Occupant
from poprun.text.fields import read_record, write_record
from tests.planning import LAPTOP, planned

LAB = read_pod("name: lab\nnum_machines: 4\nmachines_per_domain: 1\nhosts: n[1-4]\n", "lab")
GPUS = tuple(Gpu(name=str(index), uuid=f"GPU-{index}") for index in range(4))


def served(cluster: Cluster, *taken: str) -> ServedPool:
    """What a server tells of a cluster, some of whose IPUs a job holds."""
    holder = Holder(pid=1, start_ticks=1, boot_id="remote", pid_namespace="0" * 32, user="ann@n9", words="x")
    lease = Lease(id=1, holder=holder, since_epoch_seconds=0.0, num_ipus=len(taken), queue="", ipus=taken)
    return ServedPool(boot_id="here", lease_seconds=30, cluster=cluster, state=PoolState(leases=(lease,)))


def plan(hosts: tuple[str, ...] = ("localhost",), num_instances: int = 2, *, on_gpus: bool = False) -> LaunchPlan:
    """A job with one IPU for each instance."""
    made = replace(planned(LAPTOP, num_instances=num_instances), hosts=hosts)
    return replace(made, devices=tuple(str(slot) for slot in range(made.num_gpus_per_host)) if on_gpus else ())


def granted(job: LaunchPlan, cluster: Cluster, names: list[str]) -> Granted:
    """What a server has granted a job."""
    return Granted(plan=job, cluster=cluster, names=names)


def test_the_gpus_of_the_servers_machine_are_known_by_their_uuids() -> None:
    """Whatever this process calls them; those that a job holds are marked, and others are left out."""
    here = replace(LAPTOP, gpus=(*reversed(GPUS), Gpu(name="9", uuid="GPU-9")))
    found = facts_under(here, served(gpu_cluster("box", GPUS), "GPU-1"))

    assert [(gpu.name, gpu.is_leased) for gpu in found.gpus] == [
        ("3", False),
        ("2", False),
        ("1", True),
        ("0", False),
    ]
    with pytest.raises(PlanError, match="the server hands out the GPUs of box, and the job does not run there"):
        facts_under(replace(LAPTOP, gpus=()), served(gpu_cluster("box", GPUS)))


def test_a_job_of_a_pod_may_compute_on_gpus() -> None:
    """On those of its hosts, which are leased beside the pod's IPUs; one of a machine's cores on none."""
    for pod in (named_pod("POD4"), LAB):
        assert pod is not None
        assert facts_under(replace(LAPTOP, gpus=GPUS), served(pod, pod.ipus[0].name)).gpus == GPUS
    assert facts_under(replace(LAPTOP, gpus=GPUS), served(cpu_cluster("box", 4))).gpus == ()


def test_a_machine_is_used_by_its_own_jobs_only() -> None:
    """Cores and GPUs do not travel; a pod stands for any host."""
    cores = served(cpu_cluster("box", 4))

    check_place(plan(), cores, "here")
    check_place(plan(("a", "b")), served(LAB), "elsewhere")
    for job, boot_id in ((plan(), "elsewhere"), (plan(("a", "b")), "here")):
        with pytest.raises(
            PlanError, match="the server hands out the cores of box, and the job does not run there"
        ):
            check_place(job, cores, boot_id)


def test_hosts_are_called_as_the_pod_calls_them() -> None:
    """This machine may have several names; a stranger is an error, unless the pod names no hosts at all."""
    assert hosts_in(("localhost", "n3"), LAB, {"localhost", "n2", "n2.lab"}) == ("n2", "n3")
    assert hosts_in(("a", "b"), replace(LAB, hosts=()), {"a"}) == ()
    with pytest.raises(PlanError, match=r"the job runs on n5, and the hosts of lab are n\[1-4\]"):
        hosts_in(("n1", "n5"), LAB, set())


def test_a_job_computes_on_what_the_server_gave() -> None:
    """On GPUs as this process calls them, in its order; on the GPUs of its own hosts where it was given a pod."""
    box = as_here(gpu_cluster("box", GPUS), tuple(reversed(GPUS)))
    on_box = given_ipus(granted(plan(on_gpus=True), box, ["GPU-1", "GPU-2"]), ())
    on_pod = given_ipus(granted(plan(("n2",), on_gpus=True), LAB, ["lab/5", "lab/6"]), ("n2",))

    assert (on_box.devices, on_pod.devices) == (("2", "1"), ("0", "1"))
    with pytest.raises(PartitionError, match="has 0 IPUs of n3, and the job uses 1 there"):
        given_ipus(granted(plan(("n2", "n3"), 2), LAB, ["lab/5", "lab/6"]), ("n2", "n3"))
    hidden = as_here(gpu_cluster("box", GPUS), GPUS[2:])
    with pytest.raises(PlanError, match="the job was given GPU-0, and those GPUs are not here"):
        given_ipus(granted(plan(on_gpus=True), hidden, ["GPU-0", "GPU-2"]), ())


def test_counted_slots_of_a_cpu_are_a_share_of_its_cores() -> None:
    """As for a job that counts them itself."""
    job = replace(plan(num_instances=1), cores=(0, 1, 2, 3))

    assert given_ipus(granted(job, cpu_cluster("box", 4), ["cpu/2"]), ()).cores == (2,)


def test_a_request_takes_equally_many_ipus_of_each_host() -> None:
    """Each time in one IPU-Link domain; none at all when one of the hosts has too few."""
    choose = IpuRequest(num_ipus=4, hosts=("n4", "n2")).of(LAB).choose

    assert [ipu.name for ipu in choose({"lab/12"})] == ["lab/14", "lab/15", "lab/4", "lab/5"]
    assert choose({"lab/4", "lab/5", "lab/6"}) == ()
    with pytest.raises(PartitionError, match="a partition of 4 IPUs does not divide over 3 hosts"):
        IpuRequest(num_ipus=4, hosts=("n1", "n2", "n3")).of(LAB)


names = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20)
counts = st.integers(1, 64)


@st.composite
def requests(draw: st.DrawFn) -> LeaseRequest:
    """What clients may say."""
    num_ipus = draw(counts)
    partition = PartitionRequest(
        name=draw(names),
        size=num_ipus + draw(counts),
        is_temporary=draw(st.booleans()),
        may_change=draw(st.booleans()),
        resets=draw(st.none() | st.booleans()),
    )
    wanted = IpuRequest(
        num_ipus=num_ipus,
        num_domains=draw(counts),
        hosts=tuple(draw(st.lists(names, max_size=3))),
        allocation=draw(st.none() | names),
        shares_devices=draw(st.booleans()),
        partition=draw(st.sampled_from([None, partition])),
    )
    key, words = draw(st.uuids()).hex, draw(names)
    return LeaseRequest(
        key=key, pid=draw(counts), start_ticks=draw(counts), user=draw(names), host="n", words=words, wanted=wanted
    )


@given(requests())
def test_a_request_is_read_as_it_was_sent(request: LeaseRequest) -> None:
    """Through JSON and back."""
    assert read_record(LeaseRequest, json.loads(json.dumps(write_record(request))), "request") == request


def test_a_pool_is_read_as_it_was_sent() -> None:
    """Clusters of every kind, with partitions, leases and processes outside the pool."""
    busy = Gpu(name="0", uuid="GPU-0", occupants=(Occupant(pid=7, user="bob"),))
    partition = Partition(
        name="p", ipus=("lab/4",), cluster="lab", allocation="", num_domains=1, user="ann@n1",
        created_at_epoch_seconds=1.5, lease=1, is_temporary=True,
    )  # fmt: skip
    for cluster in (LAB, gpu_cluster("box", [busy]), cpu_cluster("box", None, 2)):
        sent = served(replace(cluster, allocations={"ann": range(4)}), "lab/4")
        sent = replace(sent, state=replace(sent.state, partitions=(partition,)))
        assert read_record(ServedPool, json.loads(json.dumps(write_record(sent))), "the answer") == sent
