"""The way from a request to a lease: how often a pool is asked, what is logged meanwhile, and what is given.

Holds poprun.devices.pool.records.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from poprun.devices.lease.claims import Claim, Granted, choose_partition, request_ipus
from poprun.devices.pool.records import Partition, PoolState
from poprun.errors import IpusTakenError, PartitionError
from poprun.plan.inventory import Cluster, VirtualIpu, cpu_cluster, gpu_cluster
from poprun.plan.plan import LaunchPlan
from poprun.plan.request import VipuSettings
from poprun.plan.topology import Gpu
from tests import planning
from tests.planning import LAPTOP, planned


class WaitingClaim(Claim):
    """A claim that is granted when it has been asked for often enough."""

    def __init__(self, num_refusals: int, partition: str | None = None) -> None:
        super().__init__(partition)
        self.num_refusals = num_refusals
        self.waits: list[float | None] = []

    def _ask_pool(self) -> tuple[str, ...]:
        return () if len(self.waits) < self.num_refusals else ("cpu/0",)

    def _wait(self, timeout_seconds: float | None) -> None:
        self.waits.append(timeout_seconds)

    def _refusal(self, *, advises: bool) -> str:
        return "taken; wait" if advises else "taken"


@pytest.mark.parametrize(
    ("vipu", "num_refusals", "waits", "told"),
    [
        (VipuSettings(), 0, [], []),
        (VipuSettings(waits_for_devices=True), 3, [None] * 3, ["waiting: taken"]),
        (VipuSettings(partition="p", partition_attempts=3), 2, [1.0] * 2, ["waiting: taken"]),
    ],
)
def test_a_claim_is_asked_for_until_it_is_granted(
    vipu: VipuSettings, num_refusals: int, waits: list[float | None], told: list[str]
) -> None:
    """Whoever queues waits for its turn, whoever tries several times for a second; one line tells of either."""
    claim, lines = WaitingClaim(num_refusals, vipu.partition), list[str]()

    assert claim.wait_until_granted(vipu, lines.append) == ("cpu/0",)
    assert claim.waits == waits
    assert lines == told


@pytest.mark.parametrize(
    ("vipu", "num_waits"),
    [
        (VipuSettings(), 0),
        (VipuSettings(partition_attempts=3), 0),
        (VipuSettings(partition="p", partition_attempts=3), 2),
    ],
)
def test_a_job_that_does_not_queue_gives_up(vipu: VipuSettings, num_waits: int) -> None:
    """At once, or after as many attempts as it may make for a partition; the last words say what to do."""
    claim = WaitingClaim(9, vipu.partition)

    with pytest.raises(IpusTakenError, match=r"^taken; wait$"):
        claim.wait_until_granted(vipu, lambda _: None)
    assert len(claim.waits) == num_waits


def test_a_request_for_a_partition_is_for_exactly_its_power_of_two() -> None:
    """Whatever is counted; the plan says how many IPU-Link domains it lies in."""
    plan = planned(LAPTOP, num_instances=4, num_replicas=16, ipus_per_replica=3, hosts=("a", "b"))
    plan = replace(plan, vipu=VipuSettings(partition="p", updates_partition=True, num_ilds=2))
    here = request_ipus(plan, 24, "p", num_domains=2)
    served = request_ipus(plan, 48, "p", allocation="lab", hosts=("a", "b"))

    assert here.partition is not None
    assert served.partition is not None
    assert (here.num_ipus, here.partition.size, here.num_domains) == (24, 32, 2)
    assert (served.num_ipus, served.partition.size) == (48, 64)
    assert (served.allocation, served.hosts, served.partition.may_change) == ("lab", ("a", "b"), True)


def partition(num_ipus: int, user: str = "ann", lease: int | None = None) -> Partition:
    """A partition of that many IPUs."""
    names = tuple(f"cpu/{index}" for index in range(num_ipus))
    return Partition(
        name="p", ipus=names, cluster="box", allocation="", num_domains=1, user=user,
        created_at_epoch_seconds=0.0, lease=lease,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("partitions", "vipu", "used"),
    [
        ([partition(2)], VipuSettings(), "p"),
        ([], VipuSettings(), None),
        ([partition(2), partition(2)], VipuSettings(), None),
        ([partition(4)], VipuSettings(), None),
        ([partition(2, user="bob")], VipuSettings(), None),
        ([partition(2, lease=1)], VipuSettings(), None),
        ([partition(2)], VipuSettings(partition="q"), "q"),
        ([partition(2)], VipuSettings(pod="POD4"), None),
    ],
)
def test_the_only_partition_is_used(partitions: list[Partition], vipu: VipuSettings, used: str | None) -> None:
    """Where it is the user's own, free, and fits; and the user is told."""
    told: list[str] = []
    plan = replace(planned(LAPTOP, num_instances=2), vipu=vipu)

    found = choose_partition(plan, PoolState(partitions=tuple(partitions)), 2, "ann".__eq__, told.append)

    assert found == used
    assert told == (["partition p is the only one there is: used"] if used == "p" else [])


