"""The virtual IPUs that there are, which of the free ones a job is given, and the IPU-Link domains that it spans.

Pure. A virtual IPU is a CUDA device, a share of a host's cores, or a place of a described pod. Those that reach
each other fastest are an IPU-Link domain: what is handed out together lies in one, or fills several. An instance
lies in one domain, because its IPUs exchange what they compute; so each domain has at least one instance, and all
have equally many. The names are Graphcore's: https://docs.graphcore.ai/projects/vipu-user.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

from poprun.errors import PlanError
from poprun.plan.topology import Gpu, Occupant

IPUS_PER_MACHINE: Final = 4
"""IPUs of an IPU-Machine."""

MAX_DOMAIN_SIZE: Final = 64
"""IPUs that IPU-Links connect at most: those of a POD64."""

CPU: Final = "cpu"
CORE: Final = "core"
POD: Final = "pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualIpu:
    """A virtual IPU of a cluster.

    Attributes:
        index: Its number in the cluster.
        name: What it is called by all users of the machine: a GPU's UUID, ``cpu/3``, ``POD64/3``.
        domain: Number of its IPU-Link domain.
        device: What ``CUDA_VISIBLE_DEVICES`` calls it; empty when it is no CUDA device.
        occupants: Processes that hold memory on it.
    """

    index: int
    name: str
    domain: int = 0
    device: str = ""
    occupants: tuple[Occupant, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.device}" if self.device else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Virtual IPUs that are handed out together.

    Attributes:
        name: Such as ``POD64``, or the machine's own name.
        kind: ``gpu``, ``cpu`` or ``pod``; or ``core``, for the cores that instances have to themselves.
        ipus: All of them, by index.
        is_open: Whether further ones can be made: shares of a CPU nobody has counted.
        memory_bytes: Memory of each, where it is known.
        allocations: Parts of the cluster by name, as indices of their IPUs.
        hosts: The hosts that it belongs to; empty for this machine.
    """

    name: str
    kind: str
    ipus: tuple[VirtualIpu, ...]
    is_open: bool = False
    memory_bytes: int | None = None
    allocations: Mapping[str, range] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()

    @property
    def domain_size(self) -> int:
        """IPUs of an IPU-Link domain, the largest if they differ; 1 in a cluster without IPUs."""
        sizes: dict[int, int] = {}
        for ipu in self.ipus:
            sizes[ipu.domain] = sizes.get(ipu.domain, 0) + 1
        return max(sizes.values(), default=1)

    @property
    def num_domains(self) -> int:
        """IPU-Link domains in the cluster."""
        return len({ipu.domain for ipu in self.ipus})

    def part(self, allocation: str | None) -> tuple[VirtualIpu, ...]:
        """The IPUs of one allocation; None is all of them.

        Raises:
            KeyError: If there is no such allocation.
        """
        if allocation is None:
            return self.ipus
        indices = self.allocations[allocation]
        return tuple(ipu for ipu in self.ipus if ipu.index in indices)

    def pick(
        self, num_ipus: int, allocation: str | None = None
    ) -> Callable[[Collection[str]], tuple[VirtualIpu, ...]]:
        """How to take ``num_ipus`` of this cluster, once it is known which names are taken."""

        def choose(taken: Collection[str]) -> tuple[VirtualIpu, ...]:
            if self.is_open:
                return tuple(islice((ipu for ipu in cpu_slots() if ipu.name not in taken), num_ipus))
            return choose_ipus(
                [ipu for ipu in self.part(allocation) if ipu.name not in taken], num_ipus, self.domain_size
            )

        return choose


def gpu_cluster(name: str, gpus: Sequence[Gpu]) -> Cluster:
    """The CUDA devices of the machine ``name`` as one IPU-Link domain."""
    ipus = (
        VirtualIpu(index=index, name=gpu.uuid or gpu.name, device=gpu.name, occupants=gpu.occupants)
        for index, gpu in enumerate(gpus)
    )
    return Cluster(name=name, kind="gpu", ipus=tuple(ipus))


def cpu_slots() -> Iterator[VirtualIpu]:
    """Shares of a machine's cores: as many as somebody takes, in one domain."""
    return (VirtualIpu(index=index, name=f"{CPU}/{index}") for index in count())


