"""What a job takes of the pool of this machine: virtual IPUs, GPUs, and cores that its instances alone have.

It takes them in that order, which is the same for all jobs: so two jobs never wait for each other.

A process of this machine holds its lease as an open file with a lock. The keeper of a job on another host
(`host_keeper`) takes it in the same way there.
"""

import os
import shlex
import socket
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

from poprun.devices.lease.claims import (
    Claim,
    HeldJob,
    Tell,
    held_ipus,
    in_only_partition,
    wished_ipus,
    with_gpus,
    with_ipus,
)
from poprun.devices.pool.clusters import choose_cluster, pod_of
from poprun.devices.pool.holders import is_here, is_served
from poprun.devices.pool.place import pool_folder
from poprun.devices.pool.pool import Pool, Ticket, wait_for_turn
from poprun.devices.pool.records import HeldLease, PoolState
from poprun.devices.pool.requests import Wish, refusal
from poprun.errors import PlanError, PoolError
from poprun.plan.inventory import CORE, Cluster, VirtualIpu, gpu_cluster
from poprun.plan.placement import flat_map
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import place
from poprun.plan.pods import allocation_of
from poprun.plan.topology import Gpu, MachineFacts
from poprun.probe.hardware import find_gpus
from poprun.process.process_tree import ancestors, user_name
from poprun.text import screen

_OCCUPANTS_SECONDS: Final = 5.0
"""How often to ask the driver whether a process outside the pool still holds memory."""

_CORE_QUEUE: Final = "core/"
"""Who waits for cores does not wait behind those who wait for virtual IPUs."""


@contextmanager
def leased_here(
    job: HeldJob, facts: MachineFacts | None, *, is_fixed: bool, tell: Tell = screen.log
) -> Iterator[HeldJob]:
    """Hold what a job needs of this machine for the length of a block; the job with it.

    A job that a program of another job starts runs on that one's GPUs, and needs no lease of its own on them.

    Args:
        job: The job, with what it holds elsewhere.
        facts: What the plan was made from; None for a plan that was read.
        is_fixed: Whether the job needs just those devices that its plan names.
        tell: Tells the user of what is decided here.
    """
    with ExitStack() as stack:
        if job.plan.takes_lease and not job.has_gpus:
            plan, state = in_own_partition(job.plan, tell)
            job = replace(job, plan=plan)
            for claim in ipu_claims(plan, facts, is_fixed=is_fixed):
                job = stack.enter_context(_inherited_or_leased(job, claim, state, tell))
        if job.leases and facts is not None:
            facts = facts.with_cores(job.plan.cores)
            job = job.given(place(job.plan, facts))
        if job.plan.owns_cores:
            job = stack.enter_context(_leased(job, CoreClaim(job.plan, facts), tell))
        yield job


def in_own_partition(plan: LaunchPlan, tell: Tell) -> tuple[LaunchPlan, PoolState]:
    """``plan`` in the only partition there is, if that is its user's and fits; and what stands in the pool."""
    state, user = _pool_of(plan).state(), user_name(os.getuid())
    if plan.asks_server:
        return plan, state
    count = plan.num_gpus_per_host if plan.devices else plan.num_ipus_per_host
    return in_only_partition(plan, state, count, lambda owner: owner == user, tell), state


def ipu_claims(plan: LaunchPlan, facts: MachineFacts | None, *, is_fixed: bool) -> "Sequence[IpuClaim | GpuClaim]":
    """The claims of a job on virtual IPUs and on GPUs of this machine; see :func:`leased_here`."""
    claims: list[IpuClaim | GpuClaim] = [IpuClaim(plan)] if plan.leases_ipus else []
    if plan.devices:
        gpus = find_gpus(os.environ) if facts is None else facts.gpus
        claims.append(GpuClaim(plan, gpus, is_fixed=is_fixed))
    return claims


@contextmanager
def _inherited_or_leased(
    job: HeldJob, claim: "IpuClaim | GpuClaim", state: PoolState, tell: Tell
) -> Iterator[HeldJob]:
    inherited = _inherited(claim.cluster, state) if job.plan.devices else []
    if len(inherited) >= claim.num_ipus:
        names = inherited[: claim.num_ipus]
        yield job.given(claim.plan_on(job.plan, names), claim.lease(names))
        return
    with _leased(job, claim, tell) as held:
        yield held


@contextmanager
def _leased(job: HeldJob, claim: "LocalClaim", tell: Tell) -> Iterator[HeldJob]:
    try:
        names = claim.wait_until_granted(claim.plan.vipu, tell)
        yield job.given(claim.plan_on(job.plan, names), claim.lease(names))
    finally:
        claim.give_back(tell)


