"""Whether a plan that was made elsewhere, or earlier, fits the machine that is to carry it out. Pure."""

from collections.abc import Iterator

from poprun.errors import PlanError
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import MachineFacts
from poprun.text.ranges import fold_numbers


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
