"""What a picture shows of a plan. Up to ``MAX_IPUS`` virtual IPUs are all shown; a larger plan is folded.

Folded means: of many things that are alike the first ones and the last are shown, and a gap stands for the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.plan.plan import InstancePlan, LaunchPlan

MAX_IPUS: Final = 1024
"""Virtual IPUs up to which nothing is folded."""

FOLDED_IPUS: Final = 256
"""Virtual IPUs that a folded picture shows of a plan, of a host, and of an instance."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Things that are left out: their indices."""

    items: range


@dataclass(frozen=True, slots=True)
class InstanceScene:
    """An instance, with the virtual IPUs of it that are shown."""

    plan: InstancePlan
    slots: tuple[int | Gap, ...]


@dataclass(frozen=True, slots=True)
class HostScene:
    """A host, with the instances of it that are shown."""

    index: int
    name: str
    instances: tuple[InstanceScene | Gap, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """A plan, with the hosts of it that are shown."""

    plan: LaunchPlan
    hosts: tuple[HostScene | Gap, ...]

    @property
    def num_ipus(self) -> int:
        """Virtual IPUs that are shown, a gap being one."""
        first = next(host for host in self.hosts if isinstance(host, HostScene))
        instance = next(it for it in first.instances if isinstance(it, InstanceScene))
        return len(self.hosts) * len(first.instances) * len(instance.slots)


def make_scene(plan: LaunchPlan, *, max_ipus: int = MAX_IPUS, folded_ipus: int = FOLDED_IPUS) -> Scene:
    """What to show of ``plan``: about ``folded_ipus`` virtual IPUs of more than ``max_ipus``, else all."""
    num_ipus = len(plan.hosts) * plan.num_slots_per_host
    budget = folded_ipus if num_ipus > max_ipus else num_ipus
    hosts = shown(range(len(plan.hosts)), budget // plan.num_slots_per_host)
    return Scene(plan, tuple(it if isinstance(it, Gap) else _host(plan, it, budget) for it in hosts))


def shown(items: range, most: int) -> Sequence[int | Gap]:
    """``items`` if they are no more than ``most``, or 3; else the first ones, a gap, and the last."""
    most = max(3, most)
    if len(items) <= most:
        return items
    return [*items[: most - 2], Gap(items[most - 2 : -1]), items[-1]]


def _host(plan: LaunchPlan, index: int, budget: int) -> HostScene:
    count = plan.num_instances_per_host
    instances = shown(range(index * count, (index + 1) * count), budget // plan.ipus_per_replica)
    return HostScene(
        index,
        plan.hosts[index],
        tuple(it if isinstance(it, Gap) else _instance(plan, it, budget) for it in instances),
    )


def _instance(plan: LaunchPlan, index: int, budget: int) -> InstanceScene:
    instance = plan.instance(index)
    return InstanceScene(instance, tuple(shown(instance.slots, budget)))