class LocalClaim(Claim):
    """A claim on the pool of this machine.

    Args:
        plan: The job.
        cluster: What there is to choose from.
    """

    _wish: Wish

    def __init__(self, plan: LaunchPlan, cluster: Cluster) -> None:
        self.plan = plan
        self.cluster = cluster
        self.pool = _pool_of(plan)
        self._ticket: Ticket | None = None

    @abstractmethod
    def wish(self) -> Wish:
        """What the job wants of the cluster."""

    @abstractmethod
    def plan_on(self, plan: LaunchPlan, names: Sequence[str]) -> LaunchPlan:
        """``plan``, which has what was granted before, on what was granted now."""

    def _ask(self) -> tuple[str, ...]:
        self._wish = self.wish()
        if self._ticket is None:
            self._ticket = self.pool.ask(shlex.join(self.plan.program), self._wish)
        else:
            self._ticket = self.pool.try_again(self._ticket, self._wish)
        return self._ticket.ipus

    def _wait(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is None:
            is_occupied = any(ipu.occupants for ipu in self.cluster.ipus) and not self.plan.vipu.shares_devices
            timeout_seconds = _OCCUPANTS_SECONDS if is_occupied else float("inf")
        if self._ticket is not None:
            wait_for_turn(self.pool, self._ticket, self._wish, timeout_seconds)

    def _refusal(self, *, advises: bool) -> str:
        state = self.pool.state()
        shares, own = self.plan.vipu.shares_devices, 0 if self._ticket is None else self._ticket.id
        words = refusal(self._wish, self.cluster, state, own=own, shares=shares, advises=advises)
        if all(lease.holder.key is None for lease in state.leases) or is_served(self.pool.path):
            return words
        return (
            f"{words}\n  no server hands out this pool now, and without one the leases of other hosts (user@host) "
            "last: vipu serve ends those of jobs that have ended"
        )

    def lease(self, names: Sequence[str]) -> HeldLease:
        """The lease on what was granted."""
        held = held_ipus(self.plan, self.cluster, names, self.pool.path)
        return held if self._ticket is None else replace(held, descriptor=self._ticket.descriptor)

    def give_back(self, tell: Tell) -> None:
        """Give everything back; where that cannot be written any more, the end of this process ends the lease."""
        if self._ticket is not None:
            try:
                self.pool.release(self._ticket)
            except PoolError as error:
                tell(f"warning: {error}")


class IpuClaim(LocalClaim):
    """A claim on virtual IPUs of this machine that are counted or named: of a pod, or shares of the cores."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(plan, _ipus_here(plan))
        self.num_ipus = plan.num_ipus_per_host
        allocation = None if plan.vipu.pod is None else allocation_of(self.cluster, plan.vipu)
        num_domains = max(1, plan.num_ilds // len(plan.hosts))
        wish = replace(wished_ipus(plan, self.num_ipus, allocation), num_domains=num_domains)
        wish.check(self.cluster, " of them here")
        self._wished = wish.of(self.cluster)

    def wish(self) -> Wish:
        """As many virtual IPUs as the replicas have."""
        return self._wished

    def plan_on(self, plan: LaunchPlan, names: Sequence[str]) -> LaunchPlan:
        """``plan`` on the cores that the virtual IPUs stand for, if they stand for such."""
        return with_ipus(plan, self.cluster, names, num_hosts=1)


class GpuClaim(LocalClaim):
    """A claim on GPUs of this machine.

    Args:
        plan: The job.
        gpus: The GPUs of this machine.
        is_fixed: Whether the job needs just those devices that its plan names.
    """

    def __init__(self, plan: LaunchPlan, gpus: Sequence[Gpu], *, is_fixed: bool) -> None:
        is_beside = plan.leases_ipus or plan.asks_server  # then the partition is one of those virtual IPUs
        named = replace(plan.vipu, partition=None if is_beside else plan.vipu.partition, num_ilds=None)
        plan = replace(plan, vipu=named)
        super().__init__(plan, _gpus_here(plan, gpus))
        self.num_ipus = plan.num_gpus_per_host
        self._is_fixed = is_fixed
        self._plain_wish = wished_ipus(plan, self.num_ipus)
        self._plain_wish.check(self.cluster, " of them here")

    def _ask(self) -> tuple[str, ...]:
        if self._ticket is not None:
            self.cluster = _gpus_here(self.plan, find_gpus(os.environ))
        return super()._ask()

    def wish(self) -> Wish:
        """As many GPUs as the instances use, or just those that the plan names."""
        wish = self._plain_wish.of(self.cluster)
        return replace(wish, choose=self._choose_fixed) if self._is_fixed else wish

    def plan_on(self, plan: LaunchPlan, names: Sequence[str]) -> LaunchPlan:
        """``plan`` on the GPUs."""
        return with_gpus(plan, self.cluster, names)

    def _choose_fixed(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        by_device = {ipu.device: ipu for ipu in self.cluster.ipus}
        wanted = tuple(by_device[device] for device in self.plan.devices if device in by_device)
        shares = self.plan.vipu.shares_devices
        return () if any(ipu.name in taken or (ipu.occupants and not shares) for ipu in wanted) else wanted


class CoreClaim(LocalClaim):
    """A claim on cores that the instances have to themselves on this machine.

    Args:
        plan: The job.
        facts: What the job may use of the machine; None when it needs just those cores that its plan names.
    """

    def __init__(self, plan: LaunchPlan, facts: MachineFacts | None) -> None:
        self.placed = plan
        """The plan on the cores that were chosen last."""
        self._facts = facts
        cpus = () if facts is None else facts.cpus or flat_map(facts.cores)
        self._siblings = {cpu: [_core_name(each.number) for each in cpus if each.core == cpu.core] for cpu in cpus}
        there = (cpu.number for cpu in cpus) if cpus else _bound(plan)
        super().__init__(plan, Cluster(name=socket.gethostname(), kind=CORE, ipus=_cores(there)))

    def wish(self) -> Wish:
        """As many cores as there are threads, or just those that the plan names; they are the same at any time."""
        threads = self.plan.num_instances_per_host * (self.plan.threads_per_replica or 1)
        num_cores = len(_bound(self.plan)) if self._facts is None else threads
        return Wish(num_ipus=num_cores, choose=self._choose, queue_name=_CORE_QUEUE)

    def plan_on(self, plan: LaunchPlan, names: Sequence[str]) -> LaunchPlan:
        """``plan`` on the cores that were chosen."""
        del names
        return replace(plan, bindings=self.placed.bindings)

    def lease(self, names: Sequence[str]) -> HeldLease:
        """The lease on the cores, which belong to no partition."""
        return replace(super().lease(names), partition=None)

    def _choose(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        """The cores for the job beside those that are taken; of a physical core all hardware threads or none."""
        if self._facts is None:
            wanted = _cores(_bound(self.plan))
            return () if any(core.name in taken for core in wanted) else wanted
        free = tuple(cpu for cpu, names in self._siblings.items() if not any(name in taken for name in names))
        if not free:
            return ()
        try:
            self.placed = place(self.plan, self._facts.with_cpus(free))
        except PlanError:
            return ()
        return _cores(_bound(self.placed))


def _pool_of(plan: LaunchPlan) -> Pool:
    return Pool(pool_folder(plan.vipu.pool), plan.vipu.server_timeout_seconds)


def _inherited(cluster: Cluster, state: PoolState) -> list[str]:
    """The IPUs that a job of this user, or of root, holds among whose processes this one is, in slot order."""
    above, users = set(ancestors(os.getpid())), (user_name(os.getuid()), user_name(0))
    holders = (lease for lease in state.leases if lease.holder.pid in above and lease.holder.user in users)
    leases = (lease for lease in holders if is_here(lease.holder))
    held = {name for lease in leases for name in lease.ipus}
    return [ipu.name for ipu in cluster.ipus if ipu.name in held]


def _ipus_here(plan: LaunchPlan) -> Cluster:
    """The virtual IPUs that a job may be given; a CPU that nobody has counted has one for each core, or more."""
    vipu = plan.vipu
    num_ipus = vipu.ipus_per_host
    if num_ipus is None and vipu.partition is None:
        num_ipus = max(len(plan.cores), plan.num_ipus_per_host)
    pod = None if vipu.pod is None else pod_of(vipu.pod)
    return choose_cluster(socket.gethostname(), (), len(plan.cores), ipus_per_host=num_ipus, pod=pod)


def _gpus_here(plan: LaunchPlan, gpus: Sequence[Gpu]) -> Cluster:
    """The GPUs that a job may be given."""
    return gpu_cluster(socket.gethostname(), gpus[: plan.vipu.ipus_per_host])


def _bound(plan: LaunchPlan) -> list[int]:
    return sorted({core for binding in plan.bindings for core in binding.cores})


def _cores(numbers: Collection[int] | Iterator[int]) -> tuple[VirtualIpu, ...]:
    return tuple(VirtualIpu(index=number, name=_core_name(number)) for number in numbers)


def _core_name(number: int) -> str:
    return f"{CORE}/{number}"
