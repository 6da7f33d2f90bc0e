"""Checks that a job fits the virtual IPUs, and the number of IPU-Link domains that the job uses. Pure.

A job uses ``ipus_per_replica`` virtual IPUs for each replica. An instance is in one IPU-Link domain (IPUs with
fast links), because its IPUs exchange results. So each domain has at least one instance, and all domains have the
same number. The error for a job that does not fit names numbers that fit.
"""

import math
from collections.abc import Callable, Sequence

from poprun.errors import PlanError
from poprun.plan.inventory import Cluster, domain_sizes
from poprun.plan.plan import LaunchPlan
from poprun.plan.pods import allocation_of, share_of
from poprun.plan.request import legal_instances
from poprun.text.ranges import counted


def check_counted(plan: LaunchPlan) -> None:
    """Raise PlanError if the option ``--ipus-per-host`` gives fewer virtual IPUs than a host's replicas use."""
    num_ipus, used = plan.vipu.ipus_per_host, plan.num_ipus_per_host
    if num_ipus is not None and used > num_ipus:
        fitting = _what_fits(plan, num_ipus * len(plan.hosts), len(plan.hosts))
        raise PlanError(
            f"--ipus-per-host {num_ipus} is too few: {_load_of_host(plan)} "
            f"{'on each host ' if len(plan.hosts) > 1 else ''}use {used:,} virtual IPUs; give --ipus-per-host "
            f"{used} or more, or {fitting}"
        )


def num_ilds(plan: LaunchPlan, pod: Cluster | None) -> int | None:
    """Return how many IPU-Link domains (groups of linked IPUs) the job uses; None if neither a pod nor an option
    tells the number. Raise PlanError if the job does not fit the domains.
    """
    asked = plan.vipu.num_ilds
    if pod is None:
        if asked is not None and plan.num_instances % asked:
            raise _uneven(plan, f"{asked} IPU-Link domains", lambda count: count % asked == 0)
        return asked
    _check_room(plan, pod)
    sizes = sorted(domain_sizes(pod.part(allocation_of(pod, plan.vipu))), reverse=True)
    _check_instance(plan, pod, sizes)
    possible = _possible_ilds(plan, plan.num_instances, sizes)
    if not possible:
        domains = f"the IPU-Link domains of {pod.name}, {len(sizes)} of {sizes[0]} IPUs"
        raise _uneven(plan, domains, lambda count: bool(_possible_ilds(plan, count, sizes)))
    if asked is not None and asked not in possible:
        raise PlanError(
            f"--num-ilds {asked} does not fit {plan.num_instances:,} instances of {plan.num_ipus_per_instance} "
            f"IPUs on {pod.name}, which has {len(sizes)} IPU-Link domains of {sizes[0]}: give "
            f"{' or '.join(map(str, possible))}, or leave it out"
        )
    return asked or possible[0]


