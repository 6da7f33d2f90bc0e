"""What a picture tells of one thing when somebody points at it: a few lines of text."""

from typing import Final

from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.render.words import bound_to, counted, domains_of, numbered, stands_for
from poprun.text.host_names import fold_hosts

MAX_LENGTH: Final = 60
"""Characters of a list of hosts; a longer one is cut."""


def of_host(plan: LaunchPlan, index: int) -> str:
    """Everything that runs on host ``index``."""
    count = plan.num_instances_per_host
    instances = range(index * count, (index + 1) * count)
    return "\n".join(
        [
            f"host {plan.hosts[index]}",
            f"host {index} of {counted(len(plan.hosts), 'host')}",
            numbered("instance", instances),
            numbered("replica", _replicas(plan, instances)),
            f"{numbered('virtual IPU', range(plan.num_slots_per_host))}",
            *filter(None, [domains_of(plan, instances)]),
        ]
    )


def of_instance(plan: LaunchPlan, instance: InstancePlan) -> str:
    """What instance ``instance`` is, owns, and computes on."""
    replicas = numbered("replica", instance.replicas)
    return "\n".join(
        [
            f"instance {instance.index}",
            f"on host {instance.host}, number {instance.local_index} there",
            replicas if len(instance.replicas) == 1 else f"{replicas}, which take turns",
            f"{numbered('virtual IPU', instance.slots)}: {stands_for(instance)}",
            *filter(None, [domains_of(plan, range(instance.index, instance.index + 1))]),
            *([] if instance.binding is None else [f"bound to {bound_to(instance.binding)}"]),
        ]
    )


def of_instances(plan: LaunchPlan, instances: range) -> str:
    """What is left out of a host."""
    return "\n".join(
        [
            f"{counted(len(instances), 'more instance')}, each like its neighbours",
            numbered("instance", instances),
            numbered("replica", _replicas(plan, instances)),
        ]
    )


def of_hosts(plan: LaunchPlan, hosts: range) -> str:
    """What is left out of a plan."""
    count = plan.num_instances_per_host
    return "\n".join(
        [
            f"{counted(len(hosts), 'more host')}, each like its neighbours",
            _abbreviated(fold_hosts(plan.hosts[hosts.start : hosts.stop])),
            of_instances(plan, range(hosts.start * count, hosts.stop * count)).partition("\n")[2],
        ]
    )


def _replicas(plan: LaunchPlan, instances: range) -> range:
    local = plan.layout.num_local_replicas
    return range(instances.start * local, instances.stop * local)


def _abbreviated(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"
