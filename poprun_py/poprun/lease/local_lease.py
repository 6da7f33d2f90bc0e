"""What a job takes of the pool of this machine: virtual IPUs, and cores of its own."""

import os
import shlex
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from poprun.errors import IpusTakenError, PartitionError, PlanError, PoolError, PoprunError
from poprun.plan.inventory import CORE, Cluster, VirtualIpu, size_of_partition
from poprun.plan.placement import flat_map
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import place
from poprun.plan.topology import Gpu, MachineFacts
from poprun.pool.clusters import allocation_of, check_names, choose_cluster, pod_of
from poprun.pool.holders import is_here, is_served
from poprun.pool.place import DEFAULT_POOL
from poprun.pool.pool import Pool, Ticket, wait_for_turn
from poprun.pool.records import HeldLease, PoolState, fold_names
from poprun.pool.requests import PartitionWish, Wish, must_change, refusal
from poprun.process.tree import ancestors
from poprun.process.users import user_name
from poprun.text import screen
from poprun.text.host_names import fold_hosts

_ATTEMPT_SECONDS = 1.0
_OCCUPANTS_SECONDS = 5.0
"""How often to ask the driver whether a process outside the pool still holds memory."""


class Asker(Protocol):
    """What a job wishes for, and of what."""

    plan: LaunchPlan
    cluster: Cluster

    @property
    def waits_for_others(self) -> bool:
        """Whether processes outside the pool may have to end first."""

    def wish(self, *, looks_again: bool = False) -> Wish:
        """The wish, as the machine is at the moment."""


def pool_of(plan: LaunchPlan) -> Pool:
    """The pool that a job asks."""
    return Pool(pool_file(plan.vipu.pool), plan.vipu.server_timeout_seconds)


def pool_file(pool: str | None) -> str:
    """Absolute path of the pool; None is that of the machine."""
    return os.path.abspath(pool or DEFAULT_POOL)


def wait_for(pool: Pool, ticket: Ticket, asker: Asker, tell: Callable[[str], None] = screen.tell) -> Ticket:
    """See a ticket to what its asker wishes for; ``tell`` is called when that means waiting.

    Raises:
        IpusTakenError: If the job does not wait, or not that often.
    """
    vipu = asker.plan.vipu
    attempts_left = vipu.partition_attempts - 1 if vipu.partition else 0
    is_told = False
    while not ticket.ipus:
        wish = asker.wish()
        gives_up = not vipu.waits_for_devices and not attempts_left
        if gives_up or not is_told:
            state = pool.state()
            shares = vipu.shares_devices
            words = refusal(wish, asker.cluster, state, own=ticket.id, shares=shares, advises=gives_up)
            words += _of_missing_server(pool, state)
            if gives_up:
                raise IpusTakenError(words)
            tell(f"waiting: {words}")
        is_told = True
        if vipu.waits_for_devices:
            wait_for_turn(pool, ticket, wish, _OCCUPANTS_SECONDS if asker.waits_for_others else float("inf"))
        else:
            attempts_left -= 1
            wait_for_turn(pool, ticket, wish, _ATTEMPT_SECONDS)
        ticket = pool.try_again(ticket, asker.wish(looks_again=True))
    return ticket


def _of_missing_server(pool: Pool, state: PoolState) -> str:
    """A line for who waits for jobs of other hosts, of which nobody knows whether they still run."""
    if all(lease.holder.key is None for lease in state.leases) or is_served(pool.file):
        return ""
    return (
        "\n  no server hands out this pool now, and without one the leases of other hosts (user@host) last: "
        "vipu serve ends those of jobs that have ended"
    )


FindGpus = Callable[[], Sequence[Gpu]]


