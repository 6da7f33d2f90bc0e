"""The pool that `vipu` works on: that of this machine, or that of a server, with the same methods."""

import os
import socket
from collections.abc import Callable
from typing import Final

from poprun.devices.pool.clusters import check_names, choose_cluster, pod_of
from poprun.devices.pool.folder import BUSY_SECONDS
from poprun.devices.pool.place import POOL_VARIABLE, pool_folder
from poprun.devices.pool.pool import Pool
from poprun.devices.pool.records import Partition, PoolState
from poprun.devices.server.server_client import RemotePool, pool_at
from poprun.errors import PlanError
from poprun.plan.inventory import Cluster
from poprun.probe.machine import find_gpus, usable_cores

_SERVER_BUSY_SECONDS: Final = 10.0
_POD_VARIABLE: Final = "POPRUN_POD"
_IPUS_VARIABLE: Final = "POPRUN_IPUS_PER_HOST"


class LocalPool:
    """The pool of this machine with the cluster that it hands out, which ``find_cluster`` looks up."""

    def __init__(self, pool: Pool, find_cluster: Callable[[], Cluster]) -> None:
        self.pool = pool
        self.cluster = find_cluster

    def state(self) -> PoolState:
        """What stands in the pool now."""
        return self.pool.state()

    def create_partition(
        self, name: str, size: int, *, allocation: str | None, cluster: str | None, user: str | None = None
    ) -> Partition:
        """Make a partition of free IPUs: see :meth:`Pool.create_partition`. There is one ``cluster`` to name."""
        ours = self.cluster()
        check_names(ours, allocation, cluster)
        return self.pool.create_partition(name, ours, size, allocation=allocation, user=user)

    def reset_partition(self, name: str) -> Partition:
        """Choose the IPUs of a partition anew."""
        return self.pool.reset_partition(name, self.cluster())

    def remove_partition(self, name: str) -> None:
        """Remove a partition that nobody uses."""
        self.pool.remove_partition(name)


def target_pool(server_host: str | None, server_port: int, timeout_seconds: float) -> LocalPool | RemotePool:
    """The pool of a server, or without its host that of this machine."""
    return _local_pool(BUSY_SECONDS) if server_host is None else pool_at(server_host, server_port, timeout_seconds)


def served_pool() -> LocalPool:
    """The pool that a server hands out: of a pod that is described, all of it, wherever its hosts are."""
    local = _local_pool(_SERVER_BUSY_SECONDS)
    pod = os.environ.get(_POD_VARIABLE)
    return LocalPool(local.pool, lambda: pod_of(pod)) if pod else local


def _local_pool(busy_seconds: float) -> LocalPool:
    """The pool of this machine, as the variables say."""
    return LocalPool(Pool(pool_folder(os.environ.get(POOL_VARIABLE)), busy_seconds), _cluster)


def _cluster() -> Cluster:
    pod = os.environ.get(_POD_VARIABLE)
    num_ipus = os.environ.get(_IPUS_VARIABLE)
    if num_ipus is not None and not num_ipus.isdecimal():
        raise PlanError(f"{_IPUS_VARIABLE} {num_ipus!r}: give a whole number")
    return choose_cluster(
        socket.gethostname(),
        find_gpus(os.environ),
        len(usable_cores()),
        ipus_per_host=None if num_ipus is None else int(num_ipus),
        pod=pod_of(pod) if pod else None,
    )
