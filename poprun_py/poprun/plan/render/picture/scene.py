"""The choice of the parts of a plan that a picture shows, and of the parts that it draws in one frame.

In a folded picture, a gap stands for many equal hosts, instances or virtual IPUs, of which the first ones and the
last are drawn. A frame is drawn around whole hosts or instances, and never in a folded picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.plan.plan import LaunchPlan
from poprun.plan.render.words import instances_of_host

MAX_IPUS: Final = 1024  # virtual IPUs up to which nothing is folded
FOLDED_IPUS: Final = 256  # virtual IPUs that a folded picture shows of a plan, of a host, and of an instance
Shown = Sequence[int | range]
"""The indices of the hosts, instances or virtual IPUs to draw. A range among the indices is a gap, which stands
for all its members. The first is no gap."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A plan, and the number of its virtual IPUs to draw, which decides how many hosts and instances are drawn."""

    plan: LaunchPlan
    max_ipus: int  # about how many virtual IPUs are shown

    @property
    def hosts(self) -> Shown:
        """The indices of the hosts to draw; a range stands for hosts that are not drawn."""
        return _shown(range(len(self.plan.hosts)), self.max_ipus // self.plan.num_ipus_per_host)

    def instances(self, host: int) -> Shown:
        """Return the indices of the instances to draw on ``host``; a range stands for instances that are not
        drawn.
        """
        return _shown(instances_of_host(self.plan, host), self.max_ipus // self.plan.num_ipus_per_instance)

    def ipus(self, instance: int) -> Shown:
        """Return the virtual IPUs to draw in ``instance``; a range stands for virtual IPUs that are not drawn."""
        return _shown(self.plan.instance(instance).ipus, self.max_ipus)

    @property
    def num_ipus(self) -> int:
        """The number of virtual IPUs in the picture; a gap, which stands for several, counts as one."""
        return len(self.hosts) * len(self.instances(0)) * len(self.ipus(0))

    @property
    def is_folded(self) -> bool:
        """Whether the picture leaves out some hosts, instances or virtual IPUs."""
        return any(isinstance(part, range) for part in (*self.hosts, *self.instances(0), *self.ipus(0)))


def make_scene(plan: LaunchPlan, *, max_ipus: int = MAX_IPUS, folded_ipus: int = FOLDED_IPUS) -> Scene:
    """Return what to draw: all virtual IPUs of ``plan``; if they are over ``max_ipus``, about ``folded_ipus``."""
    num_ipus = plan.num_replicas * plan.ipus_per_replica
    return Scene(plan, folded_ipus if num_ipus > max_ipus else num_ipus)


def _shown(items: range, most: int) -> Shown:
    """Return the items (hosts, instances or virtual IPUs) to draw: all if there are at most ``most`` items;
    otherwise the first items, one range that stands for the items left out, and the last item.
    """
    most = max(3, most)
    return items if len(items) <= most else [*items[: most - 2], items[most - 2 : -1], items[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """The numbers of hosts, domains and instances that each frame in the picture encloses; 1 means no frame."""

    hosts_per_domain: int = 1  # hosts in the frame of an IPU-Link domain
    domains_per_host: int = 1  # frames of IPU-Link domains in each host
    instances_per_machine: int = 1  # instances in the frame of an IPU-Machine
    has_machines: bool = False  # whether the virtual IPUs of an instance are whole IPU-Machines, and drawn so
    is_shaded: bool = False  # whether virtual IPUs of odd IPU-Link domains are darker, for want of a frame

    @property
    def has_domains(self) -> bool:
        """Whether frames are drawn around IPU-Link domains."""
        return self.hosts_per_domain > 1 or self.domains_per_host > 1


def framing(scene: Scene) -> Framing:
    """Return which frames to draw in ``scene``: frames of IPU-Link domains around hosts or instances, and frames
    of IPU-Machines around instances.
    """
    plan = scene.plan
    num_hosts, num_domains = len(plan.hosts), plan.num_ilds
    if scene.is_folded or (num_hosts % num_domains and num_domains % num_hosts):
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
