"""The virtual IPUs of a job that a server hands out: asked for before it starts, renewed while it runs.

A server hands out the GPUs or the cores of its own machine, or a pod. A pod stands for whatever computes on any
host, unless it names hosts: then each of them has its share of the IPUs, and the first of those are its GPUs, as
nvidia-smi numbers them.
"""

import json
import os
import secrets
import select
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from poprun.errors import IpusTakenError, LaunchError, PartitionError, PlanError, PoprunError, ServerLostError
from poprun.hosts.routes import JobNetwork
from poprun.lease.local_lease import with_ipus
from poprun.lease.server_client import RemotePool, read_token, token_file
from poprun.lease.server_connection import ServerAddress
from poprun.plan.inventory import CPU, POD, Cluster, size_of_partition
from poprun.plan.plan import LaunchPlan
from poprun.plan.pods import share_of
from poprun.plan.settings import VipuSettings
from poprun.plan.topology import Gpu, MachineFacts
from poprun.pool.clusters import allocation_of
from poprun.pool.holders import boot_id
from poprun.pool.records import HeldLease, PoolState
from poprun.pool.requests import PlainPartition, PlainWish, refusal
from poprun.pool.server_messages import LeaseAnswer, LeaseRequest, ServedPool
from poprun.probe.machine import names_of_this_machine
from poprun.process.tree import ancestors, key_of
from poprun.process.users import user_name
from poprun.text import screen
from poprun.text.host_names import fold_hosts


def facts_under(facts: MachineFacts, served: ServedPool) -> MachineFacts:
    """``facts`` with the GPUs that the server hands out, those that others hold marked; none where it has none.

    Raises:
        PlanError: If it hands out GPUs of its own machine, and none of them is here.
    """
    cluster, taken = as_here(served.cluster, facts.gpus, facts.host_aliases), served.state.taken
    is_taken = {ipu.device: ipu.name in taken for ipu in cluster.ipus}
    gpus = tuple(
        replace(gpu, is_leased=is_taken[gpu.name]) for gpu in facts.gpus if is_taken.get(gpu.name) is not None
    )
    if not gpus and cluster.kind not in (POD, CPU):
        raise _elsewhere(cluster, "GPUs")
    return replace(facts, gpus=gpus)


def as_here(cluster: Cluster, gpus: Sequence[Gpu], aliases: Collection[str]) -> Cluster:
    """``cluster`` with the devices of this machine, as this process calls and orders them, and no others.

    Args:
        cluster: What the server hands out.
        gpus: The GPUs of this machine that the job may use.
        aliases: What this machine is called.
    """
    if cluster.kind == POD:
        names = {int(gpu.name): gpu.name for gpu in gpus if gpu.name.isdecimal()}
        share = next((share_of(cluster, host) for host in cluster.hosts if host in aliases), ())
        devices = {ipu.name: names[slot] for slot, ipu in enumerate(share) if slot in names}
    else:
        devices = {gpu.uuid or gpu.name: gpu.name for gpu in gpus}
    slots = {gpu.name: slot for slot, gpu in enumerate(gpus)}
    ipus = [replace(ipu, device=devices.get(ipu.name, "")) for ipu in cluster.ipus]
    if cluster.kind != POD:
        ipus.sort(key=lambda ipu: slots.get(ipu.device, len(slots)))
    return replace(cluster, ipus=tuple(ipus))


def check_place(plan: LaunchPlan, served: ServedPool, boot_id: str) -> None:
    """See that what the server hands out can be used where the job runs: a machine's own only there.

    Args:
        plan: The job.
        served: What the server tells.
        boot_id: The run of the kernel here, which is the server's on its own machine.

    Raises:
        PlanError: If it cannot.
    """
    if served.cluster.kind != POD and (len(plan.hosts) > 1 or served.boot_id != boot_id):
        raise _elsewhere(served.cluster, "cores" if served.cluster.kind == CPU else "GPUs")


def hosts_in(hosts: Sequence[str], cluster: Cluster, aliases: Collection[str]) -> tuple[str, ...]:
    """The hosts of a job as the cluster calls them, where it names hosts: this machine may have several names.

    Raises:
        PlanError: If one is none of its hosts.
    """
    here = [host for host in cluster.hosts if host in aliases]
    found = tuple(here[0] if host in aliases and here else host for host in hosts)
    strangers = [host for host in found if host not in cluster.hosts]
    if cluster.hosts and strangers:
        raise PlanError(
            f"the job runs on {', '.join(strangers)}, and the hosts of {cluster.name} are "
            f"{fold_hosts(cluster.hosts)}: choose among them with --host"
        )
    return found if cluster.hosts else ()


