"""Placement: the choice of the cores that each instance is bound to, by NUMA nodes and caches. Pure.

``spreadnuma`` gives each instance whole NUMA nodes, or gives several instances one node. ``core`` gives each
instance an equal part of the physical cores. ``compact`` gives each instance as many cores as it has threads, side
by side. A part is within one last-level cache, otherwise within one node, if this is possible for all parts. An
instance whose GPUs are near some nodes gets cores of these nodes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby

from popdist.ground.values import dataclass
from poprun.errors import PlanError
from poprun.plan.topology import Binding, Cpu, ProcessPlacement

_Part = tuple[Cpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMap:
    """The cores and NUMA nodes of a host that instances may use."""

    cpus: tuple[Cpu, ...]
    memory_nodes: tuple[int, ...]
    max_cores: int  # at most the number of cpus: a CPU quota may allow fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The needs of a host's instances: their number, their threads, and the NUMA nodes of their GPUs."""

    num_instances: int
    num_threads: int  # threads of each instance
    near: tuple[frozenset[int], ...] = ()  # the NUMA nodes of each instance's GPUs; empty without GPUs

    def nodes_near(self, instance: int) -> frozenset[int]:
        """Return the NUMA nodes to which the GPUs of ``instance`` are attached; empty if unknown."""
        return self.near[instance] if self.near else frozenset()


def flat_map(cores: Iterable[int]) -> tuple[Cpu, ...]:
    """Return a map of ``cores`` with only one NUMA node and one cache, for a machine of unknown structure."""
    return tuple(Cpu(number=number, core=number, cache=0, node=0, socket=0) for number in cores)


def place_instances(placement: ProcessPlacement, host: HostMap, demand: Demand) -> tuple[Binding, ...]:
    """Return the bindings of a host's instances to cores; () if the instances shall not be bound to cores."""
    if placement is ProcessPlacement.DISABLED:
        return ()
    if placement is ProcessPlacement.SPREADNUMA:
        parts = _whole_nodes(host, demand)
    else:
        parts = _own_cores(placement, host, demand)
    return _bindings(parts, host.memory_nodes)


def _bindings(parts: Sequence[_Part], memory_nodes: tuple[int, ...]) -> tuple[Binding, ...]:
    """Return a `Binding` for each different set of cores in ``parts``, which has a set for each instance."""
    instances: dict[_Part, list[int]] = {}
    for instance, part in enumerate(parts):
        instances.setdefault(part, []).append(instance)
    return tuple(
        Binding(
            instances=tuple(members),
            cores=tuple(sorted(cpu.number for cpu in part)),
            memory_nodes=_memory_of(part, memory_nodes),
        )
        for part, members in instances.items()
    )


