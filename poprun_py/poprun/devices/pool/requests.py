"""The requests of jobs for virtual IPUs, and the text that explains why a request is refused. Pure."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from poprun.devices.pool.clusters import check_hosts_of, check_names
from poprun.devices.pool.records import Name, Partition, PoolState, fold_names
from poprun.errors import PartitionError, PlanError
from poprun.plan.inventory import CORE, GPU, Cluster, VirtualIpu, choose_ipus
from poprun.plan.pods import share_of
from poprun.text.fields import between
from poprun.text.ranges import counted

MAX_IPUS: Final = 4096  # limit for the IPUs of a server's cluster, because one answer lists all IPUs
_MAX_HOSTS: Final = 1024

_IPU: Final = "virtual IPU"
_NOUNS: Final = {CORE: "core", GPU: "GPU"}
"""The name of a device in clusters of these kinds; in all other clusters a device is called a virtual IPU."""

Choose = Callable[[Collection[str]], Sequence[VirtualIpu]]
"""A function that gets the names of all IPUs in use and returns the chosen free IPUs; () if too few are free."""


IpuCount = Annotated[int, between(1, MAX_IPUS)]


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    if len(hosts) > _MAX_HOSTS:
        raise ValueError(f"must be {_MAX_HOSTS} names at most")
    return hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRequest:
    """The named set of IPUs (partition) that a job requests: name, size, and whether it may be changed."""

    name: Name
    size: IpuCount  # the size that fits the job, a power of two
    is_temporary: bool = True  # whether a partition that is made for the job ends with the job
    may_change: bool = False  # whether a partition of another size may be changed
    resets: bool | None = None  # whether the IPUs are chosen anew; None: only if some IPUs do not exist any more

    def must_change(self, found: Partition, is_known: Callable[[str], bool]) -> bool:
        """Whether the partition ``found`` must get other IPUs, for example because the request is for
        another size, or an IPU is gone. Raises PartitionError if the user has not allowed the change.
        """
        if found.size != self.size:
            if self.may_change:
                return True
            raise PartitionError(
                f"partition {found.name} has {found.size} IPUs, and the job fits one of {self.size}: change the "
                "job, change the partition with --update-partition=yes, or make another with vipu create "
                f"partition NAME --size {self.size}"
            )
        lost = [name for name in found.ipus if not is_known(name)]
        if lost and self.resets is False:
            raise PartitionError(
                f"partition {found.name} has lost {', '.join(lost)}, which is not on this machine now: choose its "
                "IPUs anew with --reset-partition=yes"
            )
        return bool(lost) or self.resets is True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """A job's request for virtual IPUs of one cluster: for a number of IPUs, or for a partition."""

    num_ipus: int  # number of IPUs that the job uses; a partition may have more IPUs
    choose: Choose  # chooses the IPUs for the job or for a new partition
    partition: PartitionRequest | None = None
    cluster: str = ""  # the cluster that a new partition belongs to
    allocation: str = ""  # the part of the cluster from which a new partition is made; empty: the whole cluster
    is_known: Callable[[str], bool] = bool  # whether an IPU of a given name exists
    queue_name: str = ""  # the queue of a request without a partition, so that cores have another queue than IPUs

    @property
    def queue(self) -> str:
        """Name of the queue in which the request waits. Each partition has its own queue."""
        return self.queue_name if self.partition is None else self.partition.name

    def choose_from(self, state: PoolState) -> tuple[tuple[str, ...], Sequence[VirtualIpu]]:
        """Return the names of the IPUs that the job gets, () if it must wait, and the IPUs chosen just now."""
        request, kept = self.partition, frozenset[str]()
        if request is not None and (partition := state.partition(request.name)) is not None:
            if partition.lease is not None:
                return (), ()
            if not request.must_change(partition, self.is_known):
                return partition.ipus, ()
            kept = frozenset(partition.ipus)
        chosen = self.choose(state.taken - kept)
        return tuple(ipu.name for ipu in chosen), chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class IpuRequest:
    """A job's request for virtual IPUs before the cluster is known, which can be sent to a server."""

    num_ipus: IpuCount
    num_domains: IpuCount = 1  # number of IPU-Link domains, if the cluster has several; each has equally many IPUs
    hosts: Annotated[tuple[Name, ...], _check_hosts] = ()  # hosts with equally many IPUs each; empty: any hosts
    allocation: Name | None = None  # the part of the cluster to choose from
    shares_devices: bool = False  # whether the job may use devices that processes outside the pool use
    partition: PartitionRequest | None = None

    def check(self, cluster: Cluster, where: str = "") -> None:
        """Raise PlanError, with ``where`` at its end, if ``cluster`` has too few IPUs, free and used together."""
        check_names(cluster, self.allocation)
        num_there = len(cluster.part(self.allocation))
        if not cluster.is_open and self.num_ipus > num_there:
            whole = f"allocation {self.allocation} of {cluster.name}" if self.allocation else cluster.name
            needed = counted(self.num_ipus, _NOUNS.get(cluster.kind, _IPU))
            raise PlanError(f"the job needs {needed}, and {whole} has {num_there}{where}")

    def of(self, cluster: Cluster) -> PoolRequest:
        """Return this request for ``cluster``. Raise PartitionError if its hosts cannot share the IPUs evenly."""
        num_chosen = self.partition.size if self.partition else self.num_ipus
        pick: Choose = cluster.pick(num_chosen, self.allocation, self.num_domains)
        if cluster.hosts and self.hosts:
            pick = self._on_hosts(cluster, num_chosen)
        occupied = {ipu.name for ipu in cluster.ipus if ipu.occupants and not self.shares_devices}
        return PoolRequest(
            num_ipus=self.num_ipus,
            choose=lambda taken: pick(occupied.union(taken)),
            partition=self.partition,
            cluster=cluster.name,
            allocation=self.allocation or "",
            is_known=bool if cluster.is_open else {ipu.name for ipu in cluster.ipus}.__contains__,
        )

    def _on_hosts(self, cluster: Cluster, num_ipus: int) -> Choose:
        """Return a function that chooses ``num_ipus`` free IPUs, the same number on each requested host."""
        hosts = self.hosts
        check_hosts_of(cluster, hosts)
        if num_ipus % len(hosts):
            raise PartitionError(
                f"a partition of {num_ipus} IPUs does not divide over {len(hosts)} hosts: give a power of two of "
                "hosts"
            )
        part = set(cluster.part(self.allocation))
        of_host = [[ipu for ipu in share_of(cluster, host) if ipu in part] for host in hosts]
        num_each, num_domains = num_ipus // len(hosts), max(1, self.num_domains // len(hosts))

        def choose(taken: Collection[str]) -> tuple[VirtualIpu, ...]:
            free = ([ipu for ipu in ipus if ipu.name not in taken] for ipus in of_host)
            picked = [choose_ipus(ipus, num_each, cluster.domain_size, num_domains) for ipus in free]
            return tuple(ipu for ipus in picked for ipu in ipus) if all(picked) else ()

        return choose