def on_ipus(
    plan: LaunchPlan, cluster: Cluster, hosts: Sequence[str], names: Sequence[str], network: JobNetwork | None
) -> tuple[LaunchPlan, JobNetwork | None]:
    """``plan`` on what it was given, and ``network`` with the devices of each host.

    Args:
        plan: The job.
        cluster: What the server hands out, as :func:`as_here` gives it.
        hosts: The hosts of the job as the cluster calls them; none where it names no hosts.
        names: Names of the IPUs that the job was given.
        network: How the hosts reach each other, or None.

    Raises:
        PartitionError: If a host has too few of them, or the instances are fewer than their IPU-Link domains.
        PlanError: If one is a GPU that the job may not use.
    """
    of_hosts = [_slots_on(plan, cluster, host, names) for host in hosts]
    if cluster.kind == CPU and not cluster.is_open:
        plan = replace(plan, vipu=replace(plan.vipu, ipus_per_host=len(cluster.ipus)))
    if network is not None and plan.devices and of_hosts:
        routes = tuple(
            replace(route, devices=tuple(map(str, slots)))
            for route, slots in zip(network.hosts, of_hosts, strict=True)
        )
        network = replace(network, hosts=routes)
    if network is None and plan.devices:
        in_slot_order = [ipu.name for ipu in cluster.ipus if ipu.name in names]
        _check_visible(cluster, in_slot_order[: plan.num_slots_per_host])
        return with_ipus(plan, cluster, in_slot_order), None
    return replace(with_ipus(replace(plan, devices=()), cluster, names), devices=plan.devices), network


def _slots_on(plan: LaunchPlan, cluster: Cluster, host: str, names: Sequence[str]) -> list[int]:
    """Numbers of the slots that the job uses on one host of the pod."""
    slots = [slot for slot, ipu in enumerate(share_of(cluster, host)) if ipu.name in names]
    needed = plan.num_slots_per_host
    if len(slots) < needed:
        raise PartitionError(
            f"partition {plan.vipu.partition} has {len(slots)} IPUs of {host}, and the job uses {needed} there: "
            "choose the hosts that it lies on with --host, or leave it to poprun to make one"
        )
    return slots[:needed]


def _check_visible(cluster: Cluster, names: Sequence[str]) -> None:
    """See that the GPUs are among those that ``CUDA_VISIBLE_DEVICES`` leaves here."""
    missing = [ipu.name for ipu in cluster.ipus if ipu.name in names and not ipu.device]
    if missing:
        raise PlanError(
            f"the job was given {', '.join(missing)}, and those GPUs are not here, or CUDA_VISIBLE_DEVICES leaves "
            "them out: unset it, because the server does not know of it"
        )


def _elsewhere(cluster: Cluster, what: str) -> PlanError:
    return PlanError(
        f"the server hands out the {what} of {cluster.name}, and the job does not run there: start it there, or "
        "have the server hand out a pod (POPRUN_POD=POD16 vipu serve), whose IPUs stand for any host"
    )


_RENEWAL: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "renewal.py")
_END_SECONDS: Final = 10.0
"""How long to wait at most until the lease has been given back."""
_READ_BYTES: Final = 64


@contextmanager
def renewed(server: ServerAddress, key: str, lease_seconds: float, linger_seconds: float) -> Iterator[int]:
    """Renew a lease as long as this block runs and, if this process is killed, as long as the job's agents live.

    Args:
        server: The server that gave it.
        key: The key of the lease.
        lease_seconds: How long it lasts without being renewed.
        linger_seconds: How long to renew it when this process and all agents here were killed: so long may
            programs of other hosts still run.

    Yields:
        The descriptor that the agents keep open.

    Raises:
        LaunchError: If the process cannot be started.
    """
    told = {
        "host": server.host,
        "port": server.port,
        "token": server.token,
        "timeout_seconds": server.timeout_seconds,
        "key": key,
        "lease_seconds": lease_seconds,
        "linger_seconds": linger_seconds,
    }
    life_reader, life_writer = os.pipe()
    end_reader, end_writer = os.pipe()
    try:
        started = subprocess.run(
            [sys.executable, "-I", "-S", _RENEWAL],
            stdin=life_reader,
            stdout=end_writer,
            start_new_session=True,
            check=False,
        )
        if started.returncode:
            raise LaunchError("the process that renews the lease cannot be started: see above")
        os.close(life_reader)
        os.close(end_writer)
        os.write(life_writer, json.dumps(told).encode() + b"\n")
        yield life_writer
    finally:
        with suppress(OSError):
            os.write(life_writer, b"over\n")
        os.close(life_writer)
        _await_end(end_reader)


def _await_end(reader: int) -> None:
    if select.select([reader], [], [], _END_SECONDS)[0]:
        os.read(reader, _READ_BYTES)
    os.close(reader)


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
    with renewed(pool.server, request.key, served.lease_seconds, linger) as descriptor:
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
