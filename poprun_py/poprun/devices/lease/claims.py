"""The way from what a job wants of a pool to what it holds, whoever keeps the pool.

A job's claim stands in the queue of a pool until the pool grants it. Then the job has a lease, its plan is changed
to the virtual IPUs or cores that it was given, and everything is given back when the job has ended. The pool of
this machine (`local_lease`) and that of a server (`server_lease`) differ in how they are asked; the rest is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from poprun.devices.pool.records import HeldLease, PoolState
from poprun.devices.pool.requests import IpuWish, PartitionWish
from poprun.errors import IpusTakenError, PartitionError
from poprun.hosts.routes import JobNetwork
from poprun.plan.inventory import CPU, Cluster, size_of_partition
from poprun.plan.plan import LaunchPlan
from poprun.plan.request import VipuSettings
from poprun.text.host_names import fold_hosts

Tell = Callable[[str], None]
"""Tells the user of what is decided."""

ATTEMPT_SECONDS: Final = 1.0
"""How long to wait between two attempts of a job that does not queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldJob:
    """A job with what it holds.

    Attributes:
        plan: The job, on the virtual IPUs and cores that it was given.
        network: How its hosts reach each other, and what each has given; None when there is only this machine.
        leases: What it holds.
        has_gpus: Whether the GPUs of the plan are among it.
        regain: Takes anew what was lost with a host, before the job is started again; the network with it.
    """

    plan: LaunchPlan
    network: JobNetwork | None = None
    leases: tuple[HeldLease, ...] = ()
    has_gpus: bool = False
    regain: Callable[[JobNetwork], JobNetwork] = lambda network: network

    def given(self, plan: LaunchPlan, *leases: HeldLease) -> "HeldJob":
        """The job on what it was given now, with further leases."""
        return replace(self, plan=plan, leases=(*self.leases, *leases))


class Claim(ABC):
    """A job's place in the queue of a pool, and its lease when the pool has granted it."""

    @abstractmethod
    def _ask(self) -> tuple[str, ...]:
        """Take a place in the queue, or ask again from there; names of what is granted, none while it waits."""

    @abstractmethod
    def _wait(self, timeout_seconds: float | None) -> None:
        """Return when it may be worth while to ask again, after ``timeout_seconds`` at most if it is given."""

    @abstractmethod
    def _refusal(self, *, advises: bool) -> str:
        """The words that say who has what is wanted, and what can be done about it if ``advises``."""

    def wait_until_granted(self, vipu: VipuSettings, tell: Tell) -> tuple[str, ...]:
        """Ask as often as ``vipu`` says, until the pool grants the claim; names of what is granted.

        Raises:
            IpusTakenError: If others have it, and the job does not wait, or not any longer.
        """
        attempts_left = vipu.partition_attempts - 1 if vipu.partition else 0
        is_told = False
        while not (names := self._ask()):
            gives_up = not vipu.waits_for_devices and not attempts_left
            if gives_up or not is_told:
                words = self._refusal(advises=gives_up)
                if gives_up:
                    raise IpusTakenError(words)
                tell(f"waiting: {words}")
            is_told = True
            attempts_left -= not vipu.waits_for_devices
            self._wait(None if vipu.waits_for_devices else ATTEMPT_SECONDS)
        return names


def wished_ipus(
    plan: LaunchPlan, num_ipus: int, allocation: str | None = None, hosts: tuple[str, ...] = ()
) -> IpuWish:
    """The wish of a job for ``num_ipus`` virtual IPUs or GPUs of all its hosts.

    Args:
        plan: The job.
        num_ipus: How many it wants.
        allocation: The part of the cluster to take them from, or None.
        hosts: The hosts that they are to be on, equally many on each; none where it does not matter.
    """
    vipu = plan.vipu
    partition = None
    if vipu.partition is not None:
        partition = PartitionWish(
            name=vipu.partition,
            size=size_of_partition(num_ipus),
            is_temporary=vipu.removes_partition,
            may_change=vipu.updates_partition,
            resets=vipu.resets_partition,
        )
    return IpuWish(
        num_ipus=num_ipus,
        num_domains=plan.num_ilds,
        hosts=hosts,
        allocation=allocation,
        shares_devices=vipu.shares_devices,
        partition=partition,
    )


def in_only_partition(
    plan: LaunchPlan, state: PoolState, num_ipus: int, is_own: Callable[[str], bool], tell: Tell
) -> LaunchPlan:
    """``plan`` in the only partition that there is, if it names none, that one is its user's own, and it fits."""
    if plan.vipu.partition is not None or plan.vipu.pod is not None or len(state.partitions) != 1:
        return plan
    (only,) = state.partitions
    if only.lease is not None or not is_own(only.user) or only.size != size_of_partition(num_ipus):
        return plan
    tell(f"partition {only.name} is the only one there is: used")
    return replace(plan, vipu=replace(plan.vipu, partition=only.name))


def held_ipus(plan: LaunchPlan, cluster: Cluster, names: Sequence[str], pool: str) -> HeldLease:
    """The lease on the virtual IPUs called ``names``, as people read it."""
    told = {ipu.name: str(ipu) for ipu in cluster.ipus}
    return HeldLease(
        host=fold_hosts(plan.hosts),
        names=tuple(told.get(name, name) for name in names),
        pool=pool,
        partition=plan.vipu.partition,
    )


def with_gpus(plan: LaunchPlan, cluster: Cluster, names: Sequence[str]) -> LaunchPlan:
    """``plan`` on the GPUs called ``names``, the first ones where a partition has more than the job uses."""
    by_name = {ipu.name: ipu for ipu in cluster.ipus}
    return replace(plan, devices=tuple(by_name[name].device for name in names[: plan.num_gpus_per_host]))


def with_ipus(plan: LaunchPlan, cluster: Cluster, names: Sequence[str], num_hosts: int) -> LaunchPlan:
    """``plan`` on virtual IPUs: where a CPU's are counted, on their share of the cores.

    Args:
        plan: The job.
        cluster: What they were taken from.
        names: What they are called.
        num_hosts: Hosts of the job that they are for: one, or all.

    Raises:
        PartitionError: If they lie in more IPU-Link domains than those hosts have instances.
    """
    by_name = {ipu.name: ipu for ipu in cluster.ipus}
    num_domains = len({by_name[name].domain for name in names if name in by_name})
    if num_domains > plan.num_instances_per_host * num_hosts:
        least = num_domains * len(plan.hosts) // num_hosts
        raise PartitionError(
            f"partition {plan.vipu.partition} lies in {num_domains} IPU-Link domains, and each needs an instance: "
            f"give --num-instances {least} or more"
        )
    if plan.vipu.ipus_per_host is None or plan.devices or cluster.kind != CPU:
        return plan
    num_ipus, num_cores = len(cluster.ipus), len(plan.cores)
    ours: set[int] = set()
    for ipu in (by_name[name].index for name in names[: plan.num_ipus_per_host]):
        first = min(ipu * num_cores // num_ipus, num_cores - 1)
        last = max(first + 1, (ipu + 1) * num_cores // num_ipus)
        ours.update(plan.cores[first:last])
    return replace(plan, cores=tuple(sorted(ours)))
