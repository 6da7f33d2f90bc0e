"""The leases of a job on this machine: on virtual IPUs, on GPUs, and on cores for its instances alone.

All jobs acquire these leases in this order, so that two jobs never wait for each other.
"""

import os
import shlex
import socket
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

from poprun.devices.lease.claims import Claim, Granted, LeasedPlan, Log, choose_partition, request_ipus
from poprun.devices.pool.clusters import choose_cluster, pod_of
from poprun.devices.pool.holders import is_here, this_process
from poprun.devices.pool.place import pool_folder
from poprun.devices.pool.pool import Pool, Ticket, wait_for_turn
from poprun.devices.pool.records import HeldLease, PoolState
from poprun.devices.pool.requests import PoolRequest, refusal
from poprun.devices.server.sole_server import is_served
from poprun.errors import PlanError, PoolError
from poprun.hosts.probe.gpus import find_devices, find_gpus
from poprun.launch.process.process_tree import ancestors, user_name
from poprun.plan.inventory import CORE, CPU, Cluster, VirtualIpu, gpu_cluster
from poprun.plan.placement import flat_map
from poprun.plan.plan import LaunchPlan, LeasedDevices
from poprun.plan.planner import place
from poprun.plan.pods import allocation_of
from poprun.plan.topology import Binding, Gpu, MachineFacts
from poprun.text import screen

_OCCUPANTS_SECONDS: Final = 5.0
"""The time between two checks whether a process without a lease still uses a GPU's memory."""

_CORE_QUEUE: Final = "core/"
"""The queue for cores. Jobs that want cores do not wait behind jobs that want virtual IPUs."""


@contextmanager
def leased_here(
    job: LeasedPlan, facts: MachineFacts | None, *, is_fixed: bool, log: Log = screen.log
) -> Iterator[LeasedPlan]:
    """A context in which ``job`` has its leases on devices of this machine; the leases end with the context.

    If ``is_fixed``, lease exactly the GPUs that the plan names.
    """
    # A job started by a program of another job runs on the other job's GPUs, and needs no lease of its own.
    plan = job.plan
    with ExitStack() as stack:
        if plan.takes_lease and not job.has_gpus:
            partition, state = own_partition(plan, log)
            for claim in ipu_claims(plan, partition, facts, is_fixed=is_fixed):
                inherited = _inherited(claim.cluster, state)[: claim.num_ipus] if plan.devices else []
                is_enough = len(inherited) == claim.num_ipus
                job = stack.enter_context(_leased(job, claim, log, inherited if is_enough else ()))
        if job.leases and facts is not None:
            facts = facts.with_cores(job.given.cores)
            job = replace(job, given=replace(job.given, bindings=place(plan, facts, job.given)))
        if plan.owns_cores:
            job = stack.enter_context(_leased(job, CoreClaim(plan, facts, job.given), log))
        yield job


def own_partition(plan: LaunchPlan, log: Log) -> tuple[str | None, PoolState]:
    """Return the partition (set of IPUs) that the job uses, or None, and this machine's leases and partitions."""
    state, user = _pool_of(plan).state(), user_name(os.getuid())
    if plan.asks_server:
        return plan.vipu.partition, state
    count = plan.num_gpus_per_host if plan.devices else plan.num_ipus_per_host
    return choose_partition(plan, state, count, user.__eq__, log), state


def ipu_claims(
    plan: LaunchPlan, partition: str | None, facts: MachineFacts | None, *, is_fixed: bool
) -> "Sequence[IpuClaim | GpuClaim]":
    """Return the job's requests for this machine's virtual IPUs and GPUs; ``partition`` limits the choice."""
    claims: list[IpuClaim | GpuClaim] = [IpuClaim(plan, partition)] if plan.leases_ipus else []
    if plan.devices:
        here = find_devices(os.environ) if facts is None else facts
        if here.gpus and here.maker != plan.maker:
            raise PlanError(
                f"the devices here are {here.maker}'s, and the job is planned for {plan.maker}'s: name hosts "
                "with devices of one maker"
            )
        is_beside = plan.leases_ipus or plan.asks_server
        claims.append(GpuClaim(plan, None if is_beside else partition, here.gpus, is_fixed=is_fixed))
    return claims


@contextmanager
def _leased(job: LeasedPlan, claim: "LocalClaim", log: Log, inherited: Sequence[str] = ()) -> Iterator[LeasedPlan]:
    """A context in which ``job`` has the devices ``inherited`` from an outer job, or the lease for ``claim``."""
    try:
        names = inherited or claim.wait_until_granted(job.plan.vipu, log)
        yield job.with_leases(claim.devices_with(job.given, names), claim.lease(names))
    finally:
        claim.give_back(log)


