"""The pool that `vipu` works on: that of this machine, or that of a server, with the same methods."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from poprun.errors import IpusTakenError, PartitionError, PlanError
from poprun.lease.server_client import RemotePool, read_token, token_file
from poprun.lease.server_connection import ServerAddress
from poprun.plan.counts import check_count
from poprun.plan.inventory import Cluster, size_of_partition
from poprun.pool.clusters import check_names, choose_cluster, pod_of
from poprun.pool.place import DEFAULT_POOL, POOL_VARIABLE
from poprun.pool.pool import Pool
from poprun.pool.records import Partition, PoolState
from poprun.probe.hardware import find_gpus, usable_cores
from poprun.process.users import user_name


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


_SERVER_BUSY_SECONDS: Final = 10.0
POD_VARIABLE: Final = "POPRUN_POD"
IPUS_VARIABLE: Final = "POPRUN_IPUS_PER_HOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAddress:
    """What the words before the command say.

    Attributes:
        server_host: Where a server is, or None for the pool of this machine.
        server_port: Its port.
        timeout_seconds: How long it may take to answer.
    """

    server_host: str | None
    server_port: int
    timeout_seconds: float

    def pool(self) -> LocalPool | RemotePool:
        """The pool that is worked on.

        Raises:
            ServerError: If there is no token for the server.
        """
        if self.server_host is None:
            return local_pool()
        address = ServerAddress(
            host=self.server_host,
            port=self.server_port,
            token=read_token(token_file(os.environ)),
            timeout_seconds=self.timeout_seconds,
        )
        return RemotePool(address, f"{user_name(os.getuid())}@{socket.gethostname()}")


def served_pool() -> LocalPool:
    """The pool that a server hands out: of a pod that is described, all of it, wherever its hosts are."""
    local = local_pool(_SERVER_BUSY_SECONDS)
    pod = os.environ.get(POD_VARIABLE)
    return LocalPool(local.pool, lambda: pod_of(pod)) if pod else local


def local_pool(busy_seconds: float | None = None) -> LocalPool:
    """The pool of this machine, as the variables say.

    Args:
        busy_seconds: How long to wait for the transactions of others; None for as long as a job does.
    """
    file = os.path.abspath(os.environ.get(POOL_VARIABLE) or DEFAULT_POOL)
    return LocalPool(Pool(file) if busy_seconds is None else Pool(file, busy_seconds), _cluster)


def _cluster() -> Cluster:
    pod = os.environ.get(POD_VARIABLE)
    num_ipus = os.environ.get(IPUS_VARIABLE)
    if num_ipus is not None and not num_ipus.isdecimal():
        raise PlanError(f"{IPUS_VARIABLE} {num_ipus!r}: give a whole number")
    return choose_cluster(
        socket.gethostname(),
        find_gpus(os.environ),
        len(usable_cores()),
        ipus_per_host=None if num_ipus is None else int(num_ipus),
        pod=pod_of(pod) if pod else None,
    )
