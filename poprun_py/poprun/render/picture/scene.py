"""What a picture shows of a plan, and what it draws in a frame together.

Folded means: of many things that are alike the first ones and the last are shown, and a gap stands for the others.

A frame is drawn around whole hosts or whole instances. Where a domain is a part of one and of another, its IPUs
are shaded instead; and nothing is framed in a folded picture, which shows few of many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How many of each stand in a frame; 1 is no frame.

    Attributes:
        hosts_per_domain: Hosts in the frame of an IPU-Link domain.
        domains_per_host: Frames of IPU-Link domains in each host.
        instances_per_machine: Instances in the frame of an IPU-Machine.
        has_machines: Whether the virtual IPUs of an instance are whole IPU-Machines, and drawn so.
        is_shaded: Whether virtual IPUs of odd IPU-Link domains are darker, for want of a frame.
    """

    hosts_per_domain: int = 1
    domains_per_host: int = 1
    instances_per_machine: int = 1
    has_machines: bool = False
    is_shaded: bool = False

    @property
    def has_domains(self) -> bool:
        """Whether IPU-Link domains have frames."""
        return self.hosts_per_domain > 1 or self.domains_per_host > 1


def framing(scene: Scene) -> Framing:
    """The frames of ``scene``."""
    plan = scene.plan
    is_folded = any(isinstance(host, Gap) or _is_folded(host) for host in scene.hosts)
    num_hosts, num_domains = len(plan.hosts), plan.num_ilds
    is_one_each = num_hosts == num_domains
    if is_folded or (num_hosts % num_domains and num_domains % num_hosts):
        return Framing(is_shaded=num_domains > 1 and not is_one_each)
    domains_per_host = max(1, num_domains // num_hosts)
    per_machine = _instances_per_machine(plan, plan.num_instances_per_host // domains_per_host)
    return Framing(
        hosts_per_domain=max(1, num_hosts // num_domains) if num_domains > 1 else 1,
        domains_per_host=domains_per_host,
        instances_per_machine=per_machine,
        has_machines=plan.vipu.pod is not None and not plan.ipus_per_replica % IPUS_PER_MACHINE,
    )


def _is_folded(host: HostScene) -> bool:
    return any(
        isinstance(instance, Gap) or any(isinstance(slot, Gap) for slot in instance.slots)
        for instance in host.instances
    )


def _instances_per_machine(plan: LaunchPlan, per_group: int) -> int:
    """Instances that share an IPU-Machine, where each machine of a group holds equally many."""
    number, rest = divmod(IPUS_PER_MACHINE, plan.ipus_per_replica)
    is_whole = plan.vipu.pod is not None and not rest and not per_group % max(1, number)
    return max(1, number) if is_whole else 1
