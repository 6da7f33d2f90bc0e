"""Placement: from a host's map of NUMA nodes, caches and cores to the cores of each of its instances. Pure.

``spreadnuma`` gives each instance whole NUMA nodes, or several instances one; ``core`` gives each an equal part of
the physical cores; ``compact`` as many as it has threads, side by side. A part stays within one last-level cache,
else within one node, where all parts can; an instance whose GPUs are near some nodes comes to those.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from poprun.errors import PlanError
from poprun.plan.topology import Binding, Cpu, ProcessPlacement

_Part = tuple[Cpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMap:
    """The cores and the NUMA nodes of a host that instances can be bound to."""

    cpus: tuple[Cpu, ...]
    memory_nodes: tuple[int, ...]
    max_cores: int  # a control group may grant the time of fewer cores than there are cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the instances of a host need."""

    num_instances: int
    num_threads: int  # of each instance
    near: tuple[frozenset[int], ...] = ()  # for each instance the NUMA nodes of its GPUs; empty without GPUs

    def nodes_near(self, instance: int) -> frozenset[int]:
        """The NUMA nodes of one instance's GPUs; empty when they are not known."""
        return self.near[instance] if self.near else frozenset()


def flat_map(cores: Iterable[int]) -> tuple[Cpu, ...]:
    """The map of a machine whose structure is not known: one node, one cache, each core by itself."""
    return tuple(Cpu(number=number, core=number, cache=0, node=0, socket=0) for number in cores)


def place_instances(placement: ProcessPlacement, host: HostMap, demand: Demand) -> tuple[Binding, ...]:
    """Bind each instance of a host to cores; no bindings at all where nothing is to be bound."""
    if placement is ProcessPlacement.DISABLED:
        return ()
    if placement is ProcessPlacement.SPREADNUMA:
        parts = _whole_nodes(host, demand)
    else:
        parts = _own_cores(placement, host, demand)
    return _bindings(parts, host.memory_nodes)


def _bindings(parts: Sequence[_Part], memory_nodes: tuple[int, ...]) -> tuple[Binding, ...]:
    """Join instances that have the same cores into one binding."""
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
    """The nodes from which cores take memory; none if they have none, or if these are all nodes."""
    nodes = {cpu.node for cpu in part}.intersection(memory_nodes)
    return tuple(sorted(nodes)) if len(nodes) < len(memory_nodes) else ()


def _whole_nodes(host: HostMap, demand: Demand) -> Sequence[_Part]:
    """The cores of each instance's nodes; nothing if every instance would have all cores."""
    nodes = _groups(host.cpus, _node_of)
    if len(nodes) == 1 or demand.num_instances == 1:
        return ()
    if demand.num_instances < len(nodes):
        owned = _owned_nodes(nodes, demand)
    else:
        owned = [_shared_node(nodes, demand, instance) for instance in range(demand.num_instances)]
    return [tuple(chain.from_iterable(nodes[index] for index in sorted(indices))) for indices in owned]


def _shared_node(nodes: Sequence[_Part], demand: Demand, instance: int) -> set[int]:
    """The index of an instance's node, where there are at least as many instances as nodes."""
    near = {index for index, node in enumerate(nodes) if node[0].node in demand.nodes_near(instance)}
    return near or {instance * len(nodes) // demand.num_instances}


def _owned_nodes(nodes: Sequence[_Part], demand: Demand) -> list[set[int]]:
    """The indices of each instance's nodes, where there are more nodes: near ones first, then evenly."""
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
    """The cores of each instance, which no other instance has."""
    count, threads = demand.num_instances, demand.num_threads
    units = _within(_groups(host.cpus, _place_of_core), host.max_cores)
    least = -(-threads // min(map(len, units)))
    if count * least > len(units):  # then two instances may have a hardware thread each of one physical core
        single = [(cpu,) for cpu in sorted(host.cpus, key=_place_of_core)]
        units, least = _within(single, host.max_cores), threads
    if count * least > len(units):
        raise _too_few_cores(placement, len(units), demand)
    size = least if placement is ProcessPlacement.COMPACT else len(units) // count
    return _nearest(_parts(units, size, demand), demand)


def _within(units: Sequence[_Part], max_cores: int) -> Sequence[_Part]:
    """The first units, at least one, that hold no more than ``max_cores`` cores together."""
    total, kept = 0, 0
    for unit in units:
        total += len(unit)
        kept += total <= max_cores
    return units[: max(1, kept)]


def _parts(units: Sequence[_Part], size: int, demand: Demand) -> Sequence[_Part]:
    """At least one part of ``size`` units for each instance, in the smallest cache or node that holds them all."""
    scopes = [units]
    if not any(demand.near):
        scopes = [*_by_size(units, _cache_of), *_by_size(units, _node_of), units]
    found: Iterator[Sequence[_Part]] = (_cut(scope, size, demand.num_instances) for scope in scopes)
    return next(parts for parts in found if len(parts) >= demand.num_instances)


def _cut(units: Sequence[_Part], size: int, count: int) -> Sequence[_Part]:
    """Cut units into parts of ``size``: within caches if that gives enough parts, else within nodes, else any."""
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
    """Group units by ``key``, the smallest group first."""
    return sorted((list(group) for _, group in groupby(units, key=lambda unit: key(unit[0]))), key=len)


def _nearest(parts: Sequence[_Part], demand: Demand) -> Sequence[_Part]:
    """Choose a part for each instance: the first one near its GPUs, else the first that is free."""
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
    """Group cores by ``key``, in the order of the keys."""
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
