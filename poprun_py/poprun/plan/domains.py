"""How many IPU-Link domains a job spans, and whether its instances fit into them.

Pure arithmetic. An instance lies in one domain, because its IPUs exchange what they compute; so each domain has at
least one instance, and all have equally many.
"""

from poprun.errors import PlanError
from poprun.plan.inventory import Cluster


def num_ilds(asked: int | None, pod: Cluster | None, *, num_instances: int, ipus_per_replica: int) -> int | None:
    """The IPU-Link domains of a job; None where nobody has asked for any and there is no pod that has some.

    Args:
        asked: ``--num-ilds``, or None.
        pod: The pod that is planned for, or None.
        num_instances: Processes in the job.
        ipus_per_replica: IPUs that each of them holds.

    Raises:
        PlanError: If the job does not fit into the pod, or its instances not evenly into the domains.
    """
    needed = None if pod is None else _needed(pod, num_instances, ipus_per_replica)
    if asked is not None and needed is not None and asked < needed:
        raise PlanError(
            f"--num-ilds {asked} is too few: {num_instances} instances of {ipus_per_replica} IPUs fill {needed} "
            f"IPU-Link domains of {pod.domain_size if pod else 0}; give --num-ilds {needed}, or leave it out"
        )
    number = asked or needed
    if number is not None and num_instances % number:
        fewer = num_instances // number * number
        raise PlanError(
            f"--num-instances {num_instances} does not divide over {number} IPU-Link domains: each holds the same "
            f"number; nearest: {f'{fewer} or ' if fewer else ''}{fewer + number} instances"
        )
    return number


def _needed(pod: Cluster, num_instances: int, ipus_per_replica: int) -> int:
    size, num_ipus = pod.domain_size, num_instances * ipus_per_replica
    if num_ipus > len(pod.ipus):
        raise PlanError(
            f"--pod {pod.name} has {len(pod.ipus):,} IPUs, and {num_instances:,} instances of {ipus_per_replica} "
            f"use {num_ipus:,}: give fewer instances, whose replicas then take turns, or a larger pod"
        )
    if ipus_per_replica > size:
        raise PlanError(
            f"--ipus-per-replica {ipus_per_replica}: a replica lies in one IPU-Link domain, and those of "
            f"{pod.name} have {size} IPUs"
        )
    return -(-num_instances // (size // ipus_per_replica))
