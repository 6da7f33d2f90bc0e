"""The virtual IPUs of a job that a server hands out: asked for before it starts, renewed while it runs."""

import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from poprun.errors import IpusTakenError, PoprunError, ServerLostError
from poprun.hosts.routes import JobNetwork
from poprun.lease.remote_places import as_here, check_place, facts_under, hosts_in, on_ipus
from poprun.lease.renewal_process import kept
from poprun.lease.server_client import RemotePool, read_token, token_file
from poprun.lease.server_connection import ServerAddress
from poprun.lease.server_messages import LeaseAnswer, LeaseRequest
from poprun.plan.inventory import POD, Cluster, size_of_partition
from poprun.plan.plan import LaunchPlan
from poprun.plan.settings import VipuSettings
from poprun.plan.topology import Gpu, MachineFacts
from poprun.pool.clusters import allocation_of
from poprun.pool.holders import boot_id
from poprun.pool.records import HeldLease, PoolState
from poprun.pool.requests import PlainPartition, PlainWish, refusal
from poprun.probe.machine import names_of_this_machine
from poprun.process.tree import ancestors, key_of
from poprun.process.users import user_name
from poprun.text import screen
from poprun.text.host_names import fold_hosts

_ATTEMPT_SECONDS: Final = 1.0
_LOSS_SECONDS: Final = 15.0
"""How long after poprun's end the agents of other hosts may still be about to find out."""


def pool_of_server(vipu: VipuSettings) -> RemotePool:
    """The pool of the server that the job names.

    Raises:
        ServerError: If there is no token for it.
    """
    address = ServerAddress(
        host=vipu.server_host or "",
        port=vipu.server_port,
        token=read_token(token_file(os.environ)),
        timeout_seconds=vipu.server_timeout_seconds,
    )
    return RemotePool(address, f"{user_name(os.getuid())}@{socket.gethostname()}")


def under_server(vipu: VipuSettings, facts: MachineFacts) -> tuple[MachineFacts, Cluster | None]:
    """``facts`` with what the server of the job hands out, and the pod if that is one.

    Raises:
        PlanError: If it hands out GPUs, and none of them is here.
        ServerError: If the server cannot be used.
    """
    if vipu.is_offline:
        return facts, None
    served = pool_of_server(vipu).served()
    return facts_under(facts, served), served.cluster if served.cluster.kind == POD else None


@contextmanager
def leased_from_server(
    plan: LaunchPlan, gpus: Sequence[Gpu], network: JobNetwork | None
) -> Iterator[tuple[LaunchPlan, HeldLease, JobNetwork | None]]:
    """Hold the virtual IPUs of a job; its plan with them, the lease, and the network with each host's devices.

    Args:
        plan: The job.
        gpus: The GPUs of this machine.
        network: How the hosts of the job reach each other; None when there is only this machine.

    Raises:
        IpusTakenError: If others hold them, and the job does not wait.
        PartitionError: If the partition does not fit the job.
        PlanError: If there can never be as many, or they are those of another machine.
        ServerError: If the server cannot be used.
    """
    pool = pool_of_server(plan.vipu)
    served = pool.served()
    check_place(plan, served, boot_id())
    plan = _in_only_partition(plan, served.state)
    aliases = names_of_this_machine(served.cluster.hosts)
    cluster = as_here(served.cluster, gpus, aliases)
    hosts = hosts_in(plan.hosts, cluster, aliases)
    above = _held_above(served.state)
    if plan.num_instances * plan.ipus_per_replica <= len(above):
        held, given = on_ipus(plan, cluster, hosts, above, network)
        yield held, _held(plan, cluster, pool, above), given
        return
    request = _request(plan, cluster, hosts)
    try:
        answer = _wait_for(plan, pool, request)
    except BaseException:
        with suppress(PoprunError):
            pool.end_lease(request.key)
        raise
    linger = 0.0 if network is None else plan.ending.stop_timeout_seconds + _LOSS_SECONDS
    with kept(pool.server, request.key, served.lease_seconds, linger) as descriptor:
        held, given = on_ipus(plan, cluster, hosts, answer.ipus, network)
        yield held, replace(_held(plan, cluster, pool, answer.ipus), descriptor=descriptor), given


