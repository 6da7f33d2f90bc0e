"""Requests of jobs for devices in a queue (claims), and the granted leases, whatever pool grants them.

A job's claim waits in the queue of a pool until the pool grants the claim. Then the job has a lease, which is kept
beside the job's plan (`LeasedPlan`) and released when the job has ended. The module `local_lease` sends requests
to the pool of this machine, and the module `server_lease` sends requests to the pool of a server.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from poprun.devices.pool.records import HeldLease, PoolState
from poprun.devices.pool.requests import IpuRequest, PartitionRequest
from poprun.errors import IpusTakenError, PartitionError
from poprun.launch.routes import JobNetwork
from poprun.plan.inventory import Cluster, size_of_partition
from poprun.plan.plan import LaunchPlan, LeasedDevices
from poprun.plan.request import VipuSettings
from poprun.text.ranges import fold_hosts

Log = Callable[[str], None]  # writes a line for the user, here or on the machine that poprun runs on
ATTEMPT_SECONDS: Final = 1.0  # how long to wait between two attempts of a job that does not queue


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPlan:
    """The plan of a job with the leases that the job has on devices."""

    plan: LaunchPlan  # the plan without leases, as the planner made it
    given: LeasedDevices  # the leased devices and cores on this machine, which replace the devices in the plan
    network: JobNetwork | None = None  # the job's hosts with their leased devices; None if there is one host
    leases: tuple[HeldLease, ...] = ()
    has_gpus: bool = False  # whether the leases include the job's GPUs
    reacquire: Callable[[JobNetwork], JobNetwork] = lambda network: network
    """A function that acquires new leases before a restart on hosts that lost a lease, and returns the network
    with them."""

    @property
    def shown_plan(self) -> LaunchPlan:
        """The plan to print, with the leased devices and cores instead of the planned devices and cores."""
        given = self.given
        return replace(self.plan, devices=given.devices, cores=given.cores, bindings=given.bindings)

    def with_leases(self, given: LeasedDevices, *leases: HeldLease) -> "LeasedPlan":
        """Return this plan with ``leases`` added, and ``given`` as the devices and cores of all leases."""
        return replace(self, given=given, leases=(*self.leases, *leases))


class Claim(ABC):
    """A job's request for devices, which waits in a queue and becomes a lease (the job's right to use them)."""

    def __init__(self, partition: str | None) -> None:
        self.partition = partition

    @abstractmethod
    def _ask_pool(self) -> tuple[str, ...]:
        """Send a request to the pool or server; return the granted devices' names, () if the job must wait."""

    @abstractmethod
    def _wait(self, timeout_seconds: float | None) -> None:
        """Wait until a request for devices may succeed, at most ``timeout_seconds`` (None: no limit)."""

    @abstractmethod
    def _refusal(self, *, advises: bool) -> str:
        """Return the text that lists who uses the requested devices, with advice if ``advises`` is true."""

    def wait_until_granted(self, vipu: VipuSettings, log: Log) -> tuple[str, ...]:
        """Request devices until they are granted; return their names. Raise IpusTakenError if poprun gives up."""
        attempts_left = vipu.partition_attempts - 1 if self.partition else 0
        is_logged = False
        while not (names := self._ask_pool()):
            gives_up = not vipu.waits_for_devices and not attempts_left
            if gives_up or not is_logged:
                words = self._refusal(advises=gives_up)
                if gives_up:
                    raise IpusTakenError(words)
                log(f"waiting: {words}")
            is_logged = True
            attempts_left -= not vipu.waits_for_devices
            self._wait(None if vipu.waits_for_devices else ATTEMPT_SECONDS)
        return names


def request_ipus(
    plan: LaunchPlan,
    num_ipus: int,
    partition: str | None,
    *,
    num_domains: int = 1,
    allocation: str | None = None,
    hosts: tuple[str, ...] = (),
) -> IpuRequest:
    """Return a job's request for ``num_ipus`` virtual IPUs or GPUs, divided evenly over ``hosts`` if given."""
    vipu, partition_request = plan.vipu, None
    if partition is not None:
        partition_request = PartitionRequest(
            name=partition,
            size=size_of_partition(num_ipus),
            is_temporary=vipu.removes_partition,
            may_change=vipu.updates_partition,
            resets=vipu.resets_partition,
        )
    return IpuRequest(
        num_ipus=num_ipus,
        num_domains=num_domains,
        hosts=hosts,
        allocation=allocation,
        shares_devices=vipu.shares_devices,
        partition=partition_request,
    )


def choose_partition(
    plan: LaunchPlan, state: PoolState, num_ipus: int, is_own: Callable[[str], bool], log: Log
) -> str | None:
    """Return the plan's partition (set of IPUs), else the pool's only one if the job may use it, else None."""
    if plan.vipu.partition is not None or plan.vipu.pod is not None or len(state.partitions) != 1:
        return plan.vipu.partition
    (only,) = state.partitions
    if only.lease is not None or not is_own(only.user) or only.size != size_of_partition(num_ipus):
        return None
    log(f"partition {only.name} is the only one there is: used")
    return only.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The virtual IPUs that a pool has granted to a job: the IPUs of ``cluster`` with the names ``names``."""

    plan: LaunchPlan
    cluster: Cluster
    names: Sequence[str]
    partition: str | None = None

    def lease(self, pool: str) -> HeldLease:
        """Return the lease on the granted IPUs in the pool called ``pool``, with names such as ``GPU 0``."""
        shown = {ipu.name: str(ipu) for ipu in self.cluster.ipus}
        names = tuple(shown.get(name, name) for name in self.names)
        return HeldLease(host=fold_hosts(self.plan.hosts), names=names, pool=pool, partition=self.partition)

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs that the job uses on a host, as programs name them; more GPUs than these may be granted."""
        by_name = {ipu.name: ipu for ipu in self.cluster.ipus}
        return tuple(by_name[name].device for name in self.names[: self.plan.num_gpus_per_host])

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores that the granted virtual IPUs stand for; each is an equal part of the plan's cores."""
        number = {ipu.name: ipu.index for ipu in self.cluster.ipus}
        num_ipus, num_cores = len(self.cluster.ipus), len(self.plan.cores)
        cores: set[int] = set()
        for index in (number[name] for name in self.names[: self.plan.num_ipus_per_host]):
            first = min(index * num_cores // num_ipus, num_cores - 1)
            last = max(first + 1, (index + 1) * num_cores // num_ipus)
            cores.update(self.plan.cores[first:last])
        return tuple(sorted(cores))

    def check_domains(self, num_hosts: int) -> None:
        """Raise PartitionError if the granted IPUs are in more groups of linked IPUs than there are instances."""
        num_domains = len({ipu.domain for ipu in self.cluster.ipus if ipu.name in self.names})
        if num_domains > self.plan.num_instances_per_host * num_hosts:
            least = num_domains * len(self.plan.hosts) // num_hosts
            raise PartitionError(
                f"partition {self.partition} lies in {num_domains} IPU-Link domains, and each needs an instance: "
                f"give --num-instances {least} or more"
            )
