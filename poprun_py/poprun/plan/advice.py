"""What a user should know about a plan that is legal and may still not be what they want: a line for each thing.

Pure: a plan and the facts it was made from in, text out.
"""

import shlex
from collections.abc import Iterator, Sequence

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
