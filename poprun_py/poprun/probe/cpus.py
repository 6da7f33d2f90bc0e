"""The CPU cores that this process may use, and where each one sits: NUMA node, socket, cache.

Files: the kernel's Documentation/admin-guide/cputopology.rst and ABI/stable/sysfs-devices-node. The affinity of a
process never leaves the cpuset of its control group, nor `Mems_allowed_list` the nodes of it, so both say what the
control group allows.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final

from poprun.plan.topology import Cpu
from poprun.probe.limits import cpu_quota, read_text
from poprun.text.ranges import parse_numbers

SYSTEM: Final = "/sys/devices/system"
STATUS: Final = "/proc/self/status"

_ALLOWED: Final = "Mems_allowed_list:"
_SIBLINGS: Final = ("core_cpus_list", "thread_siblings_list")
_INSTRUCTIONS: Final = "Instruction"


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores, ascending; at least one.

    A container limited to the time of two cores may be allowed to run on all sixty-four of its machine; it then
    gets the first two, because threads past the quota only wait for each other.
    """
    cores = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    return tuple(cores if quota is None else cores[: max(1, int(quota))])


def read_cpus(allowed: Collection[int], system: str = SYSTEM) -> tuple[Cpu, ...]:
    """The map of the cores ``allowed``, ascending, without those that are offline.

    Where the machine does not say, a core stands alone, in the socket and on the node 0, which share one cache.

    Args:
        allowed: Numbers of the cores that the process may use.
        system: Where the kernel tells of the machine.
    """
    online = _numbers(os.path.join(system, "cpu", "online")) or allowed
    node_of = _node_of_cores(os.path.join(system, "node"))
    return tuple(
        _cpu(os.path.join(system, "cpu", f"cpu{number}"), number, node_of)
        for number in sorted(set(allowed).intersection(online))
    )


def read_memory_nodes(system: str = SYSTEM, status: str = STATUS) -> tuple[int, ...]:
    """The NUMA nodes that have memory which this process may use, ascending; none where nobody says.

    Args:
        system: Where the kernel tells of the machine.
        status: Where it tells of the process.
    """
    having = _numbers(os.path.join(system, "node", "has_memory"))
    with suppress(OSError, ValueError):
        lines = read_text(status).splitlines()
        allowed = next((line.removeprefix(_ALLOWED).strip() for line in lines if line.startswith(_ALLOWED)), "")
        return tuple(node for node in parse_numbers(allowed) if node in having)
    return having


def _cpu(folder: str, number: int, node_of: Mapping[int, int]) -> Cpu:
    topology = os.path.join(folder, "topology")
    siblings = next(filter(None, (_numbers(os.path.join(topology, name)) for name in _SIBLINGS)), (number,))
    return Cpu(
        number=number,
        core=siblings[0],
        cache=max(_caches(os.path.join(folder, "cache")), default=(0, -1))[1],
        node=node_of.get(number, 0),
        socket=max(0, read_number(os.path.join(topology, "physical_package_id"))),
    )


def _caches(folder: str) -> Iterator[tuple[int, int]]:
    """The level of each cache of a core that holds data, and the first core that shares it."""
    with suppress(OSError):
        for name in os.listdir(folder):
            cache = os.path.join(folder, name)
            sharers = _numbers(os.path.join(cache, "shared_cpu_list"))
            if sharers and _text(os.path.join(cache, "type")) != _INSTRUCTIONS:
                yield read_number(os.path.join(cache, "level")), sharers[0]


def _node_of_cores(folder: str) -> dict[int, int]:
    return {
        core: node
        for node in _numbers(os.path.join(folder, "online"))
        for core in _numbers(os.path.join(folder, f"node{node}", "cpulist"))
    }


def _numbers(path: str) -> tuple[int, ...]:
    """The numbers of a file that lists them; none when it is not there or holds something else."""
    with suppress(OSError, ValueError):
        return parse_numbers(read_text(path).strip())
    return ()


def read_number(path: str) -> int:
    """The number that a file holds; -1 when it is not there or holds something else."""
    with suppress(OSError, ValueError):
        return int(read_text(path))
    return -1


def _text(path: str) -> str:
    with suppress(OSError):
        return read_text(path).strip()
    return ""
