"""What a picture shows of a plan, and what it draws in a frame together.

Folded means: of many things that are alike the first ones and the last are shown, and a gap stands for the others.
A frame is drawn around whole hosts or instances, and never in a folded picture, which shows few of many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.render.words import instances_of_host

MAX_IPUS: Final = 1024  # virtual IPUs up to which nothing is folded
FOLDED_IPUS: Final = 256  # virtual IPUs that a folded picture shows of a plan, of a host, and of an instance


@dataclass(frozen=True, slots=True)
class Gap:
    """Neighbouring things that are left out, by their indices."""

    items: range


@dataclass(frozen=True, slots=True)
class InstanceScene:
    """An instance, with the virtual IPUs of it that are shown."""

    plan: InstancePlan
    ipus: tuple[int | Gap, ...]


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
    def first_host(self) -> HostScene:
        """The first host, which is always shown; all others are as large."""
        return next(host for host in self.hosts if isinstance(host, HostScene))

    @property
    def first_instance(self) -> InstanceScene:
        """The first instance, which is always shown; all others are as large."""
        return next(part for part in self.first_host.instances if isinstance(part, InstanceScene))

    @property
    def num_ipus(self) -> int:
        """Virtual IPUs that are shown, a gap being one."""
        return len(self.hosts) * len(self.first_host.instances) * len(self.first_instance.ipus)


def make_scene(plan: LaunchPlan, *, max_ipus: int = MAX_IPUS, folded_ipus: int = FOLDED_IPUS) -> Scene:
    """What to show of ``plan``: about ``folded_ipus`` virtual IPUs of more than ``max_ipus``, else all."""
    num_ipus = plan.num_replicas * plan.ipus_per_replica
    budget = folded_ipus if num_ipus > max_ipus else num_ipus

    def host_scene(index: int) -> HostScene:
        shown = _shown(instances_of_host(plan, index), budget // plan.num_ipus_per_instance)
        instances = tuple(part if isinstance(part, Gap) else instance_scene(part) for part in shown)
        return HostScene(index, plan.hosts[index], instances)

    def instance_scene(index: int) -> InstanceScene:
        instance = plan.instance(index)
        return InstanceScene(instance, tuple(_shown(instance.ipus, budget)))

    hosts = _shown(range(len(plan.hosts)), budget // plan.num_ipus_per_host)
    return Scene(plan, tuple(part if isinstance(part, Gap) else host_scene(part) for part in hosts))


def _shown(items: range, most: int) -> Sequence[int | Gap]:
    """``items`` if they are no more than ``most``, or 3; else the first ones, a gap, and the last."""
    most = max(3, most)
    if len(items) <= most:
        return items
    return [*items[: most - 2], Gap(items[most - 2 : -1]), items[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """What the frames of a picture hold: how many of each; 1 is no frame."""

    hosts_per_domain: int = 1  # hosts in the frame of an IPU-Link domain
    domains_per_host: int = 1  # frames of IPU-Link domains in each host
    instances_per_machine: int = 1  # instances in the frame of an IPU-Machine
    has_machines: bool = False  # whether the virtual IPUs of an instance are whole IPU-Machines, and drawn so
    is_shaded: bool = False  # whether virtual IPUs of odd IPU-Link domains are darker, for want of a frame

    @property
    def has_domains(self) -> bool:
        """Whether IPU-Link domains have frames."""
        return self.hosts_per_domain > 1 or self.domains_per_host > 1


def framing(scene: Scene) -> Framing:
    """The frames of ``scene``."""
    plan = scene.plan
    num_hosts, num_domains = len(plan.hosts), plan.num_ilds
    if _is_folded(scene) or (num_hosts % num_domains and num_domains % num_hosts):
        return Framing(is_shaded=num_domains not in (1, num_hosts))
    domains_per_host = max(1, num_domains // num_hosts)
    per_machine, rest = divmod(IPUS_PER_MACHINE, plan.num_ipus_per_instance)
    fits = not rest and not plan.num_instances_per_host // domains_per_host % per_machine
    has_pod = plan.vipu.pod is not None
    return Framing(
        hosts_per_domain=max(1, num_hosts // num_domains) if num_domains > 1 else 1,
        domains_per_host=domains_per_host,
        instances_per_machine=per_machine if has_pod and fits else 1,
        has_machines=has_pod and not plan.num_ipus_per_instance % IPUS_PER_MACHINE,
    )


def _is_folded(scene: Scene) -> bool:
    hosts = [host for host in scene.hosts if isinstance(host, HostScene)]
    instances = [instance for host in hosts for instance in host.instances]
    ipus = [ipu for instance in instances if isinstance(instance, InstanceScene) for ipu in instance.ipus]
    return any(isinstance(part, Gap) for part in (*scene.hosts, *instances, *ipus))
