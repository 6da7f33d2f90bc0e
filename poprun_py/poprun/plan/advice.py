"""Warnings and advice about a plan: choices that are slow, do not fit the machine, or have no effect. Pure.

The functions get a plan and the facts of a machine, and return lines of text. A plan that was made here gets
advice; a plan from a file is checked against this machine.
"""

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from poprun.errors import PlanError
from poprun.makers.maker import MAKERS
from poprun.plan.plan import LaunchPlan
from poprun.plan.request import legal_instances
from poprun.plan.topology import MachineFacts, MpiKind, MpiRuntime
from poprun.text.ranges import counted, fold_numbers, numbered

_OF_PARTITIONS: Final = ("vipu-partition-attempts", "update-partition", "reset-partition", "remove-partition")
_OF_LEASES: Final = ("wait-for-devices", "vipu-server-timeout")
_OF_PODS: Final = ("vipu-allocation", "vipu-cluster")
_OF_VIRTUAL_IPUS: Final = (
    *("vipu-partition", "vipu-server-host", "vipu-server-port", "pool", "share-devices"),
    *(*_OF_PARTITIONS, *_OF_LEASES, *_OF_PODS),
)


def advise(
    plan: LaunchPlan, facts: MachineFacts, *, left_out: Sequence[str] = (), are_hosts_seen: bool = True
) -> tuple[str, ...]:
    """Return texts of advice on ``plan``, most important first. ``left_out`` are MPI options that are ignored."""
    lines = list(_on_machine(plan, facts))
    if left_out:
        lines.append(_on_words(left_out, plan.mpi))
    if len(plan.hosts) > 1 and not are_hosts_seen:
        resources = named("GPU", plan.devices) if plan.devices else f"cores {fold_numbers(plan.cores)}"
        lines.append(f"planned as if each of the {len(plan.hosts):,} hosts had what this machine has: {resources}")
    return tuple(lines)


def check_fitness(plan: LaunchPlan, facts: MachineFacts, source: str) -> tuple[str, ...]:
    """Raise PlanError if ``plan`` names GPUs, or cores for bindings, that this machine lacks; return a tuple of
    one warning if the machine only has fewer cores than the plan counts on, otherwise ().
    """
    cure = f"make a new plan here with --dry-run --topology-format json instead of {source}"
    gpus = [gpu.name for gpu in facts.gpus]
    if missing := [name for name in plan.devices if name not in gpus]:
        gpus_here = f"this machine has {named('GPU', gpus)}" if gpus else "no GPU is found here"
        raise PlanError(f"{source}: devices names {named('GPU', missing)}, and {gpus_here}: {cure}")
    cores_here = {cpu.number for cpu in facts.cpus} or set(facts.cores)
    if absent := {core for binding in plan.bindings for core in binding.cores} - cores_here:
        raise PlanError(
            f"{source}: bindings names {numbered('core', sorted(absent))}, and this process may use "
            f"{numbered('core', sorted(cores_here))}: {cure}, or leave bindings empty to bind none"
        )
    if len(plan.cores) <= len(facts.cores):
        return ()
    threads = plan.threads_per_replica
    kept = f"; the {threads} threads of each replica stay as planned" if threads else ""
    are = "is" if len(facts.cores) == 1 else "are"
    difference = f"{source} counts on {len(plan.cores)} cores, and there {are} {len(facts.cores)} here"
    return (f"{difference}: the instances slow each other down{kept}",)


def idle_options(plan: LaunchPlan) -> Mapping[str, str]:
    """Return {option: reason} for each option about virtual IPUs that has no effect on the job of ``plan``."""
    vipu = plan.vipu
    if vipu.is_offline:
        return dict.fromkeys(_OF_VIRTUAL_IPUS, "--offline-mode takes no virtual IPUs")
    reasons = {}
    if not plan.devices:
        reasons["share-devices"] = "the job uses no GPUs"
    if not plan.asks_server and _is_one_allocation(vipu.pod):
        pod = vipu.pod or "this machine"
        why = f"{pod} is one allocation, whatever it is called; a pod's YAML file has several"
        reasons |= dict.fromkeys(_OF_PODS, why)
    if vipu.partition is None:
        reasons |= dict.fromkeys(_OF_PARTITIONS, "the job names no --vipu-partition")
    if plan.asks_server and not plan.devices:
        reasons["pool"] = f"the virtual IPUs come from the server at {vipu.server_host}"
    elif not (plan.asks_server or plan.takes_lease or plan.owns_cores):
        why = "the job takes nothing from the pool: nobody has counted the virtual IPUs of a CPU (--ipus-per-host)"
        reasons |= dict.fromkeys(_OF_LEASES, why)
    return reasons


