"""What a user should know about a plan: what may not be meant, does not fit this machine, or has no effect.

Pure: a plan and the facts it was made from in, text out.

PopRun's command lines give them for an IPU system; what has no meaning in a job is said, and never an error.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from poprun.errors import PlanError
from poprun.plan.counts import legal_instances
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import MachineFacts, MpiKind, MpiRuntime
from poprun.text.ranges import fold_numbers


def advise(plan: LaunchPlan, facts: MachineFacts) -> tuple[str, ...]:
    """The lines of advice for ``plan``, the weightiest first; none when there is nothing to say."""
    return tuple(_lines(plan, facts))


def advise_of_words(left_out: Sequence[str], mpi: MpiRuntime | None) -> str | None:
    """What to know about words that the job's MPI launcher, or none, cannot be told; None without such words."""
    if not left_out:
        return None
    words = shlex.join(left_out)
    if mpi is None:
        return f"{words}: left out, there is no MPI launcher that could be told; -x and --tag-output work without"
    if mpi.kind is MpiKind.OPEN_MPI:
        return f"{words}: left out, one launcher starts all instances; -x works for one of them"
    return f"{words}: left out, these are words for Open MPI and MPICH starts the job; -x and --tag-output work"


def advise_of_hosts(plan: LaunchPlan) -> str | None:
    """What to know about hosts that nobody has looked at; None for a job of one host."""
    if len(plan.hosts) == 1:
        return None
    here = _gpus(plan.devices) if plan.devices else f"cores {fold_numbers(plan.cores)}"
    return f"planned as if each of the {len(plan.hosts):,} hosts had what this machine has: {here}"


