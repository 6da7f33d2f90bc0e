"""Which cores each instance gets, on machines of many kinds: golden texts, and laws for all of them."""

import errno
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import PlanError
from poprun.launch.agent import bind
from poprun.plan.placement import Demand, HostMap, flat_map, place_instances
from poprun.plan.topology import Binding, ProcessPlacement
from poprun.text.ranges import fold_numbers
from tests.machines import EIGHT_NODES, LAPTOP, LAPTOP_WITH_SMT, TWO_SOCKETS, TWO_SOCKETS_WITH_SMT, Machine

SPREAD, COMPACT, CORE, DISABLED = (
    ProcessPlacement.SPREADNUMA,
    ProcessPlacement.COMPACT,
    ProcessPlacement.CORE,
    ProcessPlacement.DISABLED,
)
OWN_CORES = [COMPACT, CORE]
ONE_CACHE_PER_NODE = Machine(num_sockets=2, num_cores=4)


def host(machine: Machine, max_cores: int | None = None) -> HostMap:
    """What there is to bind to on ``machine``, all of it allowed."""
    cpus = machine.cpus()
    nodes = tuple(sorted({cpu.node for cpu in cpus}))
    return HostMap(cpus=cpus, memory_nodes=nodes, max_cores=len(cpus) if max_cores is None else max_cores)


def placed(
    placement: ProcessPlacement,
    machine: HostMap,
    num_instances: int,
    num_threads: int = 1,
    near: tuple[frozenset[int], ...] = (),
) -> list[str]:
    """Each binding as ``instances: cores @ memory nodes``."""
    demand = Demand(num_instances=num_instances, num_threads=num_threads, near=near)
    return [shown(binding) for binding in place_instances(placement, machine, demand)]


def shown(binding: Binding) -> str:
    """A binding in short."""
    return (
        f"{fold_numbers(binding.instances)}: {fold_numbers(binding.cores)} @ {fold_numbers(binding.memory_nodes)}"
    )


@pytest.mark.parametrize(
    ("machine", "num_instances", "bindings"),
    [
        (LAPTOP, 4, []),
        (LAPTOP_WITH_SMT, 2, []),
        (TWO_SOCKETS, 1, []),
        (TWO_SOCKETS, 2, ["0: 0,2,4,6,8,10,12,14 @ 0", "1: 1,3,5,7,9,11,13,15 @ 1"]),
        (TWO_SOCKETS, 3, ["0-1: 0,2,4,6,8,10,12,14 @ 0", "2: 1,3,5,7,9,11,13,15 @ 1"]),
        (TWO_SOCKETS_WITH_SMT, 4, ["0-1: 0-7,16-23 @ 0", "2-3: 8-15,24-31 @ 1"]),
        (EIGHT_NODES, 2, ["0: 0-31 @ 0-3", "1: 32-63 @ 4-7"]),
        (EIGHT_NODES, 3, ["0: 0-15 @ 0-1", "1: 16-39 @ 2-4", "2: 40-63 @ 5-7"]),
        (EIGHT_NODES, 16, [f"{2 * k}-{2 * k + 1}: {8 * k}-{8 * k + 7} @ {k}" for k in range(8)]),
    ],
)
def test_spreadnuma(machine: Machine, num_instances: int, bindings: list[str]) -> None:
    """Whole nodes, those of one socket next to each other; nothing on one node and for one instance."""
    assert placed(SPREAD, host(machine), num_instances) == bindings


@pytest.mark.parametrize(
    ("machine", "num_instances", "num_threads", "bindings"),
    [
        (LAPTOP, 2, 2, ["0: 0-1 @ ", "1: 2-3 @ "]),
        (LAPTOP, 3, 1, ["0: 0 @ ", "1: 1 @ ", "2: 2 @ "]),
        (LAPTOP_WITH_SMT, 2, 1, ["0: 0-1,4-5 @ ", "1: 2-3,6-7 @ "]),
        (LAPTOP_WITH_SMT, 8, 1, [f"{k}: {k // 2 + 4 * (k % 2)} @ " for k in range(8)]),
        (TWO_SOCKETS, 2, 4, ["0: 0,2,4,6,8,10,12,14 @ 0", "1: 1,3,5,7,9,11,13,15 @ 1"]),
        (TWO_SOCKETS, 3, 4, ["0: 0,2,4,6,8 @ 0", "1: 1,3,10,12,14 @ ", "2: 5,7,9,11,13 @ 1"]),
        (ONE_CACHE_PER_NODE, 3, 2, ["0: 0-1 @ 0", "1: 2-3 @ 0", "2: 4-5 @ 1"]),
        (EIGHT_NODES, 4, 1, [f"{k}: {16 * k}-{16 * k + 15} @ {2 * k}-{2 * k + 1}" for k in range(4)]),
        (EIGHT_NODES, 16, 4, [f"{k}: {4 * k}-{4 * k + 3} @ {k // 2}" for k in range(16)]),
    ],
)
def test_core(machine: Machine, num_instances: int, num_threads: int, bindings: list[str]) -> None:
    """Equal parts of the host, by whole physical cores while there are enough."""
    assert placed(CORE, host(machine), num_instances, num_threads) == bindings


