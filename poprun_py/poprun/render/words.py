"""Words about a plan that several formats share."""

from collections.abc import Sequence

from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.plan.topology import Binding
from poprun.text.ranges import fold_numbers


def counted(count: int, noun: str) -> str:
    """``count`` with its noun: ``1 host``, ``1,024 hosts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """``numbers`` with their noun: ``replica 3``, ``replicas 0-3``."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {fold_numbers(numbers)}"


def size_of(plan: LaunchPlan) -> str:
    """How large ``plan`` is, in one line."""
    return " · ".join(
        [
            counted(plan.num_instances, "instance"),
            counted(plan.num_replicas, "replica"),
            counted(len(plan.hosts) * plan.num_slots_per_host, "virtual IPU"),
            *([counted(plan.num_ilds, "IPU-Link domain")] if plan.num_ilds > 1 else ()),
            counted(len(plan.hosts), "host"),
        ]
    )


def stands_for(instance: InstancePlan) -> str:
    """What the virtual IPUs of ``instance`` are here: ``GPUs 1,3`` or ``cores 0-7``."""
    if not instance.devices:
        return numbered("core", instance.cores)
    if all(name.isdecimal() for name in instance.devices):
        return numbered("GPU", [int(name) for name in instance.devices])
    return ", ".join(instance.devices)


def bound_to(binding: Binding) -> str:
    """What some instances are bound to: ``cores 0-7, memory of node 0``."""
    memory = f", memory of {numbered('node', binding.memory_nodes)}" if binding.memory_nodes else ""
    return f"{numbered('core', binding.cores)}{memory}"


def domains_of(plan: LaunchPlan, instances: range) -> str:
    """The IPU-Link domains of neighbouring instances: ``ILD 0``, ``ILDs 0-1``; nothing where all are one."""
    if plan.num_ilds == 1:
        return ""
    return numbered("ILD", range(plan.ild_of(instances[0]), plan.ild_of(instances[-1]) + 1))


def launcher_of(plan: LaunchPlan) -> str:
    """What starts the processes."""
    slurm = "" if plan.remote.slurm_job is None else f", in Slurm's job {plan.remote.slurm_job}"
    return (f"mpi: {plan.mpi}" if plan.mpi else str(plan.launcher)) + slurm


def threads_of(plan: LaunchPlan) -> str:
    """What ``OMP_NUM_THREADS`` will be."""
    if plan.threads_per_replica is None:
        return "as OMP_NUM_THREADS says"
    return f"{plan.threads_per_replica} per replica"
