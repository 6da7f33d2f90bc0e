"""The way from what a job wants of a pool to the leases that it holds, the same for every kind of pool.

A job's claim stands in the queue of a pool until the pool grants it. Then the job has a lease, which stands beside
its plan (`LeasedPlan`), and everything is given back when the job has ended. The pool of this machine
(`local_lease`) and that of a server (`server_lease`) differ in how a request is sent; the rest is here.
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
    """A plan with the leases taken for it."""

    plan: LaunchPlan  # as it was made
    given: LeasedDevices  # what leases gave it on this machine, in the place of what the plan names
    network: JobNetwork | None = None  # of several hosts, with what each has given
    leases: tuple[HeldLease, ...] = ()
    has_gpus: bool = False  # whether the GPUs that it computes on are among the leases
    reacquire: Callable[[JobNetwork], JobNetwork] = lambda network: network
    """Acquires anew the leases of hosts that were lost, before a restart; the network with them."""

    @property
    def shown_plan(self) -> LaunchPlan:
        """The plan for a print-out, with the devices and cores of the job in place of those it was made for."""
        given = self.given
        return replace(self.plan, devices=given.devices, cores=given.cores, bindings=given.bindings)

    def with_leases(self, given: LeasedDevices, *leases: HeldLease) -> "LeasedPlan":
        """The plan with further leases, with which it has been given ``given`` in all."""
        return replace(self, given=given, leases=(*self.leases, *leases))


class Claim(ABC):
    """A job's place in the queue of a pool, for ``partition`` if it is one, and its lease when that is granted."""

    def __init__(self, partition: str | None) -> None:
        self.partition = partition

    @abstractmethod
    def _ask_pool(self) -> tuple[str, ...]:
        """Take a place in the queue, or ask again from there; names of what is granted, none while it waits."""

    @abstractmethod
    def _wait(self, timeout_seconds: float | None) -> None:
        """Return when another request may be granted, after ``timeout_seconds`` at most if it is given."""

    @abstractmethod
    def _refusal(self, *, advises: bool) -> str:
        """The words that say who has what is wanted, and what can be done about it if ``advises``."""

    def wait_until_granted(self, vipu: VipuSettings, log: Log) -> tuple[str, ...]:
        """Ask as often as ``vipu`` says; the names that were granted, or an IpusTakenError if others have them."""
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
    """The request of a job for ``num_ipus`` virtual IPUs or GPUs, equally many on each of ``hosts`` if any."""
    vipu, wanted = plan.vipu, None
    if partition is not None:
        wanted = PartitionRequest(
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
        partition=wanted,
    )


def choose_partition(
    plan: LaunchPlan, state: PoolState, num_ipus: int, is_own: Callable[[str], bool], log: Log
) -> str | None:
    """The partition that ``plan`` names, else the only one there is if it is its user's own, free, and fits."""
    if plan.vipu.partition is not None or plan.vipu.pod is not None or len(state.partitions) != 1:
        return plan.vipu.partition
    (only,) = state.partitions
    if only.lease is not None or not is_own(only.user) or only.size != size_of_partition(num_ipus):
        return None
    log(f"partition {only.name} is the only one there is: used")
    return only.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a pool has granted a job: the virtual IPUs of ``cluster`` that are called ``names``."""

    plan: LaunchPlan
    cluster: Cluster
    names: Sequence[str]
    partition: str | None = None

    def lease(self, pool: str) -> HeldLease:
        """The lease on them, as people read it."""
        shown = {ipu.name: str(ipu) for ipu in self.cluster.ipus}
        names = tuple(shown.get(name, name) for name in self.names)
        return HeldLease(host=fold_hosts(self.plan.hosts), names=names, pool=pool, partition=self.partition)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices for GPUs, the first ones where a partition has more than are used."""
        by_name = {ipu.name: ipu for ipu in self.cluster.ipus}
        return tuple(by_name[name].device for name in self.names[: self.plan.num_gpus_per_host])

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores that virtual IPUs of a CPU stand for: each for an equal share of those of the plan."""
        number = {ipu.name: ipu.index for ipu in self.cluster.ipus}
        num_ipus, num_cores = len(self.cluster.ipus), len(self.plan.cores)
        cores: set[int] = set()
        for index in (number[name] for name in self.names[: self.plan.num_ipus_per_host]):
            first = min(index * num_cores // num_ipus, num_cores - 1)
            last = max(first + 1, (index + 1) * num_cores // num_ipus)
            cores.update(self.plan.cores[first:last])
        return tuple(sorted(cores))

    def check_domains(self, num_hosts: int) -> None:
        """Check that they, of so many hosts, lie in no more IPU-Link domains than those have instances."""
        num_domains = len({ipu.domain for ipu in self.cluster.ipus if ipu.name in self.names})
        if num_domains > self.plan.num_instances_per_host * num_hosts:
            least = num_domains * len(self.plan.hosts) // num_hosts
            raise PartitionError(
                f"partition {self.partition} lies in {num_domains} IPU-Link domains, and each needs an instance: "
                f"give --num-instances {least} or more"
            )