@pytest.mark.parametrize(
    ("machine", "num_instances", "num_threads", "bindings"),
    [
        (LAPTOP, 2, 1, ["0: 0 @ ", "1: 1 @ "]),
        (LAPTOP_WITH_SMT, 2, 1, ["0: 0,4 @ ", "1: 1,5 @ "]),
        (LAPTOP_WITH_SMT, 2, 3, ["0: 0-1,4-5 @ ", "1: 2-3,6-7 @ "]),
        (TWO_SOCKETS, 2, 2, ["0: 0,2 @ 0", "1: 4,6 @ 0"]),
        (EIGHT_NODES, 3, 3, ["0: 0-2 @ 0", "1: 4-6 @ 0", "2: 8-10 @ 1"]),
        (EIGHT_NODES, 2, 6, ["0: 0-5 @ 0", "1: 8-13 @ 1"]),
        (ONE_CACHE_PER_NODE, 2, 3, ["0: 0-2 @ 0", "1: 4-6 @ 1"]),
        (ONE_CACHE_PER_NODE, 4, 2, ["0: 0-1 @ 0", "1: 2-3 @ 0", "2: 4-5 @ 1", "3: 6-7 @ 1"]),
        (Machine(num_sockets=2, num_cores=5), 3, 3, ["0: 0-2 @ 0", "1: 3-5 @ ", "2: 6-8 @ 1"]),
    ],
)
def test_compact(machine: Machine, num_instances: int, num_threads: int, bindings: list[str]) -> None:
    """As many cores as threads, none across caches, else none across nodes, while all fit so."""
    assert placed(COMPACT, host(machine), num_instances, num_threads) == bindings


@pytest.mark.parametrize("machine", [LAPTOP, TWO_SOCKETS, EIGHT_NODES])
def test_disabled(machine: Machine) -> None:
    """Nothing is bound."""
    assert placed(DISABLED, host(machine), 2) == []


def near(*nodes: int) -> tuple[frozenset[int], ...]:
    """The node of each instance's GPU."""
    return tuple(frozenset({node}) for node in nodes)


@pytest.mark.parametrize(
    ("placement", "machine", "nodes", "bindings"),
    [
        (SPREAD, ONE_CACHE_PER_NODE, near(1, 1, 0, 0), ["0-1: 4-7 @ 1", "2-3: 0-3 @ 0"]),
        (SPREAD, ONE_CACHE_PER_NODE, near(1, 1), ["0-1: 4-7 @ 1"]),
        (SPREAD, EIGHT_NODES, near(5, 1), ["0: 32-63 @ 4-7", "1: 0-31 @ 0-3"]),
        (SPREAD, ONE_CACHE_PER_NODE, near(9, 9), ["0: 0-3 @ 0", "1: 4-7 @ 1"]),
        (CORE, ONE_CACHE_PER_NODE, near(1, 0), ["0: 4-7 @ 1", "1: 0-3 @ 0"]),
        (CORE, ONE_CACHE_PER_NODE, near(1, 1), ["0: 4-7 @ 1", "1: 0-3 @ 0"]),
        (COMPACT, ONE_CACHE_PER_NODE, near(1, 1), ["0: 4 @ 1", "1: 5 @ 1"]),
    ],
)
def test_cores_near_gpus(
    placement: ProcessPlacement, machine: Machine, nodes: tuple[frozenset[int], ...], bindings: list[str]
) -> None:
    """An instance comes to the nodes of its GPUs as far as there is room, unless the job may not use them."""
    assert placed(placement, host(machine), len(nodes), near=nodes) == bindings


