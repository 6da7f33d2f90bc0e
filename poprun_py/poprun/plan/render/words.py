"""Texts about a plan that several output formats use."""

import shlex
from collections.abc import Sequence
from typing import Final

from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.plan.topology import Binding
from poprun.text.ranges import counted, fold_hosts, numbered

_MAX_HOSTS_LENGTH: Final = 60  # characters of a list of hosts; a longer one is cut


def size_of(plan: LaunchPlan) -> str:
    """Return one line with the size of ``plan``: numbers of instances, replicas, virtual IPUs and hosts."""
    return " · ".join(
        [
            counted(plan.num_instances, "instance"),
            counted(plan.num_replicas, "replica") + _sharing_of(plan),
            counted(plan.num_replicas * plan.ipus_per_replica, "virtual IPU"),
            *([counted(plan.num_ilds, "IPU-Link domain")] if plan.num_ilds > 1 else ()),
            counted(len(plan.hosts), "host"),
        ]
    )


def _sharing_of(plan: LaunchPlan) -> str:
    """Return the text on how instances share a replica: `` of 4 instances (2 stages of 2 shards)``, or ""."""
    parallelism = plan.parallelism
    if not parallelism.is_shared:
        return ""
    shards = counted(parallelism.tensor, "shard")
    sizes = f" ({counted(parallelism.pipeline, 'stage')} of {shards})" if parallelism.has_mesh else ""
    return f" of {parallelism.instances_per_replica} instances{sizes}"


def stands_for(instance: InstancePlan) -> str:
    """Return the devices behind an instance's virtual IPUs: ``GPUs 1,3``, ``cores 0-7``, ``GPU 0 in turns``."""
    if not instance.devices:
        things = numbered("core", instance.cores)
    elif all(name.isdecimal() for name in instance.devices):
        things = numbered("GPU", [int(name) for name in instance.devices])
    else:
        things = ", ".join(instance.devices)
    things = f"{things}, shared" if instance.is_sharing else things
    return things if len(instance.replicas) == 1 else f"{things} in turns"


def bound_to(binding: Binding) -> str:
    """Return the cores and memory of a binding as text, such as ``cores 0-7, memory of node 0``."""
    memory = f", memory of {numbered('node', binding.memory_nodes)}" if binding.memory_nodes else ""
    return f"{numbered('core', binding.cores)}{memory}"


def domains_of(plan: LaunchPlan, instances: Sequence[int]) -> str:
    """Return the IPU-Link domains of consecutive ``instances``, such as ``ILDs 0-1``; "" if there is only one."""
    if plan.num_ilds == 1:
        return ""
    return numbered("ILD", range(plan.ild_of(instances[0]), plan.ild_of(instances[-1]) + 1))


def facts_of(plan: LaunchPlan) -> dict[str, str]:
    """Return facts that hold for every instance of ``plan`` (launcher, threads, program), by label."""
    facts = {
        "launcher": _launcher_of(plan),
        "threads": _threads_of(plan),
        "algorithms": "deterministic" if plan.is_deterministic else "",
        "compiled": plan.cache_directory or "",
        "program": shlex.join(plan.program),
        "folder": plan.working_directory,
    }
    return {label: fact for label, fact in facts.items() if fact}


def _launcher_of(plan: LaunchPlan) -> str:
    """Return the name of the job's launcher, with its MPI version and Slurm job, if any."""
    slurm = "" if plan.remote.slurm_job is None else f", in Slurm's job {plan.remote.slurm_job}"
    return (f"mpi: {plan.mpi}" if plan.mpi else str(plan.launcher)) + slurm


def _threads_of(plan: LaunchPlan) -> str:
    """Return the text on how many threads each replica has, or each instance if instances share replicas."""
    if plan.threads_per_replica is None:
        return "as OMP_NUM_THREADS says"
    return f"{plan.threads_per_replica} per {'instance' if plan.parallelism.is_shared else 'replica'}"


def describe_host(plan: LaunchPlan, index: int) -> str:
    """Return lines about host ``index``: its name, and its instances, replicas and virtual IPUs."""
    instances = instances_of_host(plan, index)
    lines = [
        f"host {plan.hosts[index]}",
        f"host {index} of {counted(len(plan.hosts), 'host')}",
        *_ranges(plan, instances),
        numbered("virtual IPU", range(plan.num_ipus_per_host)),
        domains_of(plan, instances),
    ]
    return "\n".join(filter(None, lines))


def describe_instance(plan: LaunchPlan, instance: InstancePlan) -> str:
    """Return lines about ``instance``: its host, replicas, virtual IPUs, devices and bound cores."""
    lines = [
        f"instance {instance.index}",
        f"on host {instance.host}, number {instance.local_index} there",
        plan.parallelism.describe([instance.index]) or numbered("replica", instance.replicas),
        f"{numbered('virtual IPU', instance.ipus)}: {stands_for(instance)}",
        domains_of(plan, [instance.index]),
        "" if instance.binding is None else f"bound to {bound_to(instance.binding)}",
    ]
    return "\n".join(filter(None, lines))


def describe_more_instances(plan: LaunchPlan, instances: range) -> str:
    """Return lines about the ``instances`` that a drawing of a host leaves out."""
    return "\n".join(
        [f"{counted(len(instances), 'more instance')}, each like its neighbours", *_ranges(plan, instances)]
    )


def describe_more_hosts(plan: LaunchPlan, hosts: range) -> str:
    """Return lines about the hosts with the indices ``hosts``, which a drawing of a plan leaves out."""
    names = fold_hosts(plan.hosts[hosts.start : hosts.stop])
    names = names if len(names) <= _MAX_HOSTS_LENGTH else f"{names[: _MAX_HOSTS_LENGTH - 1]}…"
    count = plan.num_instances_per_host
    instances = range(hosts.start * count, hosts.stop * count)
    return "\n".join(
        [f"{counted(len(hosts), 'more host')}, each like its neighbours", names, *_ranges(plan, instances)]
    )


def instances_of_host(plan: LaunchPlan, index: int) -> range:
    """Return the range of the indices of the instances on host ``index``."""
    count = plan.num_instances_per_host
    return range(index * count, (index + 1) * count)


def _ranges(plan: LaunchPlan, instances: range) -> list[str]:
    return [numbered("instance", instances), numbered("replica", plan.replicas_of(instances))]
