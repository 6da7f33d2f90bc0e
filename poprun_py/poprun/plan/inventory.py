"""Clusters of virtual IPUs, and the choice of the free virtual IPUs that a job gets. Pure.

A virtual IPU is a device, a share of a host's cores, or a place in a pod that a file describes. The virtual IPUs
with the fastest connections form an IPU-Link domain. A job gets virtual IPUs from one domain, or the same number
from each of several domains. The names are Graphcore's: https://docs.graphcore.ai/projects/vipu-user.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

from poprun.plan.topology import Gpu, Occupant

IPUS_PER_MACHINE: Final = 4  # IPUs of an IPU-Machine
MAX_DOMAIN_SIZE: Final = 64  # largest number of IPUs that IPU-Links connect, as in a POD64
CPU: Final = "cpu"
GPU: Final = "gpu"
CORE: Final = "core"
POD: Final = "pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualIpu:
    """A virtual IPU, which stands for a GPU, for a part of a host's cores, or for an IPU of a described pod."""

    index: int
    name: str  # the same for all users of the machine: a GPU's UUID, ``cpu/3``, ``POD64/3``
    domain: int = 0  # number of the IPU-Link domain that contains the virtual IPU
    device: str = ""  # the GPU's name for programs, such as ``3``; empty if the virtual IPU is no GPU
    occupants: tuple[Occupant, ...] = ()  # processes that use the memory of the GPU

    def __str__(self) -> str:
        return f"GPU {self.device}" if self.device else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All virtual IPUs of one machine or of one pod; each job leases some or all of them until its end."""

    name: str  # such as ``POD64``, or the machine's own name
    kind: str  # ``gpu``, ``cpu`` or ``pod``; ``core`` for cores that only one job may use
    ipus: tuple[VirtualIpu, ...]  # all virtual IPUs, by index
    is_open: bool = False  # whether jobs can add IPUs: shares of a CPU without a limit
    memory_bytes: int | None = None  # memory of each IPU; None if it is not known
    # parts of the cluster by name, as indices of their IPUs
    allocations: Mapping[str, range] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()  # the hosts of the cluster; empty for this machine

    @property
    def domain_size(self) -> int:
        """The number of IPUs in the largest IPU-Link domain; 1 in a cluster without IPUs."""
        return max(domain_sizes(self.ipus), default=1)

    @property
    def num_domains(self) -> int:
        """The number of IPU-Link domains in the cluster."""
        return len(domain_sizes(self.ipus))

    def part(self, allocation: str | None) -> tuple[VirtualIpu, ...]:
        """Return the IPUs of the cluster's part called ``allocation``, which must exist; all IPUs for None."""
        if allocation is None:
            return self.ipus
        indices = self.allocations[allocation]
        return tuple(ipu for ipu in self.ipus if ipu.index in indices)

    def pick(
        self, num_ipus: int, allocation: str | None = None, num_domains: int = 1
    ) -> Callable[[Collection[str]], tuple[VirtualIpu, ...]]:
        """Return a function that chooses ``num_ipus`` free IPUs of ``allocation``, given the names of IPUs in use.

        See `choose_ipus` for the rules of the choice.
        """
        part = self.part(allocation)
        sizes = domain_sizes(part)

        def choose(taken: Collection[str]) -> tuple[VirtualIpu, ...]:
            if self.is_open:
                return tuple(islice((ipu for ipu in cpu_slots() if ipu.name not in taken), num_ipus))
            free = (ipu for ipu in part if ipu.name not in taken)
            return choose_ipus(free, num_ipus, max(sizes, default=1), min(num_domains, len(sizes)))

        return choose


def gpu_cluster(name: str, gpus: Sequence[Gpu]) -> Cluster:
    """Return the GPUs of the machine ``name`` as a cluster of virtual IPUs, all in one IPU-Link domain."""
    ipus = (
        VirtualIpu(index=index, name=gpu.uuid or gpu.name, device=gpu.name, occupants=gpu.occupants)
        for index, gpu in enumerate(gpus)
    )
    return Cluster(name=name, kind=GPU, ipus=tuple(ipus))


def cpu_slots() -> Iterator[VirtualIpu]:
    """Return an endless iterator over virtual IPUs that are parts of a CPU: jobs may ask for any number."""
    return (VirtualIpu(index=index, name=f"{CPU}/{index}") for index in count())


def cpu_cluster(name: str, num_ipus: int | None, num_shown: int = 0) -> Cluster:
    """Return a cluster of ``num_ipus`` parts of a CPU; for None, of ``num_shown`` parts, to which jobs may add
    more parts.
    """
    ipus = tuple(islice(cpu_slots(), num_shown if num_ipus is None else num_ipus))
    return Cluster(name=name, kind=CPU, ipus=ipus, is_open=num_ipus is None)


def domain_sizes(ipus: Iterable[VirtualIpu]) -> list[int]:
    """Return, for each IPU-Link domain (group of linked IPUs), how many of ``ipus`` are in the domain."""
    return list(Counter(ipu.domain for ipu in ipus).values())


def choose_ipus(
    free: Iterable[VirtualIpu], num_ipus: int, domain_size: int, num_domains: int = 1
) -> tuple[VirtualIpu, ...]:
    """Choose ``num_ipus`` IPUs in ``free``, the same number per IPU-Link domain; return () if too few are free."""
    domains: dict[int, list[VirtualIpu]] = {}
    for ipu in sorted(free, key=lambda ipu: ipu.index):
        domains.setdefault(ipu.domain, []).append(ipu)
    num_domains = max(1, num_domains, -(-num_ipus // domain_size))
    num_each = -(-num_ipus // num_domains)
    # choose the smallest domains with enough room, so that the other domains stay whole
    roomy = sorted((ipus for ipus in domains.values() if len(ipus) >= num_each), key=len)[:num_domains]
    if len(roomy) < num_domains:
        return ()
    in_order = sorted(roomy, key=lambda ipus: ipus[0].index)
    return tuple(ipu for ipus in in_order for ipu in _within(ipus, num_each))[:num_ipus]


def size_of_partition(num_ipus: int) -> int:
    """Return how large a partition (virtual IPUs set aside together) for ``num_ipus`` IPUs is: a power of two."""
    return 1 << max(0, num_ipus - 1).bit_length()


def _within(ipus: list[VirtualIpu], num_ipus: int) -> tuple[VirtualIpu, ...]:
    """Choose ``num_ipus`` consecutive IPUs, of which the first has an index that is a multiple of the partition's
    size; if there are no such IPUs, choose the first of ``ipus``.
    """
    size = size_of_partition(num_ipus)
    by_index = {ipu.index: ipu for ipu in ipus}
    for first in by_index:
        block = range(first, first + num_ipus)
        if first % size == 0 and all(index in by_index for index in block):
            return tuple(by_index[index] for index in block)
    return tuple(ipus[:num_ipus])
