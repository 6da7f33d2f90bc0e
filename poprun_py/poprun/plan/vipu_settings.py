"""What a job asks of the pool of virtual IPUs: values that go from the request into the plan as they are.

Pure. Their defaults live here; the checks name the options that set them.
"""

import math
from dataclasses import dataclass
from typing import Final

from poprun.errors import PlanError
from poprun.plan.counts import check_count

DEFAULT_PORT: Final = 8090
"""Where a server of virtual IPUs listens."""

_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class VipuSettings:
    """The partition that a job holds, and how it comes by it.

    Attributes:
        partition: Name of the partition to use or to create, or None.
        partition_attempts: How often to try for a partition that is not ready. At least 1.
        allocation: Name of the allocation to create the partition in, or None.
        cluster: The allocation under its older name, or None.
        updates_partition: Whether a partition that does not fit is changed, or created.
        resets_partition: Whether the partition is reset first; None does so only where it has to be.
        removes_partition: Whether a partition that poprun created is removed afterwards.
        num_ilds: IPU-Link domains of the job, or None for as many as the pod has.
        ipus_per_host: Virtual IPUs that a host has; None for its GPUs, or no limit on a host without.
        waits_for_devices: Whether to queue until the virtual IPUs are free.
        shares_devices: Whether GPUs may be used that processes outside the pool use.
        is_offline: Whether the job runs without virtual IPUs.
        server_host: Where the server is whose pool the job asks, or None for the pool of the machine.
        server_port: The port of that server.
        server_timeout_seconds: How long the pool, or the server, may take to answer.
        pool: File of the pool, or None for that of the machine.
        pod: Name of the pod that the job is planned for, or the YAML file that describes it, or None.
    """

    partition: str | None = None
    partition_attempts: int = 1
    allocation: str | None = None
    cluster: str | None = None
    updates_partition: bool = False
    resets_partition: bool | None = None
    removes_partition: bool = True
    num_ilds: int | None = None
    ipus_per_host: int | None = None
    waits_for_devices: bool = False
    shares_devices: bool = False
    is_offline: bool = False
    server_host: str | None = None
    server_port: int = DEFAULT_PORT
    server_timeout_seconds: float = 120.0
    pool: str | None = None
    pod: str | None = None


def check_vipu(vipu: VipuSettings, num_instances: int) -> None:
    """See that the values of ``vipu`` are possible in a job of ``num_instances``.

    Raises:
        PlanError: If one is not.
    """
    check_count("--vipu-partition-attempts", vipu.partition_attempts)
    for option, count in (("--num-ilds", vipu.num_ilds), ("--ipus-per-host", vipu.ipus_per_host)):
        if count is not None:
            check_count(option, count)
    if vipu.num_ilds is not None and vipu.num_ilds > num_instances:
        raise PlanError(
            f"--num-ilds {vipu.num_ilds} is more than --num-instances {num_instances}: each IPU-Link domain needs "
            f"an instance; give --num-instances {vipu.num_ilds} or more, or --num-ilds {num_instances} or fewer"
        )
    if not 1 <= vipu.server_port <= _MAX_PORT:
        raise PlanError(f"--vipu-server-port {vipu.server_port} is not possible: it is 1 to {_MAX_PORT}")
    if vipu.server_host is not None and vipu.pod is not None:
        raise PlanError(
            f"--vipu-server-host {vipu.server_host} and --pod {vipu.pod} cannot go together: the server says "
            "which IPUs there are; leave one out"
        )
    seconds = vipu.server_timeout_seconds
    if not math.isfinite(seconds) or seconds <= 0:
        raise PlanError(f"--vipu-server-timeout {seconds:g} is not possible: it is a number of seconds above 0")
    for option, name in (
        ("--vipu-partition", vipu.partition),
        ("--vipu-allocation", vipu.allocation),
        ("--vipu-cluster", vipu.cluster),
        ("--vipu-server-host", vipu.server_host),
        ("--pool", vipu.pool),
        ("--pod", vipu.pod),
    ):
        if name is not None and not (name and name.isprintable()):
            raise PlanError(f"{option} {name!r} is not possible: it is a name")
