"""The virtual IPUs of a job: asked of the pool before it starts, given back when it has ended."""

import os
import shlex
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from poprun.cli import screen
from poprun.cli.queueing import pool_file, pool_of, wait_for
from poprun.errors import PartitionError, PlanError, PoolError
from poprun.inventory import Cluster, VirtualIpu, size_of_partition
from poprun.plan import LaunchPlan
from poprun.pool.clusters import check_names, choose_cluster, pod_of
from poprun.pool.holders import is_here
from poprun.pool.pool import Pool, Ticket
from poprun.pool.records import PoolState
from poprun.pool.wishes import PartitionWish, Wish
from poprun.process_tree import ancestors
from poprun.topology import Gpu
from poprun.users import user_name

FindGpus = Callable[[], Sequence[Gpu]]


def mark_leased(gpus: Sequence[Gpu], pool: str | None) -> tuple[Gpu, ...]:
    """``gpus`` with a mark at those that jobs and partitions of the pool hold."""
    taken = Pool(pool_file(pool)).state().taken
    return tuple(replace(gpu, is_leased=(gpu.uuid or gpu.name) in taken) for gpu in gpus)


@contextmanager
def leased(
    plan: LaunchPlan, gpus: Sequence[Gpu], find_gpus: FindGpus, *, is_fixed: bool
) -> Iterator[tuple[LaunchPlan, tuple[int, ...]]]:
    """Hold the virtual IPUs of a job; its plan with them, and the descriptor that is the lease.

    A job that a program of another job starts runs on that one's GPUs, and needs no lease of its own.

    Args:
        plan: The job.
        gpus: The GPUs of this machine.
        find_gpus: Looks at them again.
        is_fixed: Whether the job needs just those devices that its plan names.

    Raises:
        IpusTakenError: If others hold them, and the job does not wait.
        PartitionError: If the partition does not fit the job.
        PlanError: If there can never be as many.
        PoolError: If the pool cannot be used.
    """
    pool = pool_of(plan)
    state = pool.state()
    plan = _in_only_partition(plan, state)
    asker = _Asker(plan, gpus, find_gpus, is_fixed=is_fixed)
    inherited = _inherited(asker.cluster, state) if plan.devices else []
    if len(inherited) >= plan.num_slots_per_host:
        yield _with_ipus(plan, asker.cluster, inherited[: plan.num_slots_per_host]), ()
        return
    ticket = pool.ask(shlex.join(plan.program), asker.wish())
    try:
        ticket = wait_for(pool, ticket, asker)
        yield _with_ipus(plan, asker.cluster, ticket.ipus), (ticket.descriptor,)
    finally:
        _release(pool, ticket)


def _in_only_partition(plan: LaunchPlan, state: PoolState) -> LaunchPlan:
    """``plan`` in the one partition that there is, if it names none, that one is its user's own, and it fits."""
    if plan.vipu.partition is not None or plan.vipu.pod is not None or len(state.partitions) != 1:
        return plan
    (only,) = state.partitions
    is_own = only.user == user_name(os.getuid()) and only.lease is None
    if not is_own or only.size != size_of_partition(plan.num_slots_per_host):
        return plan
    screen.tell(f"partition {only.name} is the only one there is: used")
    return replace(plan, vipu=replace(plan.vipu, partition=only.name))


def _inherited(cluster: Cluster, state: PoolState) -> list[str]:
    """The IPUs that a job holds among whose processes this one is, in slot order."""
    above = set(ancestors(os.getpid()))
    leases = (lease for lease in state.leases if lease.holder.pid in above and is_here(lease.holder))
    held = {name for lease in leases for name in lease.ipus}
    return [ipu.name for ipu in cluster.ipus if ipu.name in held]


def _release(pool: Pool, ticket: Ticket) -> None:
    """Give everything back; where that cannot be written any more, the end of this process ends the lease."""
    try:
        pool.release(ticket)
    except PoolError as error:
        screen.tell(f"warning: {error}")


