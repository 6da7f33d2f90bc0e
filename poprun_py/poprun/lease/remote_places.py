"""Where what a server hands out can be used, and what it is there. Pure.

A server hands out the GPUs or the cores of its own machine, or a pod. A pod stands for whatever computes on any
host, unless it names hosts: then each of them has its share of the IPUs, and the first of those are its GPUs, as
nvidia-smi numbers them.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from poprun.errors import PartitionError, PlanError
from poprun.hosts.routes import JobNetwork
from poprun.lease.ipus import with_ipus
from poprun.lease.server_messages import ServedPool
from poprun.plan.inventory import CPU, POD, Cluster
from poprun.plan.plan import LaunchPlan
from poprun.plan.pods import share_of
from poprun.plan.topology import Gpu, MachineFacts
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
