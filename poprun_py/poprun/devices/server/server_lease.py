"""The lease of a job from a server of virtual IPUs: requested before the start, renewed while the job runs.

A server leases the GPUs or the cores of its own machine, or a pod. A pod's IPUs may be used on any host, unless
the pod names hosts: then each host has its share of the IPUs. If a job with a pod's IPUs computes on GPUs, the job
also leases these GPUs from the pools of its hosts.
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
from dataclasses import asdict, replace
from typing import Final

from poprun.devices.lease.claims import (
    ATTEMPT_SECONDS,
    Claim,
    Granted,
    LeasedPlan,
    choose_partition,
    request_ipus,
)
from poprun.devices.pool.clusters import check_hosts_of
from poprun.devices.pool.holders import boot_id
from poprun.devices.pool.records import PoolState
from poprun.devices.pool.requests import IpuRequest, refusal
from poprun.devices.server.server_client import RemotePool, pool_at
from poprun.devices.server.server_connection import ServerAddress
from poprun.devices.server.server_messages import LeaseAnswer, LeaseRequest, ServedPool
from poprun.errors import LaunchError, PartitionError, PlanError, PoprunError, ServerLostError
from poprun.hosts.probe.gpus import find_gpus
from poprun.hosts.probe.machine import names_of_this_machine
from poprun.launch.process.process_tree import ancestors, key_of, user_name
from poprun.makers.maker import MAKERS
from poprun.plan.inventory import CPU, GPU, POD, Cluster
from poprun.plan.plan import LaunchPlan, LeasedDevices
from poprun.plan.pods import allocation_of, share_of
from poprun.plan.request import VipuSettings
from poprun.plan.topology import Gpu, MachineFacts
from poprun.text import screen

_LOSS_SECONDS: Final = 15.0  # how long agents of other hosts may need to notice poprun's end
_MOST_LETTERS: Final = 200  # the length to which the job's command line is cut for listings
_RENEWAL: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "renewal.py")
_END_SECONDS: Final = 10.0  # how long to wait at most for the release of the lease
_READ_BYTES: Final = 64


def under_server(vipu: VipuSettings, facts: MachineFacts) -> tuple[MachineFacts, Cluster | None]:
    """Return this machine's ``facts`` with only the GPUs that a server leases, and the server's pod or None."""
    served = _pool_of(vipu).served()
    return facts_under(facts, served), served.cluster if served.cluster.kind == POD else None


@contextmanager
def leased_from_server(job: LeasedPlan) -> Iterator[LeasedPlan]:
    """A context in which ``job`` has a lease from a server of virtual IPUs, renewed until the context ends."""
    # A job started by a program of another job runs on the other job's virtual IPUs, and needs no lease.
    plan, pool = job.plan, _pool_of(job.plan.vipu)
    served = pool.served()
    check_place(plan, served, boot_id())
    is_gpus = served.cluster.kind == GPU
    num_ipus = (plan.num_gpus_per_host if is_gpus else plan.num_ipus_per_host) * len(plan.hosts)
    user = user_name(os.getuid())
    partition = choose_partition(
        plan, served.state, num_ipus, lambda owner: owner.partition("@")[0] == user, screen.log
    )
    aliases = names_of_this_machine(served.cluster.hosts)
    cluster = as_here(served.cluster, find_gpus(os.environ)) if is_gpus else served.cluster
    hosts = hosts_in(plan.hosts, cluster, aliases)

    def held(names: Sequence[str], descriptor: int | None = None) -> LeasedPlan:
        granted = Granted(plan=plan, cluster=cluster, names=names, partition=partition)
        lease = replace(granted.lease(str(pool.server)), descriptor=descriptor)
        return replace(job.with_leases(given_ipus(granted, hosts), lease), has_gpus=is_gpus)

    above = _held_above(served.state)
    if num_ipus <= len(above):
        yield held(above)
        return
    allocation = allocation_of(cluster, plan.vipu)
    wanted = request_ipus(plan, num_ipus, partition, num_domains=plan.num_ilds, allocation=allocation, hosts=hosts)
    claim = ServerClaim(pool, wanted, shlex.join(plan.program))
    try:
        names = claim.wait_until_granted(plan.vipu, screen.log)
    except BaseException:
        claim.give_back()
        raise
    linger_seconds = 0.0 if job.network is None else plan.ending.stop_timeout_seconds + _LOSS_SECONDS
    with _renewing(pool.server, claim.request.key, served.lease_seconds, linger_seconds) as descriptor:
        yield held(names, descriptor)


class ServerClaim(Claim):
    """A job's request for virtual IPUs of a server, which waits in a queue until it becomes a lease."""

    def __init__(self, pool: RemotePool, wanted: IpuRequest, words: str) -> None:
        super().__init__(None if wanted.partition is None else wanted.partition.name)
        key = key_of(os.getpid())
        self.request = LeaseRequest(
            key=secrets.token_hex(16),
            pid=os.getpid(),
            start_ticks=1 if key is None else key.start_ticks,
            user=user_name(os.getuid()),
            host=socket.gethostname(),
            words=words[:_MOST_LETTERS],
            wanted=wanted,
        )
        self._pool = pool
        self._answer: LeaseAnswer | None = None

    def _ask_pool(self) -> tuple[str, ...]:
        self._answer = self._pool.request_lease(self.request) if self._answer is None else self._request_again()
        return self._answer.ipus

    def _wait(self, timeout_seconds: float | None) -> None:
        pause_seconds = 0.0 if self._answer is None else self._answer.pause_seconds
        time.sleep(pause_seconds if timeout_seconds is None else timeout_seconds)

    def _refusal(self, *, advises: bool) -> str:
        served, request = self._pool.served(), self.request.wanted
        return refusal(
            request.of(served.cluster),
            served.cluster,
            served.state,
            own=0 if self._answer is None else self._answer.id,
            shares=request.shares_devices,
            advises=advises,
            place=f"in {served.cluster.name} at {self._pool.server}",
        )

    def give_back(self) -> None:
        """Release the job's lease or place in the server's queue; do nothing if the server cannot be reached."""
        with suppress(PoprunError):
            self._pool.end_lease(self.request.key)

    def _request_again(self) -> LeaseAnswer:
        """Send the request for IPUs again; if the server cannot be reached, repeat this up to a time limit."""
        patience_seconds = self._pool.server.timeout_seconds
        deadline = time.monotonic() + patience_seconds
        is_logged = False
        while True:
            try:
                return self._pool.request_lease(self.request)
            except ServerLostError as error:
                if time.monotonic() + ATTEMPT_SECONDS > deadline:
                    raise
                if not is_logged:
                    screen.log(f"warning: {error}; waiting for it, {patience_seconds:g} s at most")
                is_logged = True
                time.sleep(ATTEMPT_SECONDS)