def cores_on(plan: LaunchPlan, num_ipus: int, slot: int) -> tuple[int, ...]:
    """The cores for one of so many counted slots."""
    return Granted(plan=plan, cluster=cpu_cluster("box", num_ipus), names=[f"cpu/{slot}"]).cores


def devices_of(plan: LaunchPlan, gpus: Sequence[Gpu], *names: str) -> tuple[str, ...]:
    """The devices of ``plan`` on those of the ``gpus`` that it was given."""
    return Granted(plan=plan, cluster=gpu_cluster("box", gpus), names=names).devices


def test_a_job_runs_on_what_it_was_given() -> None:
    """On those GPUs, or on the share of the cores that counted slots stand for; slots past the cores share one."""
    gpus = [Gpu(name=str(index), uuid=f"GPU-{index}") for index in range(4)]
    cores = replace(planned(LAPTOP), cores=(0, 1, 2, 3))

    two = planned(planning.with_gpus("ff"), num_instances=2, num_replicas=8)
    assert devices_of(two, gpus, "GPU-3", "GPU-1") == ("3", "1")
    assert devices_of(two, gpus, "GPU-3", "GPU-1", "GPU-0", "GPU-2") == ("3", "1")
    for num_ipus, slot, expected in (
        (2, 1, (2, 3)),
        (4, 2, (2,)),
        (8, 5, (2,)),
        (3, 1, (1,)),
        (1, 0, (0, 1, 2, 3)),
    ):
        assert cores_on(cores, num_ipus, slot) == expected


def test_each_domain_needs_an_instance() -> None:
    """An instance cannot lie in two IPU-Link domains."""
    far = Cluster(
        name="lab", kind="pod", ipus=(VirtualIpu(index=0, name="a"), VirtualIpu(index=1, name="b", domain=1))
    )

    with pytest.raises(PartitionError, match=r"lies in 2 IPU-Link domains.*give --num-instances 2 or more"):
        Granted(plan=planned(LAPTOP), cluster=far, names=["a", "b"], partition="p").check_domains(num_hosts=1)
    plan = planned(LAPTOP, hosts=("n1", "n2"), num_instances=2)
    several = Granted(plan=plan, cluster=far, names=["a", "b"], partition="p")
    several.check_domains(num_hosts=2)
    with pytest.raises(PartitionError, match="give --num-instances 4 or more"):
        several.check_domains(num_hosts=1)


def test_a_lease_is_told_as_people_read_it() -> None:
    """GPUs by their numbers, where they are visible here."""
    box = gpu_cluster("box", [Gpu(name="1", uuid="GPU-ab012")])
    here, elsewhere = (
        Granted(plan=planned(LAPTOP), cluster=cluster, names=["GPU-ab012"]).lease("/pool")
        for cluster in (box, cpu_cluster("box", 1))
    )

    assert str(here) == "GPU 1 on localhost, from the pool /pool"
    assert str(elsewhere) == "GPU-ab012 on localhost, from the pool /pool"
