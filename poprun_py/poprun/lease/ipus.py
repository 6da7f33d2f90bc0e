"""The virtual IPUs of a job: asked of the pool before it starts, given back when it has ended."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from poprun.errors import PartitionError, PoolError
from poprun.lease.asking import FindGpus, IpuAsker
from poprun.lease.queue import pool_file, pool_of, wait_for
from poprun.plan.inventory import Cluster, size_of_partition
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import Gpu
from poprun.pool.holders import is_here
from poprun.pool.pool import Pool, Ticket
from poprun.pool.records import HeldLease, PoolState
from poprun.process.tree import ancestors
from poprun.process.users import user_name
from poprun.text import screen

Tell = Callable[[str], None]


def mark_leased(gpus: Sequence[Gpu], pool: str | None) -> tuple[Gpu, ...]:
    """``gpus`` with a mark at those that jobs and partitions of the pool hold."""
    taken = Pool(pool_file(pool)).state().taken
    return tuple(replace(gpu, is_leased=(gpu.uuid or gpu.name) in taken) for gpu in gpus)


@contextmanager
def leased(
    plan: LaunchPlan, gpus: Sequence[Gpu], find_gpus: FindGpus, *, is_fixed: bool, tell: Tell = screen.tell
) -> Iterator[tuple[LaunchPlan, HeldLease]]:
    """Hold the virtual IPUs of a job on this machine; its plan with them, and the lease.

    A job that a program of another job starts runs on that one's GPUs, and needs no lease of its own.

    Args:
        plan: The job.
        gpus: The GPUs of this machine.
        find_gpus: Looks at them again.
        is_fixed: Whether the job needs just those devices that its plan names.
        tell: Tells the user of what is decided here.

    Raises:
        IpusTakenError: If others hold them, and the job does not wait.
        PartitionError: If the partition does not fit the job.
        PlanError: If there can never be as many.
        PoolError: If the pool cannot be used.
    """
    pool = pool_of(plan)
    state = pool.state()
    plan = in_only_partition(plan, state, tell)
    asker = IpuAsker(plan, gpus, find_gpus, is_fixed=is_fixed)
    inherited = _inherited(asker.cluster, state) if plan.devices else []
    if len(inherited) >= plan.num_slots_per_host:
        names = inherited[: plan.num_slots_per_host]
        yield with_ipus(plan, asker.cluster, names), _held(plan, asker.cluster, pool, names)
        return
    ticket = pool.ask(shlex.join(plan.program), asker.wish())
    try:
        ticket = wait_for(pool, ticket, asker, tell)
        held = _held(plan, asker.cluster, pool, ticket.ipus)
        yield with_ipus(plan, asker.cluster, ticket.ipus), replace(held, descriptor=ticket.descriptor)
    finally:
        _release(pool, ticket, tell)


def _held(plan: LaunchPlan, cluster: Cluster, pool: Pool, names: Sequence[str]) -> HeldLease:
    told = {ipu.name: str(ipu) for ipu in cluster.ipus}
    return HeldLease(
        host=plan.hosts[0],
        names=tuple(told.get(name, name) for name in names),
        pool=pool.file,
        partition=plan.vipu.partition,
    )


def in_only_partition(plan: LaunchPlan, state: PoolState, tell: Tell) -> LaunchPlan:
    """``plan`` in the one partition that there is, if it names none, that one is its user's own, and it fits."""
    if plan.vipu.partition is not None or plan.vipu.pod is not None or len(state.partitions) != 1:
        return plan
    (only,) = state.partitions
    is_own = only.user == user_name(os.getuid()) and only.lease is None
    if not is_own or only.size != size_of_partition(plan.num_slots_per_host):
        return plan
    tell(f"partition {only.name} is the only one there is: used")
    return replace(plan, vipu=replace(plan.vipu, partition=only.name))


def _inherited(cluster: Cluster, state: PoolState) -> list[str]:
    """The IPUs that a job holds among whose processes this one is, in slot order."""
    above = set(ancestors(os.getpid()))
    leases = (lease for lease in state.leases if lease.holder.pid in above and is_here(lease.holder))
    held = {name for lease in leases for name in lease.ipus}
    return [ipu.name for ipu in cluster.ipus if ipu.name in held]


def _release(pool: Pool, ticket: Ticket, tell: Tell) -> None:
    """Give everything back; where that cannot be written any more, the end of this process ends the lease."""
    try:
        pool.release(ticket)
    except PoolError as error:
        tell(f"warning: {error}")


def with_ipus(plan: LaunchPlan, cluster: Cluster, names: Sequence[str]) -> LaunchPlan:
    """``plan`` on the IPUs that it was given: its GPUs, or the cores that its slots are a share of."""
    by_name = {ipu.name: ipu for ipu in cluster.ipus}
    used = names[: plan.num_slots_per_host]
    num_domains = len({by_name[name].domain for name in names if name in by_name})
    if num_domains > plan.num_instances:
        raise PartitionError(
            f"partition {plan.vipu.partition} lies in {num_domains} IPU-Link domains, and each needs an instance: "
            f"give --num-instances {num_domains} or more"
        )
    if plan.devices:
        return replace(plan, devices=tuple(by_name[name].device for name in used))
    if plan.vipu.ipus_per_host is None:
        return plan
    num_slots, num_cores = len(cluster.ipus), len(plan.cores)
    slots = [by_name[name].index for name in used]
    ours = {plan.cores[min(slot * num_cores // num_slots, num_cores - 1)] for slot in slots}
    ours.update(
        plan.cores[core]
        for slot in slots
        for core in range(slot * num_cores // num_slots, (slot + 1) * num_cores // num_slots)
    )
    return replace(plan, cores=tuple(sorted(ours)))