@contextmanager
def _renewing(server: ServerAddress, key: str, lease_seconds: float, linger_seconds: float) -> Iterator[int]:
    """A context in which a child process renews a lease. The context's value is the descriptor of a pipe: the
    child process runs as long as poprun or an agent keeps this descriptor open.

    If poprun and all agents here are killed, the process renews the lease for ``linger_seconds`` more.
    """
    # The process lingers because programs of other hosts may still run.
    seconds = {"lease_seconds": lease_seconds, "linger_seconds": linger_seconds}
    job = {"server": asdict(server), "key": key, **seconds}
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
        os.close(life_reader)
        os.close(end_writer)
        if started.returncode:
            raise LaunchError("the process that renews the lease cannot be started: see above")
        os.write(life_writer, json.dumps(job).encode() + b"\n")
        yield life_writer
    finally:
        with suppress(OSError):
            os.write(life_writer, b"over\n")
        os.close(life_writer)
        if select.select([end_reader], [], [], _END_SECONDS)[0]:
            os.read(end_reader, _READ_BYTES)
        os.close(end_reader)


def facts_under(facts: MachineFacts, served: ServedPool) -> MachineFacts:
    """Return ``facts`` with only the GPUs of the server, leased ones marked; unchanged if it leases a pod."""
    cluster, taken = served.cluster, served.state.taken
    if cluster.kind == POD:
        return facts
    is_taken = {ipu.device: ipu.name in taken for ipu in as_here(cluster, facts.gpus).ipus}
    gpus = tuple(replace(gpu, is_leased=is_taken[gpu.name]) for gpu in facts.gpus if gpu.name in is_taken)
    if not gpus and cluster.kind == GPU:
        raise _elsewhere(cluster, "GPUs")
    return replace(facts, gpus=gpus)