def _lines(plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    if facts.gpus and not plan.devices:
        yield _not_enough_gpus(plan, facts)
    busy = [gpu.name for gpu in facts.gpus if gpu.name in plan.devices and gpu.occupants]
    if busy and plan.vipu.shares_devices:
        yield f"another process holds memory on {_gpus(busy)}, and the job shares it"
    if not plan.devices and plan.num_instances_per_host * max(1, _threads(plan, facts)) > len(plan.cores):
        yield _too_many_threads(plan, _threads(plan, facts))
    else:
        yield from _crowded(plan, _threads(plan, facts))
    yield from _idle_devices(plan, facts) if plan.devices else _idle_cores(plan, facts)


def _not_enough_gpus(plan: LaunchPlan, facts: MachineFacts) -> str:
    needed, found = plan.num_slots_per_host, len(facts.gpus)
    possible = _largest(plan, found // plan.ipus_per_replica)
    cure = f"; --num-instances {possible} fits the GPUs" if possible else ""
    return (
        f"{_count(needed, 'virtual IPU')}{_per_host(plan)} need as many GPUs, and there {_is(found, 'GPU')}: "
        f"computing on the CPU{cure}"
    )


def _too_many_threads(plan: LaunchPlan, threads: int) -> str:
    instances = _count(plan.num_instances_per_host, "instance") + _per_host(plan)
    threads_each = f" with {threads} threads each" if threads > 1 else ""
    fitting = max(1, len(plan.cores) // plan.num_instances_per_host)
    cure = f"; --threads-per-replica {fitting} fits" if threads > fitting else ""
    return f"{instances}{threads_each} share {_count(len(plan.cores), 'core')}: they slow each other down{cure}"


def _crowded(plan: LaunchPlan, threads: int) -> Iterator[str]:
    """Say so when instances that are bound to the same cores have more threads than those."""
    for binding in plan.bindings:
        count, num_cores = len(binding.instances), len(binding.cores)
        if count * threads > num_cores:
            instances = f"{_count(count, 'instance')}{_per_host(plan)} with {_count(threads, 'thread')} each"
            yield (
                f"{instances} {'is' if count == 1 else 'are'} bound to the {_count(num_cores, 'core')} near "
                f"{'its' if count == 1 else 'their'} GPUs: --process-placement disabled lets them use all "
                f"{len(plan.cores)}, --threads-per-replica {max(1, num_cores // count)} fits"
            )
            return


def _idle_devices(plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    """Say so when replicas take turns on some GPUs while other free ones have nothing to do."""
    num_usable = sum(gpu.is_free or gpu.name in plan.devices for gpu in facts.gpus)
    better = _largest(plan, num_usable // plan.ipus_per_replica)
    if better > plan.num_instances:
        used = better // len(plan.hosts) * plan.ipus_per_replica
        yield _take_turns(plan, better, busy=len(plan.devices), used=used, total=_count(num_usable, "GPU"))


def _idle_cores(plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    """Say so when replicas take turns on some cores while others have nothing to do."""
    threads = _threads(plan, facts)
    num_cores = len(plan.cores)
    if not threads or plan.num_instances_per_host * threads >= num_cores:
        return
    counts = legal_instances(plan.num_replicas, len(plan.hosts))
    enough = [count for count in counts if count // len(plan.hosts) * threads >= num_cores]
    better = min(enough, default=counts[-1])
    if better > plan.num_instances:
        busy = plan.num_instances_per_host * threads
        used = min(num_cores, better // len(plan.hosts) * threads)
        yield _take_turns(plan, better, busy=busy, used=used, total=_count(num_cores, "core"))


def _largest(plan: LaunchPlan, num_per_host: int) -> int:
    """The most instances that divide the replicas of ``plan``, at most ``num_per_host`` a host; 0 when none do."""
    counts = legal_instances(plan.num_replicas, len(plan.hosts))
    return max((count for count in counts if count <= num_per_host * len(plan.hosts)), default=0)


def _take_turns(plan: LaunchPlan, better: int, *, busy: int, used: int, total: str) -> str:
    """Name ``better`` as the number of instances that would use ``used`` instead of ``busy`` of the ``total``."""
    replicas = f"the {plan.layout.num_local_replicas} replicas of each instance"
    gain = "all of them" if total.startswith(f"{used:,} ") else str(used)
    return f"{replicas} take turns on {busy} of {total}{_per_host(plan)}; --num-instances {better} uses {gain}"


def _per_host(plan: LaunchPlan) -> str:
    return " per host" if len(plan.hosts) > 1 else ""


def _threads(plan: LaunchPlan, facts: MachineFacts) -> int:
    """Threads of a replica's arithmetic; 0 when the user set ``OMP_NUM_THREADS`` to no number."""
    text = facts.user_num_threads or ""
    return plan.threads_per_replica or (int(text) if text.isdecimal() else 0)


def _gpus(names: tuple[str, ...] | list[str]) -> str:
    return f"GPU{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _is(count: int, noun: str) -> str:
    return f"{'is' if count == 1 else 'are'} {_count(count, noun)}"


def check_fitness(plan: LaunchPlan, facts: MachineFacts, source: str) -> tuple[str, ...]:
    """See that the GPUs and the cores that ``plan`` names are here.

    Args:
        plan: What is to be started.
        facts: What is known of the machine.
        source: Name of the file that states the plan, for messages.

    Returns:
        What differs and can be lived with, a line for each thing.

    Raises:
        PlanError: If a GPU is not here, or an instance is to be bound to a core that is not.
    """
    found = {gpu.name for gpu in facts.gpus}
    missing = [name for name in plan.devices if name not in found]
    if missing:
        raise PlanError(
            f"{source}: devices names {_counted('GPU', ', '.join(missing), len(missing))}, and "
            f"{_gpus_of(facts)}: {_cure(source)}"
        )
    here = {cpu.number for cpu in facts.cpus} or set(facts.cores)
    bound = {core for binding in plan.bindings for core in binding.cores}
    if not bound <= here:
        raise PlanError(
            f"{source}: bindings names {_cores(bound - here)}, and this process may use {_cores(here)}: "
            f"{_cure(source)}, or leave bindings empty to bind none"
        )
    return tuple(_differences(plan, facts, source))


def _differences(plan: LaunchPlan, facts: MachineFacts, source: str) -> Iterator[str]:
    if len(plan.cores) > len(facts.cores):
        threads = plan.threads_per_replica
        kept = f"; the {threads} threads of each replica stay as planned" if threads else ""
        yield (
            f"{source} counts on {len(plan.cores)} cores, and there {'is' if len(facts.cores) == 1 else 'are'} "
            f"{len(facts.cores)} here: the instances slow each other down{kept}"
        )


def _cure(source: str) -> str:
    return f"make a new plan here with --dry-run --topology-format json instead of {source}"


def _gpus_of(facts: MachineFacts) -> str:
    names = [gpu.name for gpu in facts.gpus]
    return f"this machine has {_counted('GPU', ', '.join(names), len(names))}" if names else "no GPU is found here"


def _cores(numbers: set[int]) -> str:
    return _counted("core", fold_numbers(sorted(numbers)), len(numbers))


def _counted(noun: str, names: str, count: int) -> str:
    return f"{noun}{'' if count == 1 else 's'} {names}"


_OF_PARTITIONS: Final = ("vipu-partition-attempts", "update-partition", "reset-partition", "remove-partition")
_OF_LEASES: Final = ("wait-for-devices", "vipu-server-timeout")
_OF_PODS: Final = ("vipu-allocation", "vipu-cluster")
_ALL: Final = (
    "vipu-partition",
    "vipu-server-host",
    "vipu-server-port",
    "pool",
    "share-devices",
    *_OF_PARTITIONS,
    *_OF_LEASES,
    *_OF_PODS,
)


def idle_vipu_options(plan: LaunchPlan) -> Mapping[str, str]:
    """The options that change nothing in ``plan``, with the reason, whether or not they were given."""
    vipu = plan.vipu
    if vipu.is_offline:
        return dict.fromkeys(_ALL, "--offline-mode takes no virtual IPUs")
    found = {}
    if not plan.devices:
        found["share-devices"] = "the job uses no GPUs"
    if not plan.asks_server and _is_one_allocation(vipu.pod):
        word = (
            f"{vipu.pod or 'this machine'} is one allocation, whatever it is called; a pod's YAML file has several"
        )
        found |= dict.fromkeys(_OF_PODS, word)
    if vipu.partition is None:
        found |= dict.fromkeys(_OF_PARTITIONS, "the job names no --vipu-partition")
    if plan.asks_server:
        found["pool"] = f"the virtual IPUs come from the server at {vipu.server_host}"
    elif not (plan.takes_lease or plan.owns_cores):
        word = (
            "the job takes nothing from the pool: nobody has counted the virtual IPUs of a CPU (--ipus-per-host)"
        )
        found |= dict.fromkeys(_OF_LEASES, word)
    return found


def _is_one_allocation(pod: str | None) -> bool:
    """Whether this machine, or the pod that is planned for, has no parts; only a pod's YAML file knows some."""
    if pod is None:
        return True
    from poprun.plan.pods import named_pod  # noqa: PLC0415 - most jobs know no pod

    return named_pod(pod) is not None