def _is_one_allocation(pod: str | None) -> bool:
    """Whether the pod ``pod``, or this machine if it is None, is not divided into named parts (allocations)."""
    if pod is None:
        return True
    from poprun.plan.pods import named_pod

    return named_pod(pod) is not None


def _on_words(left_out: Sequence[str], mpi: MpiRuntime | None) -> str:
    """Return a warning that poprun ignores the MPI options ``left_out``, which the job's launcher cannot use."""
    words = shlex.join(left_out)
    if mpi is None:
        return f"{words}: left out, there is no MPI launcher that could be told; -x and --tag-output work without"
    if mpi.kind is MpiKind.OPEN_MPI:
        return f"{words}: left out, one launcher starts all instances; -x works for one of them"
    return f"{words}: left out, these are words for Open MPI and MPICH starts the job; -x and --tag-output work"


def _on_machine(plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    """Yield advice if the machine's GPUs or cores are too few for a job, are shared by instances, or are idle."""
    threads = plan.threads_per_replica or facts.num_user_threads
    if not plan.vipu.is_offline:
        yield from facts.gpu_problems
    if plan.shares_devices:
        yield _shared_gpus(plan)
    yield from _unlike_gpus(plan, facts)
    if facts.gpus and not (plan.devices or plan.vipu.is_offline):
        yield f"computing on the CPU: {_too_few_gpus(plan, facts)}"
    busy = [gpu.name for gpu in facts.gpus if gpu.name in plan.devices and gpu.occupants]
    if busy and plan.vipu.shares_devices:
        yield f"another process holds memory on {named('GPU', busy)}, and the job shares it"
    if not plan.devices and plan.num_instances_per_host * max(1, threads) > len(plan.cores):
        yield _too_many_threads(plan, threads)
    else:
        yield from _too_narrow_bindings(plan, threads)
    yield from _idle_gpus(plan, facts) if plan.devices else _idle_cores(plan, threads)
    yield from _far_apart(plan)


def check_gpus(plan: LaunchPlan, facts: MachineFacts) -> None:
    """Raise PlanError if this machine has GPUs, but too few for the job, which would use the CPU silently."""
    is_counted = plan.asks_server or plan.vipu.pod is not None or plan.vipu.ipus_per_host is not None
    if facts.gpus and not (plan.devices or plan.vipu.is_offline or is_counted):
        raise PlanError(f"{_too_few_gpus(plan, facts)}; --offline-mode computes on the CPU")


def _too_few_gpus(plan: LaunchPlan, facts: MachineFacts) -> str:
    count = len(facts.gpus)
    possible = _most_instances(plan, count // plan.num_devices_per_instance)
    cure = f"; --num-instances {possible} fits the GPUs" if possible else ""
    if plan.num_devices_per_instance <= count and not plan.vipu.shares_devices:
        cure += f"{', and' if cure else ';'} --share-devices lets instances share {'it' if count == 1 else 'them'}"
    return (
        f"{counted(plan.num_instances_per_host, 'instance')}{_per_host(plan)} "
        f"use{'s' if plan.num_instances_per_host == 1 else ''} {counted(plan.num_gpus_needed, 'GPU')}, and "
        f"there {'is' if count == 1 else 'are'} {count}{cure}"
    )


def _shared_gpus(plan: LaunchPlan) -> str:
    slices = any(map(MAKERS[plan.maker].is_slice, plan.devices))
    whose = "compute on slices" if slices else f"share {named('GPU', plan.devices)}"
    return (
        f"{counted(plan.num_instances_per_host, 'instance')}{_per_host(plan)} {whose}: their tensors are "
        "exchanged over the memory of the host, which takes longer, and the bits are the same"
    )


def _unlike_gpus(plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    """Yield advice if the job's GPUs are of different models: then results depend on the number of instances."""
    kinds = sorted({gpu.model for gpu in facts.gpus if gpu.name in plan.devices and gpu.model})
    if len(kinds) > 1:
        yield (
            f"the job's GPUs are of several kinds ({', '.join(kinds)}), which compute other bits: another split "
            f"of the replicas may give other weights; choose GPUs of one kind with {MAKERS[plan.maker].mask}"
        )


def _too_many_threads(plan: LaunchPlan, threads: int) -> str:
    threads_each = f" with {threads} threads each" if threads > 1 else ""
    fitting = max(1, len(plan.cores) // plan.num_instances_per_host)
    cure = f"; --threads-per-replica {fitting} fits" if threads > fitting else ""
    return (
        f"{counted(plan.num_instances_per_host, 'instance')}{_per_host(plan)}{threads_each} share "
        f"{counted(len(plan.cores), 'core')}: they slow each other down{cure}"
    )


def _too_narrow_bindings(plan: LaunchPlan, threads: int) -> Iterator[str]:
    """Yield advice if instances are bound to fewer cores than they have threads."""
    for binding in plan.bindings:
        count, num_cores = len(binding.instances), len(binding.cores)
        if count * threads > num_cores:
            yield (
                f"{counted(count, 'instance')}{_per_host(plan)} with {counted(threads, 'thread')} each "
                f"{'is' if count == 1 else 'are'} bound to the {counted(num_cores, 'core')} near "
                f"{'its' if count == 1 else 'their'} GPUs: --process-placement disabled lets them use all "
                f"{len(plan.cores)}, --threads-per-replica {max(1, num_cores // count)} fits"
            )
            return


def _idle_gpus(plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    """Yield advice if replicas of an instance take turns on its GPUs although the host has other free GPUs."""
    if plan.parallelism.is_shared:
        return
    num_usable = sum(gpu.is_free or gpu.name in plan.devices for gpu in facts.gpus)
    better = _most_instances(plan, num_usable // plan.ipus_per_replica)
    if better > plan.num_instances:
        used = better // len(plan.hosts) * plan.ipus_per_replica
        yield _take_turns(plan, better, busy=len(plan.devices), used=used, total=counted(num_usable, "GPU"))


def _idle_cores(plan: LaunchPlan, threads: int) -> Iterator[str]:
    """Yield advice if replicas of an instance take turns on its cores although the host has other idle cores."""
    num_cores, busy = len(plan.cores), plan.num_instances_per_host * threads
    if not threads or busy >= num_cores or plan.parallelism.is_shared:
        return
    counts = legal_instances(plan.num_replicas, len(plan.hosts))
    enough = [count for count in counts if count // len(plan.hosts) * threads >= num_cores]
    better = min(enough, default=counts[-1])
    if better > plan.num_instances:
        used = min(num_cores, better // len(plan.hosts) * threads)
        yield _take_turns(plan, better, busy=busy, used=used, total=counted(num_cores, "core"))


def _far_apart(plan: LaunchPlan) -> Iterator[str]:
    """Yield advice if hosts have unequal parts of a replica or layer, or if a layer is on several hosts."""
    num_local, sharing = plan.num_instances_per_host, plan.parallelism
    of_replica = sharing.instances_per_replica
    for what, size in (("shards of a layer", sharing.tensor), ("instances of a replica", of_replica)):
        if num_local % size and size % num_local:
            below = num_local - num_local % size
            fitting = [str(count * len(plan.hosts)) for count in (below, below + size) if count]
            yield (
                f"{num_local} instances per host part the {size} {what} unevenly: some lie on more hosts than "
                f"others, and the slowest hold up all; --num-instances {' or '.join(fitting)} divides evenly"
            )
            return
    if sharing.tensor > num_local:
        better = f"tensor={num_local},pipeline={of_replica // num_local}"
        yield (
            f"tensor={sharing.tensor} spans hosts of {counted(num_local, 'instance')}: each layer is exchanged "
            f"between hosts; {better} keeps it on one"
        )


def _most_instances(plan: LaunchPlan, num_per_host: int) -> int:
    """Return the largest number of instances that ``plan`` allows with at most ``num_per_host`` per host, or 0."""
    most, size = num_per_host * len(plan.hosts), plan.parallelism.instances_per_replica
    if size > 1:
        return most - most % math.lcm(size, len(plan.hosts))
    return max(
        (count for count in legal_instances(plan.num_replicas, len(plan.hosts)) if count <= most), default=0
    )


def _take_turns(plan: LaunchPlan, better: int, *, busy: int, used: int, total: str) -> str:
    """Return advice: replicas take turns on ``busy`` of ``total`` devices; ``better`` instances would use more."""
    replicas = f"the {plan.layout.num_local_replicas} replicas of each instance"
    gain = "all of them" if total.startswith(f"{used:,} ") else str(used)
    return f"{replicas} take turns on {busy} of {total}{_per_host(plan)}; --num-instances {better} uses {gain}"


def _per_host(plan: LaunchPlan) -> str:
    return " per host" if len(plan.hosts) > 1 else ""


def named(noun: str, names: Collection[str]) -> str:
    """Return ``noun``, in the plural unless there is one name, and ``names`` as text, such as ``GPUs 0, 1``."""
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(names)}"