def as_here(cluster: Cluster, gpus: Sequence[Gpu]) -> Cluster:
    """Return ``cluster``, the server's GPUs, with the names and in the order that they have in this process."""
    devices = {gpu.uuid or gpu.name: gpu.name for gpu in gpus}
    slots = {gpu.name: slot for slot, gpu in enumerate(gpus)}
    ipus = [replace(ipu, device=devices.get(ipu.name, "")) for ipu in cluster.ipus]
    return replace(cluster, ipus=tuple(sorted(ipus, key=lambda ipu: slots.get(ipu.device, len(slots)))))


def check_place(plan: LaunchPlan, served: ServedPool, boot_id: str) -> None:
    """Raise PlanError if the server leases devices of its own machine and the job runs on another machine."""
    if served.cluster.kind != POD and (len(plan.hosts) > 1 or served.boot_id != boot_id):
        raise _elsewhere(served.cluster, "cores" if served.cluster.kind == CPU else "GPUs")


def hosts_in(hosts: Sequence[str], cluster: Cluster, aliases: Collection[str]) -> tuple[str, ...]:
    """Return the names that ``cluster`` has for the job's ``hosts``; () if the cluster names no hosts."""
    own_names = [host for host in cluster.hosts if host in aliases]
    named = tuple(own_names[0] if host in aliases and own_names else host for host in hosts)
    check_hosts_of(cluster, named)
    return named if cluster.hosts else ()


def given_ipus(granted: Granted, hosts: Sequence[str]) -> LeasedDevices:
    """Return the devices and cores that a job gets by a lease from a server; ``hosts`` are the job's hosts."""
    plan, cluster = granted.plan, granted.cluster
    if cluster.kind == GPU:
        in_slot_order = [ipu.name for ipu in cluster.ipus if ipu.name in granted.names]
        _check_visible(plan, cluster, in_slot_order[: plan.num_gpus_per_host])
        return replace(plan.named_devices, devices=replace(granted, names=in_slot_order).devices)
    for host in hosts:
        _check_share(granted, host)
    granted.check_domains(num_hosts=len(plan.hosts))
    if cluster.kind != CPU or cluster.is_open:
        return plan.named_devices
    return replace(plan.named_devices, cores=granted.cores)


def _check_share(granted: Granted, host: str) -> None:
    """Raise PartitionError if the granted IPUs on ``host`` are fewer than the job uses on this host."""
    count = sum(ipu.name in granted.names for ipu in share_of(granted.cluster, host))
    if count < (used := granted.plan.num_ipus_per_host):
        raise PartitionError(
            f"partition {granted.partition} has {count} IPUs of {host}, and the job uses {used} there: choose the "
            "hosts that it lies on with --host, or leave it to poprun to make one"
        )


def _check_visible(plan: LaunchPlan, cluster: Cluster, names: Sequence[str]) -> None:
    """Raise PlanError if a granted GPU is not on this machine, or if an environment variable hides the GPU."""
    missing = [ipu.name for ipu in cluster.ipus if ipu.name in names and not ipu.device]
    if missing:
        mask = MAKERS[plan.maker].mask
        raise PlanError(
            f"the job was given {', '.join(missing)}, and those GPUs are not here, or {mask} leaves them out: "
            "unset it, because the server does not know of it"
        )


def _elsewhere(cluster: Cluster, what: str) -> PlanError:
    return PlanError(
        f"the server hands out the {what} of {cluster.name}, and the job does not run there: start it there, or "
        "have the server hand out a pod (POPRUN_POD=POD16 vipu serve), whose IPUs stand for any host"
    )


def _pool_of(vipu: VipuSettings) -> RemotePool:
    return pool_at(vipu.server_host or "", vipu.server_port, vipu.server_timeout_seconds)


def _held_above(state: PoolState) -> tuple[str, ...]:
    """Return the leased IPUs of the outer job that started this process; () if no job started this process."""
    above = {key_of(pid) for pid in ancestors(os.getpid())}
    suffix = f"@{socket.gethostname()}"
    return next(
        (
            lease.ipus
            for lease in state.leases
            if (lease.holder.pid, lease.holder.start_ticks) in above and lease.holder.user.endswith(suffix)
        ),
        (),
    )