_MOST_LINES: Final = 12


def refusal(  # noqa: PLR0913 - the text needs every one of these facts
    request: PoolRequest,
    cluster: Cluster,
    state: PoolState,
    *,
    own: int,
    shares: bool,
    advises: bool = True,
    place: str = "on this machine",
) -> str:
    """Return why a job gets no virtual IPUs now: who uses them, and who waits before the job's lease ``own``."""
    if request.partition is not None and (partition := state.partition(request.partition.name)) is not None:
        reason = f"partition {partition.name} is in use"
        lease = state.lease(partition.lease)
        lines = [f"{partition.name}: {lease}"] if lease is not None else []
    else:
        free = [ipu for ipu in cluster.ipus if ipu.name not in state.taken and (shares or not ipu.occupants)]
        there = f"of {len(cluster.ipus)} {place}"
        needed = counted(request.num_ipus, _NOUNS.get(cluster.kind, _IPU))
        reason = f"the job needs {needed}, and {_is(len(free))} free {there}"
        lines = list(_holders(cluster, state, shares=shares))
    before = [lease for lease in state.waiting(request.queue) if lease.id < own]
    lines += [f"waiting before it for {lease.num_ipus}: {lease}" for lease in before]
    shown = lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]
    cure = "queue with --wait-for-devices"
    if not shares and any(ipu.occupants for ipu in cluster.ipus):
        cure += ", or use GPUs together with others with --share-devices"
    return "\n  ".join([f"{reason}; {cure}" if advises else reason, *shown])


def _holders(cluster: Cluster, state: PoolState, *, shares: bool) -> Iterator[str]:
    by_name = {ipu.name: ipu for ipu in cluster.ipus}
    for lease in state.leases:
        held = [str(by_name[name]) for name in lease.ipus if name in by_name]
        if held:
            yield f"{fold_names(held)}: {lease}"
    for partition in state.partitions:
        held = [str(by_name[name]) for name in partition.ipus if name in by_name]
        if partition.lease is None and held:
            yield f"{fold_names(held)}: partition {partition.name} of {partition.user}"
    if not shares:
        for ipu in cluster.ipus:
            if ipu.occupants:
                yield f"{ipu}: memory is held outside the pool by {', '.join(map(str, ipu.occupants))}"


def _is(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'}"