class LocalClaim(Claim):
    """A job's request for devices of this machine, which waits in a queue until it becomes a lease."""

    _requested: PoolRequest

    def __init__(self, plan: LaunchPlan, partition: str | None, cluster: Cluster) -> None:
        super().__init__(partition)
        self.plan = plan
        self.cluster = cluster
        self._pool = _pool_of(plan)
        self._ticket: Ticket | None = None

    @abstractmethod
    def request(self) -> PoolRequest:
        """Return the request that this claim sends to the pool: how many devices or cores, and which."""

    @abstractmethod
    def devices_with(self, given: LeasedDevices, names: Sequence[str]) -> LeasedDevices:
        """Return ``given``, the job's devices and cores so far, with the devices ``names`` added."""

    def _ask_pool(self) -> tuple[str, ...]:
        self._requested = self.request()
        if self._ticket is None:
            self._ticket = self._pool.enqueue(this_process(shlex.join(self.plan.program)), self._requested)
        else:
            self._ticket = self._pool.retry(self._ticket, self._requested)
        return self._ticket.ipus

    def _wait(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is None:
            is_occupied = any(ipu.occupants for ipu in self.cluster.ipus) and not self.plan.vipu.shares_devices
            timeout_seconds = _OCCUPANTS_SECONDS if is_occupied else float("inf")
        if self._ticket is not None:
            wait_for_turn(self._pool, self._ticket, self._requested, timeout_seconds)

    def _refusal(self, *, advises: bool) -> str:
        state = self._pool.state()
        shares, own = self.plan.vipu.shares_devices, 0 if self._ticket is None else self._ticket.id
        words = refusal(self._requested, self.cluster, state, own=own, shares=shares, advises=advises)
        if all(lease.holder.client_key is None for lease in state.leases) or is_served(self._pool.path):
            return words
        return (
            f"{words}\n  no server hands out this pool now, and without one the leases of other hosts (user@host) "
            "last: vipu serve ends those of jobs that have ended"
        )

    def lease(self, names: Sequence[str]) -> HeldLease:
        """Return the lease on the virtual IPUs, GPUs or cores with the names ``names``."""
        held = self.granted(names).lease(self._pool.path)
        return held if self._ticket is None else replace(held, descriptor=self._ticket.descriptor)

    def granted(self, names: Sequence[str]) -> Granted:
        """Return a description of the granted virtual IPUs, GPUs or cores, which have the names ``names``."""
        return Granted(plan=self.plan, cluster=self.cluster, names=names, partition=self.partition)

    def give_back(self, log: Log) -> None:
        """Release the lease. If the pool cannot be written, log a warning: the lease ends with poprun."""
        if self._ticket is not None:
            try:
                self._pool.release(self._ticket)
            except PoolError as error:
                log(f"warning: {error}")


class IpuClaim(LocalClaim):
    """A job's request for virtual IPUs of this machine, which are IPUs of a pod or parts of the CPU."""

    def __init__(self, plan: LaunchPlan, partition: str | None) -> None:
        super().__init__(plan, partition, _ipus_here(plan, partition))
        self.num_ipus = plan.num_ipus_per_host
        request = request_ipus(
            plan,
            self.num_ipus,
            partition,
            num_domains=max(1, plan.num_ilds // len(plan.hosts)),
            allocation=None if plan.vipu.pod is None else allocation_of(self.cluster, plan.vipu),
        )
        request.check(self.cluster, " of them here")
        self._wanted = request.of(self.cluster)

    def request(self) -> PoolRequest:
        """Return the request for as many virtual IPUs as the job's replicas on this host use."""
        return self._wanted

    def devices_with(self, given: LeasedDevices, names: Sequence[str]) -> LeasedDevices:
        """Return ``given``, the job's devices, with the cores that the virtual IPUs stand for, if any."""
        granted = self.granted(names)
        granted.check_domains(num_hosts=1)
        if self.plan.vipu.ipus_per_host is None or self.plan.devices or self.cluster.kind != CPU:
            return given
        return replace(given, cores=granted.cores)


class GpuClaim(LocalClaim):
    """A job's request for GPUs of this machine; if ``is_fixed``, for exactly the GPUs that the plan names."""

    def __init__(self, plan: LaunchPlan, partition: str | None, gpus: Sequence[Gpu], *, is_fixed: bool) -> None:
        super().__init__(plan, partition, _gpus_here(plan, gpus))
        self.num_ipus = plan.num_gpus_per_host
        self._is_fixed = is_fixed
        self._wanted = request_ipus(plan, self.num_ipus, partition)
        self._wanted.check(self.cluster, " of them here")

    def _ask_pool(self) -> tuple[str, ...]:
        if self._ticket is not None:
            self.cluster = _gpus_here(self.plan, find_gpus(os.environ))
        return super()._ask_pool()

    def request(self) -> PoolRequest:
        """Return the request for as many GPUs as the job uses on this host, or for exactly the plan's GPUs."""
        request = self._wanted.of(self.cluster)
        return replace(request, choose=self._choose_fixed) if self._is_fixed else request

    def devices_with(self, given: LeasedDevices, names: Sequence[str]) -> LeasedDevices:
        """Return ``given``, the job's devices, with the granted GPUs added under the names that programs use."""
        return replace(given, devices=self.granted(names).devices)

    def _choose_fixed(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        by_device = {ipu.device: ipu for ipu in self.cluster.ipus}
        planned = tuple(by_device[device] for device in self.plan.devices if device in by_device)
        shares = self.plan.vipu.shares_devices
        return () if any(ipu.name in taken or (ipu.occupants and not shares) for ipu in planned) else planned


class CoreClaim(LocalClaim):
    """A job's request for cores of its own: free cores of ``facts``, or if None, exactly the plan's cores."""

    def __init__(self, plan: LaunchPlan, facts: MachineFacts | None, given: LeasedDevices) -> None:
        self._facts = facts
        self._given = given
        cpus = () if facts is None else facts.cpus or flat_map(facts.cores)
        self._siblings = {cpu: [_core_name(each.number) for each in cpus if each.core == cpu.core] for cpu in cpus}
        numbers = (cpu.number for cpu in cpus) if cpus else _bound(given.bindings)
        super().__init__(plan, None, Cluster(name=socket.gethostname(), kind=CORE, ipus=_cores(numbers)))

    def request(self) -> PoolRequest:
        """Return the request for one core for each thread of the job, or for exactly the plan's cores."""
        if self._facts is None:
            num_cores = len(_bound(self._given.bindings))
        else:
            threads = self.plan.threads_per_replica or self._facts.num_user_threads or 1
            num_cores = self.plan.num_instances_per_host * threads
        return PoolRequest(num_ipus=num_cores, choose=self._choose, queue_name=_CORE_QUEUE)

    def devices_with(self, given: LeasedDevices, names: Sequence[str]) -> LeasedDevices:
        """Return ``given``, the job's devices, with each instance bound to its leased cores."""
        del names
        return replace(given, bindings=self._given.bindings)

    def _choose(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        """Return free cores for the job, without hardware threads in ``taken``; () if too few are free."""
        if self._facts is None:
            planned_cores = _cores(_bound(self._given.bindings))
            return () if any(core.name in taken for core in planned_cores) else planned_cores
        free = tuple(cpu for cpu, names in self._siblings.items() if not any(name in taken for name in names))
        if not free:
            return ()
        try:
            bindings = place(self.plan, replace(self._facts, cpus=free), self._given)
        except PlanError:
            return ()
        self._given = replace(self._given, bindings=bindings)
        return _cores(_bound(bindings))


def _pool_of(plan: LaunchPlan) -> Pool:
    return Pool(pool_folder(plan.vipu.pool), plan.vipu.server_timeout_seconds)


def _inherited(cluster: Cluster, state: PoolState) -> list[str]:
    """Return the leased IPUs of the outer job that started this process, if that job is this user's or root's."""
    above, users = set(ancestors(os.getpid())), (user_name(os.getuid()), user_name(0))
    holders = (lease for lease in state.leases if lease.holder.pid in above and lease.holder.user in users)
    leases = (lease for lease in holders if is_here(lease.holder))
    held = {name for lease in leases for name in lease.ipus}
    return [ipu.name for ipu in cluster.ipus if ipu.name in held]


def _ipus_here(plan: LaunchPlan, partition: str | None) -> Cluster:
    """Return this machine's virtual IPUs; if no option sets their number, one per core, or more if needed."""
    vipu = plan.vipu
    num_ipus = vipu.ipus_per_host
    if num_ipus is None and partition is None:
        num_ipus = max(len(plan.cores), plan.num_ipus_per_host)
    pod = None if vipu.pod is None else pod_of(vipu.pod)
    return choose_cluster(socket.gethostname(), (), len(plan.cores), ipus_per_host=num_ipus, pod=pod)


def _gpus_here(plan: LaunchPlan, gpus: Sequence[Gpu]) -> Cluster:
    """Return ``gpus`` of this machine as a cluster of virtual IPUs; the option ``ipus_per_host`` limits it."""
    return gpu_cluster(socket.gethostname(), gpus[: plan.vipu.ipus_per_host])


def _bound(bindings: Iterable[Binding]) -> list[int]:
    return sorted({core for binding in bindings for core in binding.cores})


def _cores(numbers: Iterable[int]) -> tuple[VirtualIpu, ...]:
    return tuple(VirtualIpu(index=number, name=_core_name(number)) for number in numbers)


def _core_name(number: int) -> str:
    return f"{CORE}/{number}"
