"""What people do with partitions, on the pool of this machine: `vipu` and the server call the same methods."""

from collections.abc import Callable

from poprun.errors import IpusTakenError, PartitionError, PlanError
from poprun.plan.counts import check_count
from poprun.plan.inventory import Cluster, size_of_partition
from poprun.pool.clusters import check_names
from poprun.pool.pool import Pool
from poprun.pool.records import Partition, PoolState


class LocalPool:
    """The pool of this machine with the cluster that it hands out.

    Args:
        pool: Its file.
        find_cluster: Looks at what there is.
    """

    def __init__(self, pool: Pool, find_cluster: Callable[[], Cluster]) -> None:
        self.pool = pool
        self.cluster = find_cluster

    def state(self) -> PoolState:
        """What stands in the pool now."""
        return self.pool.state()

    def create_partition(
        self, name: str, size: int, *, allocation: str | None, cluster: str | None, user: str | None = None
    ) -> Partition:
        """Make a partition of free IPUs.

        Args:
            name: Its name.
            size: How many IPUs, a power of two.
            allocation: The part of the cluster to take them from, or None.
            cluster: The cluster, of which there is one, or None.
            user: Whose it is; None for the user of this process.

        Raises:
            PlanError: If that is no name, or no number.
            PartitionError: If there is one of that name, the size is no power of two, or there is no such part.
            IpusTakenError: If too few are free.
        """
        check_count("--size", size)
        if not (name and name.isprintable()):
            raise PlanError(f"partition {name!r} is not possible: it is a name")
        if size != size_of_partition(size):
            more = size_of_partition(size)
            raise PartitionError(
                f"--size {size}: the size of a partition is a power of two; nearest: {more // 2} or {more}"
            )
        ours = self.cluster()
        check_names(ours, allocation, cluster)
        choose = ours.pick(size, allocation)
        made = self.pool.create_partition(name, choose, cluster=ours.name, allocation=allocation or "", user=user)
        if made is None:
            raise IpusTakenError(
                f"no IPU-Link domain has {size} free IPUs that belong together: vipu list ipus shows who has them"
            )
        return made

    def reset_partition(self, name: str) -> Partition:
        """Choose the IPUs of a partition anew.

        Raises:
            PartitionError: If there is none.
            IpusTakenError: If a job holds it, or too few others are free.
        """
        ours = self.cluster()
        old = self.pool.state().partition(name)
        allocation = (old.allocation or None) if old is not None else None
        made = self.pool.reset_partition(name, lambda size: ours.pick(size, allocation))
        if made is None:
            raise IpusTakenError(
                f"partition {name} keeps its IPUs: there are not as many free ones that belong together"
            )
        return made

    def remove_partition(self, name: str) -> None:
        """Remove a partition that nobody uses.

        Raises:
            PartitionError: If there is none.
            IpusTakenError: If a job holds it.
        """
        self.pool.remove_partition(name)
