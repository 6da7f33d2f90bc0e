"""Words about a plan that several formats share."""

import shlex
from collections.abc import Sequence
from typing import Final

from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.plan.topology import Binding
from poprun.text.ranges import counted, fold_hosts, numbered

_MAX_HOSTS_LENGTH: Final = 60  # characters of a list of hosts; a longer one is cut


def size_of(plan: LaunchPlan) -> str:
    """How large ``plan`` is, in one line."""
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
    """How the instances of a replica share it, such as `` of 4 instances (2 stages of 2 shards)``, or ""."""
    parallelism = plan.parallelism
    if not parallelism.is_shared:
        return ""
    shards = counted(parallelism.tensor, "shard")
    sizes = f" ({counted(parallelism.pipeline, 'stage')} of {shards})" if parallelism.has_mesh else ""
    return f" of {parallelism.instances_per_replica} instances{sizes}"


def stands_for(instance: InstancePlan) -> str:
    """What the virtual IPUs of ``instance`` are here: ``GPUs 1,3``, ``cores 0-7``, ``GPU 0 in turns``."""
    if not instance.devices:
        things = numbered("core", instance.cores)
    elif all(name.isdecimal() for name in instance.devices):
        things = numbered("GPU", [int(name) for name in instance.devices])
    else:
        things = ", ".join(instance.devices)
    things = f"{things}, shared" if instance.is_sharing else things
    return things if len(instance.replicas) == 1 else f"{things} in turns"


def bound_to(binding: Binding) -> str:
    """What some instances are bound to: ``cores 0-7, memory of node 0``."""
    memory = f", memory of {numbered('node', binding.memory_nodes)}" if binding.memory_nodes else ""
    return f"{numbered('core', binding.cores)}{memory}"


def domains_of(plan: LaunchPlan, instances: Sequence[int]) -> str:
    """The IPU-Link domains of neighbouring instances: ``ILD 0``, ``ILDs 0-1``; nothing where all are one."""
    if plan.num_ilds == 1:
        return ""
    return numbered("ILD", range(plan.ild_of(instances[0]), plan.ild_of(instances[-1]) + 1))


def facts_of(plan: LaunchPlan) -> dict[str, str]:
    """What holds for every instance of ``plan``, by label."""
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
    """The launcher, with its MPI and Slurm job."""
    slurm = "" if plan.remote.slurm_job is None else f", in Slurm's job {plan.remote.slurm_job}"
    return (f"mpi: {plan.mpi}" if plan.mpi else str(plan.launcher)) + slurm


def _threads_of(plan: LaunchPlan) -> str:
    """The threads of a replica, or of each instance that shares one, as ``OMP_NUM_THREADS`` will say."""
    if plan.threads_per_replica is None:
        return "as OMP_NUM_THREADS says"
    return f"{plan.threads_per_replica} per {'instance' if plan.parallelism.is_shared else 'replica'}"


def describe_host(plan: LaunchPlan, index: int) -> str:
    """Everything that runs on host ``index``, in lines."""
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
    """What ``instance`` is, owns, and computes on, in lines."""
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
    """The instances that are left out of a host, in lines."""
    return "\n".join(
        [f"{counted(len(instances), 'more instance')}, each like its neighbours", *_ranges(plan, instances)]
    )


def describe_more_hosts(plan: LaunchPlan, hosts: range) -> str:
    """The hosts that are left out of a plan, in lines."""
    names = fold_hosts(plan.hosts[hosts.start : hosts.stop])
    names = names if len(names) <= _MAX_HOSTS_LENGTH else f"{names[: _MAX_HOSTS_LENGTH - 1]}…"
    count = plan.num_instances_per_host
    instances = range(hosts.start * count, hosts.stop * count)
    return "\n".join(
        [f"{counted(len(hosts), 'more host')}, each like its neighbours", names, *_ranges(plan, instances)]
    )


def instances_of_host(plan: LaunchPlan, index: int) -> range:
    """The indices of the instances of a host."""
    count = plan.num_instances_per_host
    return range(index * count, (index + 1) * count)


def _ranges(plan: LaunchPlan, instances: range) -> list[str]:
    return [numbered("instance", instances), numbered("replica", plan.replicas_of(instances))]