def test_a_quota_bounds_the_cores_that_are_owned() -> None:
    """A control group that grants the time of three cores gets three, and whole physical cores of those."""
    assert placed(CORE, host(LAPTOP, max_cores=3), 2) == ["0: 0 @ ", "1: 1 @ "]
    assert placed(CORE, host(LAPTOP_WITH_SMT, max_cores=4), 2) == ["0: 0,4 @ ", "1: 1,5 @ "]
    assert placed(CORE, host(LAPTOP_WITH_SMT, max_cores=1), 1) == ["0: 0,4 @ "]


@pytest.mark.parametrize(
    ("num_instances", "num_threads", "what"),
    [
        (
            5,
            1,
            "5 instances with 1 thread each need 5 cores, and there are 4: nearest: at most 4 instances a host",
        ),
        (2, 3, "2 instances with 3 threads each need 6 cores, and there are 4: nearest: --threads-per-replica 2"),
    ],
)
@pytest.mark.parametrize("placement", OWN_CORES)
def test_too_few_cores(placement: ProcessPlacement, num_instances: int, num_threads: int, what: str) -> None:
    """Cores of one's own that are not there: the error names what would fit."""
    with pytest.raises(PlanError) as caught:
        placed(placement, host(LAPTOP), num_instances, num_threads)
    assert str(caught.value).startswith(f"--process-placement {placement} gives each instance cores of its own: ")
    assert what in str(caught.value)


def test_a_machine_of_which_nothing_is_known() -> None:
    """It has one node, and any cores of it are as good as others."""
    unknown = HostMap(cpus=flat_map((3, 5, 9)), memory_nodes=(), max_cores=3)

    assert placed(SPREAD, unknown, 3) == []
    assert placed(CORE, unknown, 3) == ["0: 3 @ ", "1: 5 @ ", "2: 9 @ "]


machines = st.builds(
    Machine,
    num_sockets=st.integers(1, 2),
    num_nodes=st.integers(1, 4),
    num_caches=st.integers(1, 3),
    num_cores=st.integers(1, 5),
    num_threads=st.integers(1, 2),
    is_interleaved=st.booleans(),
)


@given(machines, st.data())
def test_laws_of_cores_of_ones_own(machine: Machine, data: st.DataObject) -> None:
    """No two instances share a core, all have equally many, enough for their threads, and all are allowed."""
    every = [cpu.number for cpu in machine.cpus()]
    allowed = data.draw(st.sets(st.sampled_from(every), min_size=1))
    cpus = tuple(cpu for cpu in machine.cpus() if cpu.number in allowed)
    count = data.draw(st.integers(1, len(cpus)))
    threads = data.draw(st.integers(1, len(cpus) // count))
    there = HostMap(cpus=cpus, memory_nodes=(), max_cores=len(cpus))
    placement = data.draw(st.sampled_from(OWN_CORES))
    bindings = place_instances(placement, there, Demand(num_instances=count, num_threads=threads))
    parts = [set(binding.cores) for binding in bindings]

    assert [binding.instances for binding in bindings] == [(instance,) for instance in range(count)]
    assert all(threads <= len(part) for part in parts)
    assert all(part <= allowed for part in parts)
    assert all(first.isdisjoint(second) for first, second in combinations(parts, 2))


@given(machines, st.integers(1, 20), st.data())
def test_laws_of_whole_nodes(machine: Machine, count: int, data: st.DataObject) -> None:
    """Every instance is in one binding, every binding is whole nodes, and every node is somebody's."""
    nodes = {cpu.node for cpu in machine.cpus()}
    wanted = st.tuples(*[st.frozensets(st.sampled_from(sorted(nodes)), max_size=2)] * count) | st.just(())
    there = host(machine)
    demand = Demand(num_instances=count, num_threads=1, near=data.draw(wanted))
    bindings = place_instances(SPREAD, there, demand)
    node_of = {cpu.number: cpu.node for cpu in machine.cpus()}

    if not bindings:
        assert len(nodes) == 1 or count == 1
        return
    assert sorted(instance for binding in bindings for instance in binding.instances) == list(range(count))
    for binding in bindings:
        own = {node_of[core] for core in binding.cores}
        assert set(binding.cores) == {core for core, node in node_of.items() if node in own}
    if not demand.near or count < len(nodes):
        assert {node_of[core] for binding in bindings for core in binding.cores} == nodes


def test_memory_that_may_not_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the call is forbidden the instance runs all the same, and says so."""

    def forbid(_nodes: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("poprun.launch.agent.take_memory_from", forbid)

    assert bind((), (0,)) == {"memory_not_bound": "Operation not permitted"}
    assert bind((), ()) == {}