class IpuAsker:
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
        cluster = choose_cluster(
            socket.gethostname(),
            gpus if self.plan.devices else (),
            len(self.plan.cores),
            ipus_per_host=vipu.ipus_per_host
            if is_counted or vipu.partition or self.plan.devices
            else self._num_cores(),
            pod=None if vipu.pod is None else pod_of(vipu.pod),
        )
        if not self.plan.devices:
            return cluster
        return replace(cluster, ipus=tuple(ipu for ipu in cluster.ipus if ipu.device))  # a pod may have more

    def _num_cores(self) -> int:
        """A CPU that nobody has counted has a slot for each core; a job that uses more takes all there are."""
        return max(len(self.plan.cores), self.plan.num_slots_per_host)

    def _check(self) -> None:
        check_names(self.cluster, self._allocation)
        needed, there = self.plan.num_slots_per_host, len(self.cluster.part(self._allocation))
        if not self.cluster.is_open and needed > there:
            where = (
                f"allocation {self._allocation} of {self.cluster.name}" if self._allocation else self.cluster.name
            )
            raise PlanError(f"the job needs {needed} virtual IPUs, and {where} has {there} of them here")

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
        return None if self.plan.vipu.pod is None else allocation_of(self.cluster, self.plan.vipu)

    def _pick_fixed(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        by_device = {ipu.device: ipu for ipu in self.cluster.ipus}
        wanted = tuple(by_device[device] for device in self.plan.devices if device in by_device)
        return wanted if not any(ipu.name in taken for ipu in wanted) else ()

    def _is_known(self, name: str) -> bool:
        return self.cluster.is_open or any(ipu.name == name for ipu in self.cluster.ipus)


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


_QUEUE = "core/"
"""Who waits for cores does not wait behind those who wait for virtual IPUs."""


@contextmanager
def cores_leased(
    plan: LaunchPlan, facts: MachineFacts | None, tell: Callable[[str], None] = screen.tell
) -> Iterator[tuple[LaunchPlan, HeldLease]]:
    """Hold the cores that the instances have to themselves on this machine; the plan with them, and the lease.

    Args:
        plan: The job.
        facts: What the job may use of the machine; None when it needs just those cores that its plan names.
        tell: Tells the user of waiting.

    Raises:
        IpusTakenError: If other jobs hold them, and this one does not wait.
        PoolError: If the pool cannot be used.
    """
    asker = CoreAsker(plan, facts)
    pool = pool_of(plan)
    ticket = pool.ask(shlex.join(plan.program), asker.wish())
    try:
        ticket = wait_for(pool, ticket, asker, tell)
        held = HeldLease(host=plan.hosts[0], names=ticket.ipus, pool=pool.file, descriptor=ticket.descriptor)
        yield asker.placed, held
    finally:
        pool.release(ticket)


class CoreAsker:
    """The cores that a job wishes for; ``placed`` is its plan on those that it was offered last."""

    waits_for_others = False

    def __init__(self, plan: LaunchPlan, facts: MachineFacts | None) -> None:
        self.plan = self.placed = plan
        self._facts = facts
        cpus = () if facts is None else facts.cpus or flat_map(facts.cores)
        self._siblings = {cpu: [_name(it.number) for it in cpus if it.core == cpu.core] for cpu in cpus}
        there = (cpu.number for cpu in cpus) if cpus else _bound(plan)
        self.cluster = Cluster(name=socket.gethostname(), kind=CORE, ipus=_named(there))

    def wish(self, *, looks_again: bool = False) -> Wish:
        """As many cores as there are threads, or just those that the plan names; they are the same at any time."""
        del looks_again
        threads = self.plan.num_instances_per_host * (self.plan.threads_per_replica or 1)
        num_cores = len(_bound(self.plan)) if self._facts is None else threads
        return Wish(num_ipus=num_cores, choose=self._choose, queue_name=_QUEUE)

    def _choose(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        """The cores for the job beside those that are taken; of a physical core all hardware threads or none."""
        if self._facts is None:
            wanted = _named(_bound(self.plan))
            return () if any(core.name in taken for core in wanted) else wanted
        free = tuple(cpu for cpu, siblings in self._siblings.items() if not any(it in taken for it in siblings))
        if not free:
            return ()
        try:
            self.placed = place(self.plan, self._facts.with_cpus(free))
        except PlanError:
            return ()
        return _named(_bound(self.placed))


def _bound(plan: LaunchPlan) -> list[int]:
    return sorted({core for binding in plan.bindings for core in binding.cores})


def _named(numbers: Collection[int] | Iterator[int]) -> tuple[VirtualIpu, ...]:
    return tuple(VirtualIpu(index=number, name=_name(number)) for number in numbers)


def _name(number: int) -> str:
    return f"{CORE}/{number}"


def would_hold(plan: LaunchPlan, gpus: Sequence[Gpu], *, is_here: bool, tell: Callable[[str], None]) -> str:
    """A line on the virtual IPUs that a job takes; why it would not start now is part of it.

    Args:
        plan: The job. It takes virtual IPUs.
        gpus: The GPUs of this machine.
        is_here: Whether this machine is the only host.
        tell: Tells the user of what is decided here.
    """
    count = plan.num_slots_per_host
    noun = f"{count} virtual IPU{'' if count == 1 else 's'}"
    if not is_here:
        where = "each of " if len(plan.hosts) > 1 else ""
        return f"would lease {noun} on {where}{fold_hosts(plan.hosts)}, from the pool of each host"
    try:
        pool = pool_of(plan)
        state = pool.state()
        plan = in_only_partition(plan, state, tell)
        asker = IpuAsker(plan, gpus, lambda: gpus, is_fixed=False)
        chosen = _chosen(asker.wish(), state)
        if not chosen:
            words = refusal(asker.wish(), asker.cluster, state, own=0, shares=plan.vipu.shares_devices)
            return f"would not start now: {words}"
    except PoprunError as error:
        return f"would not start now: {error}"
    told = {ipu.name: str(ipu) for ipu in asker.cluster.ipus}
    ipus = fold_names([told.get(name, name) for name in chosen])
    partition = plan.vipu.partition
    if partition is None:
        return f"would lease {ipus}, from the pool {pool.file}"
    is_there = state.partition(partition) is not None
    return (
        f"would lease partition {partition}{'' if is_there else ', made for it'}: {ipus}, in the pool {pool.file}"
    )


def _chosen(wish: Wish, state: PoolState) -> Sequence[str]:
    """Names of the IPUs that a job would be given; none where it would have to wait."""
    wanted = wish.partition
    found = None if wanted is None else state.partition(wanted.name)
    if wanted is None or found is None:
        return [ipu.name for ipu in wish.choose(state.taken)]
    if found.lease is not None:
        return ()
    if must_change(wanted, found):
        return [ipu.name for ipu in wish.choose(state.taken - set(found.ipus))]
    return found.ipus