def cpu_cluster(name: str, num_ipus: int | None, num_shown: int = 0) -> Cluster:
    """The CPU slots of a machine.

    Args:
        name: The machine's.
        num_ipus: How many there are; None for as many as somebody takes.
        num_shown: How many to list when nobody has counted them.
    """
    ipus = tuple(islice(cpu_slots(), num_shown if num_ipus is None else num_ipus))
    return Cluster(name=name, kind=CPU, ipus=ipus, is_open=num_ipus is None)


def choose_ipus(free: Iterable[VirtualIpu], num_ipus: int, domain_size: int) -> tuple[VirtualIpu, ...]:
    """The ``num_ipus`` of the ``free`` IPUs to hand out, by index; nothing when they do not suffice.

    They lie in one IPU-Link domain, the fullest one that has room, and there in a block that begins at a multiple
    of its size where there is one, so that what remains stays together. More than a domain holds fills whole ones.
    """
    domains: dict[int, list[VirtualIpu]] = {}
    for ipu in sorted(free, key=lambda ipu: ipu.index):
        domains.setdefault(ipu.domain, []).append(ipu)
    if num_ipus <= domain_size:
        roomy = [ipus for ipus in domains.values() if len(ipus) >= num_ipus]
        return _within(min(roomy, key=len), num_ipus) if roomy else ()
    whole = [ipu for ipus in domains.values() if len(ipus) == domain_size for ipu in ipus]
    return tuple(whole[:num_ipus]) if len(whole) >= num_ipus else ()


def size_of_partition(num_ipus: int) -> int:
    """The smallest size of a partition that holds ``num_ipus``: partitions are powers of two."""
    return 1 << max(0, num_ipus - 1).bit_length()


def _within(ipus: list[VirtualIpu], num_ipus: int) -> tuple[VirtualIpu, ...]:
    """A block of neighbours that begins at a multiple of its size; else the first ones."""
    size = size_of_partition(num_ipus)
    there = {ipu.index: ipu for ipu in ipus}
    for first in there:
        block = range(first, first + num_ipus)
        if first % size == 0 and all(index in there for index in block):
            return tuple(there[index] for index in block)
    return tuple(ipus[:num_ipus])


def num_ilds(asked: int | None, pod: Cluster | None, *, num_instances: int, ipus_per_replica: int) -> int | None:
    """The IPU-Link domains of a job; None where nobody has asked for any and there is no pod that has some.

    Args:
        asked: ``--num-ilds``, or None.
        pod: The pod that is planned for, or None.
        num_instances: Processes in the job.
        ipus_per_replica: IPUs that each of them holds.

    Raises:
        PlanError: If the job does not fit into the pod, or its instances not evenly into the domains.
    """
    needed = None if pod is None else _needed(pod, num_instances, ipus_per_replica)
    if asked is not None and needed is not None and asked < needed:
        raise PlanError(
            f"--num-ilds {asked} is too few: {num_instances} instances of {ipus_per_replica} IPUs fill {needed} "
            f"IPU-Link domains of {pod.domain_size if pod else 0}; give --num-ilds {needed}, or leave it out"
        )
    number = asked or needed
    if number is not None and num_instances % number:
        fewer = num_instances // number * number
        raise PlanError(
            f"--num-instances {num_instances} does not divide over {number} IPU-Link domains: each holds the same "
            f"number; nearest: {f'{fewer} or ' if fewer else ''}{fewer + number} instances"
        )
    return number


def _needed(pod: Cluster, num_instances: int, ipus_per_replica: int) -> int:
    size, num_ipus = pod.domain_size, num_instances * ipus_per_replica
    if num_ipus > len(pod.ipus):
        raise PlanError(
            f"--pod {pod.name} has {len(pod.ipus):,} IPUs, and {num_instances:,} instances of {ipus_per_replica} "
            f"use {num_ipus:,}: give fewer instances, whose replicas then take turns, or a larger pod"
        )
    if ipus_per_replica > size:
        raise PlanError(
            f"--ipus-per-replica {ipus_per_replica}: a replica lies in one IPU-Link domain, and those of "
            f"{pod.name} have {size} IPUs"
        )
    return -(-num_instances // (size // ipus_per_replica))
