"""The virtual IPUs of a job: asked of the pool before it starts, given back when it has ended."""

import os
import shlex
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from poprun.cli import screen
from poprun.errors import IpusTakenError, PartitionError, PlanError, PoolError
from poprun.inventory import Cluster, VirtualIpu, size_of_partition
from poprun.plan import LaunchPlan
from poprun.pool.clusters import check_names, choose_cluster, pod_of
from poprun.pool.place import DEFAULT_POOL
from poprun.pool.pool import Pool, Ticket
from poprun.pool.refusals import refusal
from poprun.pool.waiting import wait_for_turn
from poprun.pool.wishes import PartitionWish, Wish
from poprun.topology import Gpu

FindGpus = Callable[[], Sequence[Gpu]]

_ATTEMPT_SECONDS = 1.0
_OCCUPANTS_SECONDS = 5.0
"""How often to ask the driver whether a process outside the pool still holds memory."""


def mark_leased(gpus: Sequence[Gpu], pool: str | None) -> tuple[Gpu, ...]:
    """``gpus`` with a mark at those that jobs and partitions of the pool hold."""
    taken = Pool(_absolute(pool)).state().taken
    return tuple(replace(gpu, is_leased=(gpu.uuid or gpu.name) in taken) for gpu in gpus)


@contextmanager
def leased(plan: LaunchPlan, find_gpus: FindGpus, *, is_fixed: bool) -> Iterator[tuple[LaunchPlan, int]]:
    """Hold the virtual IPUs of a job; its plan with them, and the descriptor that is the lease.

    Args:
        plan: The job.
        find_gpus: Looks at the GPUs of this machine.
        is_fixed: Whether the job needs just those devices that its plan names.

    Raises:
        IpusTakenError: If others hold them, and the job does not wait.
        PartitionError: If the partition does not fit the job.
        PlanError: If there can never be as many.
        PoolError: If the pool cannot be used.
    """
    asker = _Asker(plan, find_gpus, is_fixed=is_fixed)
    pool = pool_of(plan)
    ticket = pool.ask(shlex.join(plan.program), asker.wish())
    try:
        ticket = wait_for(pool, ticket, asker)
        yield _with_ipus(plan, asker.cluster, ticket.ipus), ticket.descriptor
    finally:
        _release(pool, ticket)


def _release(pool: Pool, ticket: Ticket) -> None:
    """Give everything back; where that cannot be written any more, the end of this process ends the lease."""
    try:
        pool.release(ticket)
    except PoolError as error:
        screen.tell(f"warning: {error}")


def pool_of(plan: LaunchPlan) -> Pool:
    """The pool that a job asks."""
    return Pool(_absolute(plan.vipu.pool), plan.vipu.server_timeout_seconds)


class Asker(Protocol):
    """What a job wishes for, and of what."""

    plan: LaunchPlan
    cluster: Cluster

    @property
    def waits_for_others(self) -> bool:
        """Whether processes outside the pool may have to end first."""

    def wish(self, *, looks_again: bool = False) -> Wish:
        """The wish, as the machine is at the moment."""


def _absolute(pool: str | None) -> str:
    return os.path.abspath(pool or DEFAULT_POOL)


class _Asker:
    """What a job wishes for, as the machine is at the moment."""

    def __init__(self, plan: LaunchPlan, find_gpus: FindGpus, *, is_fixed: bool) -> None:
        self.plan = plan
        self._find_gpus = find_gpus
        self._is_fixed = is_fixed
        self.cluster = self._find_cluster()
        self._check()

    def wish(self, *, looks_again: bool = False) -> Wish:
        """The wish; GPUs are looked at again for processes outside the pool where that is asked for."""
        if looks_again and self.plan.devices:
            self.cluster = self._find_cluster()
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

    def _find_cluster(self) -> Cluster:
        vipu = self.plan.vipu
        is_counted = vipu.ipus_per_host is not None
        return choose_cluster(
            socket.gethostname(),
            self._find_gpus() if self.plan.devices else (),
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


def wait_for(pool: Pool, ticket: Ticket, asker: Asker) -> Ticket:
    """See a ticket to what its asker wishes for.

    Raises:
        IpusTakenError: If the job does not wait, or not that often.
    """
    vipu = asker.plan.vipu
    attempts_left = vipu.partition_attempts - 1 if vipu.partition else 0
    is_told = False
    while not ticket.ipus:
        wish = asker.wish()
        words = refusal(wish, asker.cluster, pool.state(), own=ticket.id, shares=vipu.shares_devices)
        if not vipu.waits_for_devices and not attempts_left:
            raise IpusTakenError(words)
        if not is_told:
            screen.tell(f"waiting: {words.replace('; queue for them with --wait-for-devices', '')}")
        is_told = True
        if vipu.waits_for_devices:
            wait_for_turn(pool, ticket, wish, _OCCUPANTS_SECONDS if asker.waits_for_others else float("inf"))
        else:
            attempts_left -= 1
            wait_for_turn(pool, ticket, wish, _ATTEMPT_SECONDS)
        ticket = pool.try_again(ticket, asker.wish(looks_again=True))
    return ticket


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