def _possible_ilds(plan: LaunchPlan, num_instances: int, sizes: Sequence[int]) -> list[int]:
    """Return all numbers of IPU-Link domains over which the job divides evenly, given the domains' ``sizes``."""
    num_ipus = plan.num_replicas * plan.ipus_per_replica
    return [
        count
        for count, size in enumerate(sizes, start=1)
        if num_instances % count == 0
        and num_ipus // count <= size
        and _keeps_replicas_together(plan, num_instances // count)
    ]


def _keeps_replicas_together(plan: LaunchPlan, num_instances: int) -> bool:
    """Whether an IPU-Link domain of ``num_instances`` instances has whole replicas, or part of just one."""
    size = plan.parallelism.instances_per_replica
    return num_instances % size == 0 or size % num_instances == 0


def _check_room(plan: LaunchPlan, pod: Cluster) -> None:
    """Raise PlanError if ``pod`` has too few IPUs for the job, or a host of the pod too few for its replicas."""
    allocation = allocation_of(pod, plan.vipu)
    ipus = pod.part(allocation)
    name = f"allocation {allocation} of {pod.name}" if allocation else pod.name
    used = plan.num_replicas * plan.ipus_per_replica
    if used > len(ipus):
        raise PlanError(
            f"{name} has {len(ipus):,} IPUs, and {_replicas_of(plan, plan.num_replicas)} use {used:,}: give "
            f"{_what_fits(plan, len(ipus))}, or a larger pod"
        )
    for host in sorted(set(plan.hosts).intersection(pod.hosts)):
        share = len(set(share_of(pod, host)).intersection(ipus))
        if plan.num_ipus_per_host > share:
            fitting = _what_fits(plan, share * len(plan.hosts), len(plan.hosts))
            raise PlanError(
                f"{host} has {share} IPUs of {name}, and {_load_of_host(plan)} use {plan.num_ipus_per_host} "
                f"there: give {fitting}, or more of its hosts"
            )


def _check_instance(plan: LaunchPlan, pod: Cluster, sizes: Sequence[int]) -> None:
    """Raise PlanError if the virtual IPUs of one instance do not fit into one IPU-Link domain."""
    if plan.num_devices_per_instance > sizes[0]:
        what = "an instance's part of a replica" if plan.parallelism.is_shared else "a replica"
        raise PlanError(
            f"--ipus-per-replica {plan.ipus_per_replica}: {what} lies in one IPU-Link domain, and those of "
            f"{pod.name} have {sizes[0]} IPUs"
        )
    if plan.num_ipus_per_instance > sizes[0]:
        legal = _legal_instances(plan)
        fitting = (count for count in legal if count > plan.num_instances and _possible_ilds(plan, count, sizes))
        least = next((f"give at least --num-instances {count}" for count in fitting), "give fewer replicas")
        raise PlanError(
            f"--num-instances {plan.num_instances}: an instance lies in one IPU-Link domain, and "
            f"{_replicas_of(plan, plan.layout.num_local_replicas)} use {plan.num_ipus_per_instance:,}, where a "
            f"domain of {pod.name} has {sizes[0]}: {least}"
        )


def _uneven(plan: LaunchPlan, domains: str, fits: Callable[[int], bool]) -> PlanError:
    """Return the error that instances do not divide evenly over ``domains``; its text has possible numbers."""
    fitting = [count for count in _legal_instances(plan) if fits(count)]
    nearest = sorted(sorted(fitting, key=lambda count: abs(count - plan.num_instances))[:2])
    cure = f"nearest: {' or '.join(map(str, nearest))} instances" if nearest else "give other replicas"
    return PlanError(
        f"--num-instances {plan.num_instances} does not divide over {domains}: each holds the same number; {cure}"
    )


def _legal_instances(plan: LaunchPlan) -> list[int]:
    """Return the numbers of instances that are possible for the plan's numbers of replicas and hosts."""
    return legal_instances(plan.num_replicas, len(plan.hosts), plan.parallelism.instances_per_replica)


def _what_fits(plan: LaunchPlan, num_ipus: int, num_parts: int = 1) -> str:
    """Return advice on how many replicas fit into ``num_ipus`` virtual IPUs on ``num_parts`` equal hosts."""
    size = plan.parallelism.instances_per_replica
    most = num_ipus // num_parts // plan.num_devices_per_instance * num_parts // size
    if plan.parallelism.is_shared:
        step = math.lcm(size, len(plan.hosts)) // size
        count = most // step * step
        return f"at most {counted(count, 'replica')}" if count else "fewer instances a replica"
    if most >= plan.num_instances:
        return f"at most --num-replicas {most // plan.num_instances * plan.num_instances}"
    if most >= len(plan.hosts):
        return f"at most {most // len(plan.hosts) * len(plan.hosts)} replicas and instances"
    return "a smaller --ipus-per-replica"


def _load_of_host(plan: LaunchPlan) -> str:
    """Return a host's load as text: ``16 replicas of 4 IPUs``, or ``8 instances of 2 IPUs`` if these share
    replicas.
    """
    if not plan.parallelism.is_shared:
        return _replicas_of(plan, plan.num_replicas // len(plan.hosts))
    instances = counted(plan.num_instances_per_host, "instance")
    return f"{instances} of {counted(plan.num_devices_per_instance, 'IPU')}"


def _replicas_of(plan: LaunchPlan, count: int) -> str:
    """Return the text for ``count`` replicas of the plan, such as ``16 replicas of 4 IPUs``."""
    return f"{counted(count, 'replica')} of {counted(plan.ipus_per_replica, 'IPU')}"
