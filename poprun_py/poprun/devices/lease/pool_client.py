"""The functions about leases on devices that poprun calls: before planning, in a dry run, at a job's start."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from poprun.devices.lease.claims import LeasedPlan
from poprun.devices.lease.local_lease import LocalClaim, ipu_claims, leased_here, own_partition
from poprun.devices.pool.clusters import check_names, pod_of
from poprun.devices.pool.place import pool_folder
from poprun.devices.pool.pool import Pool
from poprun.devices.pool.records import PoolState, fold_names
from poprun.devices.pool.requests import refusal
from poprun.errors import IpusTakenError, PoprunError
from poprun.launch.routes import JobNetwork
from poprun.plan.inventory import Cluster
from poprun.plan.plan import LaunchPlan
from poprun.plan.pods import allocation_of
from poprun.plan.request import VipuSettings
from poprun.plan.topology import MachineFacts
from poprun.text import screen
from poprun.text.ranges import counted, fold_hosts


def facts_under_pool(
    vipu: VipuSettings, facts: MachineFacts, *, asks_server: bool
) -> tuple[MachineFacts, Cluster | None]:
    """Return ``facts`` with other jobs' GPUs marked, and the pod (shape of virtual IPUs) to plan for, or None."""
    pod = None if vipu.pod is None else pod_of(vipu.pod)
    if pod is not None:
        check_names(pod, allocation_of(pod, vipu))
    if vipu.server_host is not None and asks_server and not vipu.is_offline:
        from poprun.devices.server.server_lease import under_server

        facts, pod = under_server(vipu, facts)
        if pod is None:
            return facts, None
    if facts.gpus and not vipu.is_offline:
        taken = Pool(pool_folder(vipu.pool)).state().taken
        gpus = (replace(gpu, is_leased=(gpu.uuid or gpu.name) in taken) for gpu in facts.gpus)
        facts = replace(facts, gpus=tuple(gpus))
    return facts, pod


@contextmanager
def hold(plan: LaunchPlan, facts: MachineFacts | None, network: JobNetwork | None) -> Iterator[LeasedPlan]:
    """A context in which a job has its leases on devices of all its hosts; the leases end with the context."""
    is_fixed = facts is None
    with ExitStack() as stack:
        job = LeasedPlan(plan=plan, given=plan.named_devices, network=network)
        if plan.asks_server:
            from poprun.devices.server.server_lease import leased_from_server

            job = stack.enter_context(leased_from_server(job))
        if job.network is None:
            yield stack.enter_context(leased_here(job, facts, is_fixed=is_fixed))
        else:
            from poprun.devices.lease.host_leases import leased_on_hosts

            yield stack.enter_context(leased_on_hosts(job, job.network, is_fixed=is_fixed))


def would_hold(plan: LaunchPlan, facts: MachineFacts | None, *, is_here: bool) -> str:
    """Return a line of text that names the devices that a job would lease now, or why it could not start now."""
    if not is_here:
        counts = [counted(plan.num_ipus_per_host, "virtual IPU")] if plan.leases_ipus else []
        counts += [counted(plan.num_gpus_per_host, "GPU")] if plan.devices else []
        where = "each of " if len(plan.hosts) > 1 else ""
        return f"would lease {' and '.join(counts)} on {where}{fold_hosts(plan.hosts)}, from the pool of each host"
    try:
        partition, state = own_partition(plan, screen.log)
        claims = ipu_claims(plan, partition, facts, is_fixed=False)
        shown = [_would_lease(claim, state) for claim in claims]
    except PoprunError as error:
        return f"would not start now: {error}"
    return f"would lease {' and '.join(shown)}, from the pool {pool_folder(plan.vipu.pool)}"


def _would_lease(claim: LocalClaim, state: PoolState) -> str:
    """Return the names of the devices that ``claim`` would get now. Raise IpusTakenError if the job would wait."""
    request = claim.request()
    names, _ = request.choose_from(state)
    if not names:
        shares = claim.plan.vipu.shares_devices
        raise IpusTakenError(refusal(request, claim.cluster, state, own=0, shares=shares))
    ipus = fold_names(claim.lease(names).names)
    if request.partition is None:
        return ipus
    suffix = "" if state.partition(request.partition.name) is not None else ", made for it"
    return f"partition {request.partition.name}{suffix}: {ipus}"