def _held(plan: LaunchPlan, cluster: Cluster, pool: RemotePool, names: Sequence[str]) -> HeldLease:
    told = {ipu.name: str(ipu) for ipu in cluster.ipus}
    return HeldLease(
        host=fold_hosts(plan.hosts),
        names=tuple(told.get(name, name) for name in names) if len(plan.hosts) == 1 else tuple(names),
        pool=str(pool.server),
        partition=plan.vipu.partition,
    )


def _in_only_partition(plan: LaunchPlan, state: PoolState) -> LaunchPlan:
    """``plan`` in the only partition that there is, if it names none, that one is its user's own, and it fits."""
    if plan.vipu.partition is not None or len(state.partitions) != 1:
        return plan
    (only,) = state.partitions
    is_own = only.user.partition("@")[0] == user_name(os.getuid()) and only.lease is None
    if not is_own or only.size != size_of_partition(plan.num_instances * plan.ipus_per_replica):
        return plan
    screen.tell(f"partition {only.name} is the only one there is: used")
    return replace(plan, vipu=replace(plan.vipu, partition=only.name))


def _held_above(state: PoolState) -> tuple[str, ...]:
    """What a job holds among whose processes this one is: nobody waits for itself."""
    above = {key_of(pid) for pid in ancestors(os.getpid())}
    here = f"@{socket.gethostname()}"
    return next(
        (
            lease.ipus
            for lease in state.leases
            if (lease.holder.pid, lease.holder.start_ticks) in above and lease.holder.user.endswith(here)
        ),
        (),
    )


def _request(plan: LaunchPlan, cluster: Cluster, hosts: tuple[str, ...]) -> LeaseRequest:
    vipu = plan.vipu
    num_ipus = plan.num_instances * plan.ipus_per_replica
    least = size_of_partition(num_ipus)
    return LeaseRequest(
        key=secrets.token_hex(16),
        pid=os.getpid(),
        start_ticks=key.start_ticks if (key := key_of(os.getpid())) else 1,
        user=user_name(os.getuid()),
        host=socket.gethostname(),
        words=shlex.join(plan.program)[:200],
        wish=PlainWish(
            num_ipus=num_ipus,
            hosts=hosts,
            allocation=allocation_of(cluster, vipu),
            shares_devices=vipu.shares_devices,
            partition=None
            if vipu.partition is None
            else PlainPartition(
                name=vipu.partition,
                least=least,
                most=max(least, size_of_partition(plan.num_replicas * plan.ipus_per_replica)),
                is_temporary=vipu.removes_partition,
                may_change=vipu.updates_partition,
                resets=vipu.resets_partition,
            ),
        ),
    )


def _wait_for(plan: LaunchPlan, pool: RemotePool, request: LeaseRequest) -> LeaseAnswer:
    """Ask until the job's turn has come, as often as it wants to."""
    vipu = plan.vipu
    attempts_left = vipu.partition_attempts - 1 if vipu.partition else 0
    answer = pool.take_lease(request)
    is_told = False
    while not answer.ipus:
        gives_up = not vipu.waits_for_devices and not attempts_left
        if gives_up or not is_told:
            words = _refusal(pool, request, answer, advises=gives_up)
            if gives_up:
                raise IpusTakenError(words)
            screen.tell(f"waiting: {words}")
        is_told = True
        attempts_left -= not vipu.waits_for_devices
        time.sleep(answer.pause_seconds if vipu.waits_for_devices else _ATTEMPT_SECONDS)
        answer = _ask_again(pool, request, vipu.server_timeout_seconds)
    return answer


def _ask_again(pool: RemotePool, request: LeaseRequest, timeout_seconds: float) -> LeaseAnswer:
    """Ask, also while the server is being started again."""
    deadline = time.monotonic() + timeout_seconds
    is_told = False
    while True:
        try:
            return pool.take_lease(request)
        except ServerLostError as error:
            if time.monotonic() + _ATTEMPT_SECONDS > deadline:
                raise
            if not is_told:
                screen.tell(f"warning: {error}; waiting for it, {timeout_seconds:g} s at most")
            is_told = True
            time.sleep(_ATTEMPT_SECONDS)


def _refusal(pool: RemotePool, request: LeaseRequest, answer: LeaseAnswer, *, advises: bool) -> str:
    served = pool.served()
    return refusal(
        request.wish.of(served.cluster),
        served.cluster,
        served.state,
        own=answer.id,
        shares=request.wish.shares_devices,
        advises=advises,
        place=f"in {served.cluster.name} at {pool.server}",
    )
