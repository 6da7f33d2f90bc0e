"""Which things of a plan are drawn in a frame together: an IPU-Link domain, and an IPU-Machine of a pod.

A frame is drawn around whole hosts or whole instances. Where a domain is a part of one and of another, its IPUs
are shaded instead; and nothing is framed in a folded picture, which shows few of many.
"""

from dataclasses import dataclass

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.plan.plan import LaunchPlan
from poprun.render.picture.scene import Gap, HostScene, Scene


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
