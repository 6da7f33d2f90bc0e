"""Which pool `vipu` works on: that of this machine, or that of a server."""

import os
import socket
from dataclasses import dataclass
from typing import Final

from poprun.errors import PlanError
from poprun.lease.server_client import RemotePool, read_token, token_file
from poprun.lease.server_connection import ServerAddress
from poprun.plan.inventory import Cluster
from poprun.pool.clusters import choose_cluster, pod_of
from poprun.pool.partitions import LocalPool
from poprun.pool.place import DEFAULT_POOL, POOL_VARIABLE
from poprun.pool.pool import Pool
from poprun.probe.cpus import usable_cores
from poprun.probe.gpus import find_gpus
from poprun.process.users import user_name

_SERVER_BUSY_SECONDS: Final = 10.0
POD_VARIABLE: Final = "POPRUN_POD"
IPUS_VARIABLE: Final = "POPRUN_IPUS_PER_HOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
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