class _Asker:
    """What a job wishes for, as the machine is at the moment."""

    def __init__(self, plan: LaunchPlan, gpus: Sequence[Gpu], find_gpus: FindGpus, *, is_fixed: bool) -> None:
        self.plan = plan
        self._find_gpus = find_gpus
        self._is_fixed = is_fixed
        self.cluster = self._cluster_of(gpus)
        self._check()

    def wish(self, *, looks_again: bool = False) -> Wish:
        """The wish; GPUs are looked at again for processes outside the pool where that is asked for."""
        if looks_again and self.plan.devices:
            self.cluster = self._cluster_of(self._find_gpus())
        vipu = self.plan.vipu
        if vipu.partition is None:
            return Wish(num_ipus=self.plan.num_slots_per_host, choose=self._choose(self.plan.num_slots_per_host))
        used = size_of_partition(self.plan.num_slots_per_host)
        without_turns = size_of_partition(
            self.plan.num_replicas // len(self.plan.hosts) * self.plan.ipus_per_replica
        )
        return Wish(
            num_ipus=self.plan.num_slots_per_host,
            choose=self._choose(used),
            partition=PartitionWish(
                name=vipu.partition,
                fitting=range(used, without_turns + 1),
                cluster=self.cluster.name,
                allocation=self._allocation or "",
                is_temporary=vipu.removes_partition,
                may_change=vipu.updates_partition,
                resets=vipu.resets_partition,
                is_known=self._is_known,
            ),
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether processes outside the pool hold memory on GPUs that the job might use."""
        return not self.plan.vipu.shares_devices and any(ipu.occupants for ipu in self.cluster.ipus)

    def _cluster_of(self, gpus: Sequence[Gpu]) -> Cluster:
        vipu = self.plan.vipu
        is_counted = vipu.ipus_per_host is not None
        return choose_cluster(
            socket.gethostname(),
            gpus if self.plan.devices else (),
            len(self.plan.cores),
            ipus_per_host=vipu.ipus_per_host
            if is_counted or vipu.partition or self.plan.devices
            else self._num_cores(),
            pod=None if vipu.pod is None else pod_of(vipu.pod),
        )

    def _num_cores(self) -> int:
        """A CPU that nobody has counted has a slot for each core; a job that uses more takes all there are."""
        return max(len(self.plan.cores), self.plan.num_slots_per_host)

    def _check(self) -> None:
        needed, there = self.plan.num_slots_per_host, len(self.cluster.ipus)
        check_names(self.cluster, self._allocation)
        if not self.cluster.is_open and needed > there:
            raise PlanError(f"the job needs {needed} virtual IPUs, and {self.cluster.name} has {there}")

    def _choose(self, num_ipus: int) -> Callable[[Collection[str]], tuple[VirtualIpu, ...]]:
        pick = (
            self._pick_fixed
            if self._is_fixed and self.plan.devices
            else self.cluster.pick(num_ipus, self._allocation)
        )
        occupied = {ipu.name for ipu in self.cluster.ipus if ipu.occupants and not self.plan.vipu.shares_devices}
        return lambda taken: pick(occupied.union(taken))

    @property
    def _allocation(self) -> str | None:
        """The part of the pod to take IPUs from; a machine that is no pod has none, whatever is asked for."""
        vipu = self.plan.vipu
        name = vipu.allocation or vipu.cluster
        return None if vipu.pod is None or name == self.cluster.name else name

    def _pick_fixed(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        by_device = {ipu.device: ipu for ipu in self.cluster.ipus}
        wanted = tuple(by_device[device] for device in self.plan.devices if device in by_device)
        return wanted if not any(ipu.name in taken for ipu in wanted) else ()

    def _is_known(self, name: str) -> bool:
        return self.cluster.is_open or any(ipu.name == name for ipu in self.cluster.ipus)


def _with_ipus(plan: LaunchPlan, cluster: Cluster, names: Sequence[str]) -> LaunchPlan:
    """``plan`` on the IPUs that it was given: its GPUs, or the cores that its slots are a share of."""
    by_name = {ipu.name: ipu for ipu in cluster.ipus}
    used = names[: plan.num_slots_per_host]
    num_domains = len({by_name[name].domain for name in names if name in by_name})
    if num_domains > plan.num_instances_per_host:
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
