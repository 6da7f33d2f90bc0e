"""A wish as plain values, which can be sent: whoever has the cluster makes of it what a pool is asked. Pure."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from poprun.errors import PartitionError, PlanError
from poprun.plan.inventory import Cluster, VirtualIpu, choose_ipus
from poprun.plan.pods import share_of
from poprun.pool.clusters import check_names
from poprun.pool.requests import PartitionWish, Wish

Choose = Callable[[Collection[str]], tuple[VirtualIpu, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPartition:
    """The partition that a job wants to run in.

    Attributes:
        name: Its name.
        least: The smallest size that fits the job, which a new partition gets.
        most: The largest size that fits.
        is_temporary: Whether one that is made ends with the job.
        may_change: Whether one of another size may be changed.
        resets: Whether its IPUs are chosen anew: True always, None when some are not there any more, False never.
    """

    name: str
    least: int
    most: int
    is_temporary: bool
    may_change: bool
    resets: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWish:
    """IPUs that a job wants, of a cluster that somebody else knows.

    Attributes:
        num_ipus: How many it uses. At least 1.
        hosts: The hosts that it runs on, each with equally many of them; none where it does not matter.
        allocation: The part of the cluster that they are taken from, or None.
        shares_devices: Whether devices may be used that processes outside the pool use.
        partition: The partition that it wants, or None.
    """

    num_ipus: int
    hosts: tuple[str, ...] = ()
    allocation: str | None = None
    shares_devices: bool = False
    partition: PlainPartition | None = None

    def of(self, cluster: Cluster) -> Wish:
        """The wish for IPUs of ``cluster``.

        Raises:
            PartitionError: If there is no such allocation.
            PlanError: If there can never be as many, or the cluster knows other hosts.
        """
        check_names(cluster, self.allocation)
        if not cluster.is_open and self.num_ipus > len(cluster.part(self.allocation)):
            whole = f"allocation {self.allocation}" if self.allocation else cluster.name
            there = len(cluster.part(self.allocation))
            raise PlanError(f"the job needs {self.num_ipus} virtual IPUs, and {whole} has {there}")
        num_chosen = self.partition.least if self.partition else self.num_ipus
        return Wish(
            num_ipus=self.num_ipus,
            choose=self._choose(cluster, num_chosen),
            partition=None if self.partition is None else self._partition_of(cluster, self.partition),
        )

    def _partition_of(self, cluster: Cluster, wanted: PlainPartition) -> PartitionWish:
        names = {ipu.name for ipu in cluster.ipus}
        return PartitionWish(
            name=wanted.name,
            fitting=range(wanted.least, wanted.most + 1),
            cluster=cluster.name,
            allocation=self.allocation or "",
            is_temporary=wanted.is_temporary,
            may_change=wanted.may_change,
            resets=wanted.resets,
            is_known=bool if cluster.is_open else names.__contains__,
        )

    def _choose(self, cluster: Cluster, num_chosen: int) -> Choose:
        pick = cluster.pick(num_chosen, self.allocation)
        if cluster.hosts and self.hosts:
            pick = _on_hosts(cluster, self.hosts, num_chosen, self.allocation)
        occupied = {ipu.name for ipu in cluster.ipus if ipu.occupants and not self.shares_devices}
        return lambda taken: pick(occupied.union(taken))


def _on_hosts(cluster: Cluster, hosts: tuple[str, ...], num_ipus: int, allocation: str | None) -> Choose:
    """How to take equally many IPUs of each host, each time in one IPU-Link domain."""
    strangers = [host for host in hosts if host not in cluster.hosts]
    if strangers:
        raise PlanError(
            f"the job runs on {', '.join(strangers)}, and the hosts of {cluster.name} are "
            f"{', '.join(cluster.hosts)}: choose among them with --host"
        )
    if num_ipus % len(hosts):
        raise PartitionError(
            f"a partition of {num_ipus} IPUs does not divide over {len(hosts)} hosts: give a power of two of hosts"
        )
    part = set(cluster.part(allocation))
    of_host = [[ipu for ipu in share_of(cluster, host) if ipu in part] for host in hosts]

    def choose(taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        picked = [
            choose_ipus([it for it in ipus if it.name not in taken], num_ipus // len(hosts), cluster.domain_size)
            for ipus in of_host
        ]
        return tuple(ipu for ipus in picked for ipu in ipus) if all(picked) else ()

    return choose
