"""The virtual IPUs that there are, and which of the free ones a job is given.

Pure. A virtual IPU is a device, a share of a host's cores, or a place of a described pod. Those that reach
each other fastest are an IPU-Link domain: what is handed out together lies in one, or equally in several. The
names are Graphcore's: https://docs.graphcore.ai/projects/vipu-user.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

from poprun.plan.topology import Gpu, Occupant

IPUS_PER_MACHINE: Final = 4  # IPUs of an IPU-Machine
MAX_DOMAIN_SIZE: Final = 64  # IPUs that IPU-Links connect at most: those of a POD64
CPU: Final = "cpu"
GPU: Final = "gpu"
CORE: Final = "core"
POD: Final = "pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualIpu:
    """A virtual IPU of a cluster."""

    index: int
    name: str  # what it is called by all users of the machine: a GPU's UUID, ``cpu/3``, ``POD64/3``
    domain: int = 0  # number of its IPU-Link domain
    device: str = ""  # what its maker's mask calls it; empty when it is no device
    occupants: tuple[Occupant, ...] = ()  # processes that hold memory on it

    def __str__(self) -> str:
        return f"GPU {self.device}" if self.device else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Virtual IPUs that are handed out together."""

    name: str  # such as ``POD64``, or the machine's own name
    kind: str  # ``gpu``, ``cpu`` or ``pod``; or ``core``, for the cores that instances have to themselves
    ipus: tuple[VirtualIpu, ...]  # all of them, by index
    is_open: bool = False  # whether further ones can be made: shares of a CPU nobody has counted
    memory_bytes: int | None = None  # memory of each, where it is known
    # parts of the cluster by name, as indices of their IPUs
    allocations: Mapping[str, range] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()  # the hosts that it belongs to; empty for this machine

    @property
    def domain_size(self) -> int:
        """IPUs of an IPU-Link domain, the largest if they differ; 1 in a cluster without IPUs."""
        return max(domain_sizes(self.ipus), default=1)

    @property
    def num_domains(self) -> int:
        """IPU-Link domains in the cluster."""
        return len(domain_sizes(self.ipus))

    def part(self, allocation: str | None) -> tuple[VirtualIpu, ...]:
        """The IPUs of one allocation, which must be there; None is all of them."""
        if allocation is None:
            return self.ipus
        indices = self.allocations[allocation]
        return tuple(ipu for ipu in self.ipus if ipu.index in indices)

    def pick(
        self, num_ipus: int, allocation: str | None = None, num_domains: int = 1
    ) -> Callable[[Collection[str]], tuple[VirtualIpu, ...]]:
        """How to take ``num_ipus`` of this cluster, once it is known which names are taken; see `choose_ipus`."""
        part = self.part(allocation)
        sizes = domain_sizes(part)

        def choose(taken: Collection[str]) -> tuple[VirtualIpu, ...]:
            if self.is_open:
                return tuple(islice((ipu for ipu in cpu_slots() if ipu.name not in taken), num_ipus))
            free = (ipu for ipu in part if ipu.name not in taken)
            return choose_ipus(free, num_ipus, max(sizes, default=1), min(num_domains, len(sizes)))

        return choose


def gpu_cluster(name: str, gpus: Sequence[Gpu]) -> Cluster:
    """The devices of the machine ``name`` as one IPU-Link domain."""
    ipus = (
        VirtualIpu(index=index, name=gpu.uuid or gpu.name, device=gpu.name, occupants=gpu.occupants)
        for index, gpu in enumerate(gpus)
    )
    return Cluster(name=name, kind=GPU, ipus=tuple(ipus))


def cpu_slots() -> Iterator[VirtualIpu]:
    """Shares of a machine's cores: as many as jobs take, in one domain."""
    return (VirtualIpu(index=index, name=f"{CPU}/{index}") for index in count())


def cpu_cluster(name: str, num_ipus: int | None, num_shown: int = 0) -> Cluster:
    """The machine's CPU slots: ``num_ipus``, or if None as many as jobs take, with ``num_shown`` listed."""
    ipus = tuple(islice(cpu_slots(), num_shown if num_ipus is None else num_ipus))
    return Cluster(name=name, kind=CPU, ipus=ipus, is_open=num_ipus is None)


def domain_sizes(ipus: Iterable[VirtualIpu]) -> list[int]:
    """How many of ``ipus`` each IPU-Link domain has that has any."""
    return list(Counter(ipu.domain for ipu in ipus).values())


def choose_ipus(
    free: Iterable[VirtualIpu], num_ipus: int, domain_size: int, num_domains: int = 1
) -> tuple[VirtualIpu, ...]:
    """The ``num_ipus`` of the ``free`` IPUs to hand out, equally many per domain; none if they do not suffice."""
    domains: dict[int, list[VirtualIpu]] = {}
    for ipu in sorted(free, key=lambda ipu: ipu.index):
        domains.setdefault(ipu.domain, []).append(ipu)
    num_domains = max(1, num_domains, -(-num_ipus // domain_size))
    num_each = -(-num_ipus // num_domains)
    # the fullest domains that have room, so that what remains stays together
    roomy = sorted((ipus for ipus in domains.values() if len(ipus) >= num_each), key=len)[:num_domains]
    if len(roomy) < num_domains:
        return ()
    in_order = sorted(roomy, key=lambda ipus: ipus[0].index)
    return tuple(ipu for ipus in in_order for ipu in _within(ipus, num_each))[:num_ipus]


def size_of_partition(num_ipus: int) -> int:
    """The smallest size of a partition that holds ``num_ipus``: partitions are powers of two."""
    return 1 << max(0, num_ipus - 1).bit_length()


def _within(ipus: list[VirtualIpu], num_ipus: int) -> tuple[VirtualIpu, ...]:
    """``num_ipus`` of ``ipus``: neighbours that begin at a multiple of their number, else the first ones."""
    size = size_of_partition(num_ipus)
    there = {ipu.index: ipu for ipu in ipus}
    for first in there:
        block = range(first, first + num_ipus)
        if first % size == 0 and all(index in there for index in block):
            return tuple(there[index] for index in block)
    return tuple(ipus[:num_ipus])