def _memory_of(part: _Part, memory_nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of the NUMA nodes ``memory_nodes`` contain the cores ``part``; () if all of them do."""
    nodes = {cpu.node for cpu in part}.intersection(memory_nodes)
    return tuple(sorted(nodes)) if len(nodes) < len(memory_nodes) else ()


def _whole_nodes(host: HostMap, demand: Demand) -> Sequence[_Part]:
    """Return each instance's cores, in whole NUMA nodes; () (no binding) if each instance would get all cores."""
    nodes = _groups(host.cpus, _node_of)
    if len(nodes) == 1 or demand.num_instances == 1:
        return ()
    if demand.num_instances < len(nodes):
        owned = _owned_nodes(nodes, demand)
    else:
        owned = [_shared_node(nodes, demand, instance) for instance in range(demand.num_instances)]
    return [tuple(chain.from_iterable(nodes[index] for index in sorted(indices))) for indices in owned]


def _shared_node(nodes: Sequence[_Part], demand: Demand, instance: int) -> set[int]:
    """Return the indices of the NUMA nodes of an instance's GPUs; if unknown, of one node, perhaps shared."""
    near = {index for index, node in enumerate(nodes) if node[0].node in demand.nodes_near(instance)}
    return near or {instance * len(nodes) // demand.num_instances}


def _owned_nodes(nodes: Sequence[_Part], demand: Demand) -> list[set[int]]:
    """Divide all NUMA nodes among fewer instances; return the indices of the nodes of each instance."""
    count = demand.num_instances
    owned = [{i for i, node in enumerate(nodes) if node[0].node in demand.nodes_near(k)} for k in range(count)]
    if not any(owned):
        return [set(range(k * len(nodes) // count, (k + 1) * len(nodes) // count)) for k in range(count)]
    left = set(range(len(nodes))).difference(*owned)
    while left:
        taker = min(owned, key=len)
        sockets = {nodes[index][0].socket for index in taker}
        taken = min(left, key=lambda index: (nodes[index][0].socket not in sockets, index))
        taker.add(taken)
        left.remove(taken)
    return owned


def _own_cores(placement: ProcessPlacement, host: HostMap, demand: Demand) -> Sequence[_Part]:
    """Return the cores of each instance, which no other instance gets. Raises PlanError if there are too few."""
    count, threads = demand.num_instances, demand.num_threads
    units = _within(_groups(host.cpus, _place_of_core), host.max_cores)
    least = -(-threads // min(map(len, units)))
    if count * least > len(units):  # then two instances may share a physical core, with one hardware thread each
        single = [(cpu,) for cpu in sorted(host.cpus, key=_place_of_core)]
        units, least = _within(single, host.max_cores), threads
    if count * least > len(units):
        raise _too_few_cores(placement, len(units), demand)
    size = least if placement is ProcessPlacement.COMPACT else len(units) // count
    return _nearest(_parts(units, size, demand), demand)


def _within(units: Sequence[_Part], max_cores: int) -> Sequence[_Part]:
    """Return the first physical cores of ``units`` with at most ``max_cores`` hardware threads in all; at least
    one core.
    """
    total, kept = 0, 0
    for unit in units:
        total += len(unit)
        kept += total <= max_cores
    return units[: max(1, kept)]


def _parts(units: Sequence[_Part], size: int, demand: Demand) -> Sequence[_Part]:
    """Return sets of ``size`` physical cores, at least one per instance. If no GPU has a known NUMA node, all sets
    are in the smallest cache or NUMA node with enough cores; otherwise the sets divide all cores of the host.
    """
    scopes = [units]
    if not any(demand.near):
        scopes = [*_by_size(units, _cache_of), *_by_size(units, _node_of), units]
    found: Iterator[Sequence[_Part]] = (_cut(scope, size, demand.num_instances) for scope in scopes)
    return next(parts for parts in found if len(parts) >= demand.num_instances)


def _cut(units: Sequence[_Part], size: int, count: int) -> Sequence[_Part]:
    """Divide physical cores into sets of ``size`` cores; each set is in one cache or NUMA node if possible."""
    parts: list[_Part] = []
    for groups in (_by_size(units, _cache_of), _by_size(units, _node_of), [units]):
        in_order = sorted(groups, key=lambda group: _place_of_core(group[0][0]))
        parts = [
            tuple(chain.from_iterable(group[start : start + size]))
            for group in in_order
            for start in range(0, len(group) - size + 1, size)
        ]
        if len(parts) >= count:
            break
    return parts


def _by_size(units: Sequence[_Part], key: Callable[[Cpu], tuple[int, ...]]) -> list[Sequence[_Part]]:
    """Return the physical cores ``units`` in groups with one cache or NUMA node (``key``), smallest first."""
    return sorted((list(group) for _, group in groupby(units, key=lambda unit: key(unit[0]))), key=len)


def _nearest(parts: Sequence[_Part], demand: Demand) -> Sequence[_Part]:
    """Choose one of the sets of cores ``parts`` for each instance, near the instance's GPUs if possible."""
    free = list(parts)
    chosen: dict[int, _Part] = {}
    for instance in range(demand.num_instances):
        near = demand.nodes_near(instance)
        part = next((part for part in free if near.issuperset(cpu.node for cpu in part)), None)
        if part is not None:
            chosen[instance] = part
            free.remove(part)
    return [chosen[k] if k in chosen else free.pop(0) for k in range(demand.num_instances)]


def _node_of(cpu: Cpu) -> tuple[int, ...]:
    return (cpu.socket, cpu.node)


def _cache_of(cpu: Cpu) -> tuple[int, ...]:
    return (cpu.socket, cpu.node, cpu.cache)


def _place_of_core(cpu: Cpu) -> tuple[int, ...]:
    return (cpu.socket, cpu.node, cpu.cache, cpu.core)


def _groups(cpus: Iterable[Cpu], key: Callable[[Cpu], tuple[int, ...]]) -> Sequence[_Part]:
    """Return the hardware threads ``cpus`` in groups with equal ``key``, such as the NUMA node, sorted by key."""
    in_order = sorted(cpus, key=lambda cpu: (key(cpu), cpu.number))
    return [tuple(group) for _, group in groupby(in_order, key=key)]


def _too_few_cores(placement: ProcessPlacement, num_cores: int, demand: Demand) -> PlanError:
    count, threads = demand.num_instances, demand.num_threads
    fitting = num_cores // count
    fewer = (
        f"--threads-per-replica {fitting}, " if fitting else f"at most {num_cores // threads} instances a host, "
    )
    return PlanError(
        f"--process-placement {placement} gives each instance cores of its own: {count} instances with "
        f"{threads} thread{'s' if threads > 1 else ''} each need {count * threads} cores, and there "
        f"{'is' if num_cores == 1 else 'are'} {num_cores}: nearest: {fewer}or --process-placement "
        f"{ProcessPlacement.SPREADNUMA}, with which instances share cores"
    )
