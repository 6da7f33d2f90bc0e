"""Machines as trees of files that look like /sys, and the maps that are read from them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from poprun.plan.topology import Cpu, Gpu, MachineFacts
from poprun.text.ranges import fold_numbers
from tests import planning


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A regular machine; its physical cores are numbered through, their second hardware threads after them all."""

    num_sockets: int = 1  # processor packages
    num_nodes: int = 1  # NUMA nodes of each
    num_caches: int = 1  # last-level caches of each node
    num_cores: int = 4  # physical cores below each cache
    num_threads: int = 1  # hardware threads of each physical core
    is_interleaved: bool = False  # whether neighbouring numbers sit on different sockets, as many machines have it

    def cpus(self) -> tuple[Cpu, ...]:
        """Where each of its cores sits."""
        per_cache = self.num_cores
        per_node = per_cache * self.num_caches
        per_socket = per_node * self.num_nodes
        count = per_socket * self.num_sockets
        found = []
        for position in range(count):
            socket, inside = divmod(position, per_socket)
            first_of_cache = position - inside % per_cache
            numbered = self._number(position, per_socket)
            found += [
                Cpu(
                    number=numbered + thread * count,
                    core=numbered,
                    cache=self._number(first_of_cache, per_socket),
                    node=position // per_node,
                    socket=socket,
                )
                for thread in range(self.num_threads)
            ]
        return tuple(sorted(found, key=lambda cpu: cpu.number))

    def _number(self, position: int, per_socket: int) -> int:
        if not self.is_interleaved:
            return position
        socket, inside = divmod(position, per_socket)
        return inside * self.num_sockets + socket

    def write(self, system: Path, offline: Iterable[int] = ()) -> None:
        """Write it as the kernel shows it, with the cores ``offline`` switched off."""
        cpus = [cpu for cpu in self.cpus() if cpu.number not in set(offline)]
        nodes = sorted({cpu.node for cpu in self.cpus()})
        _write(system / "cpu/online", [cpu.number for cpu in cpus])
        _write(system / "node/online", nodes)
        _write(system / "node/has_memory", nodes)
        for node in nodes:
            _write(system / f"node/node{node}/cpulist", [cpu.number for cpu in cpus if cpu.node == node])
        for cpu in cpus:
            folder = system / f"cpu/cpu{cpu.number}"
            siblings = [other.number for other in cpus if other.core == cpu.core]
            sharers = [other.number for other in cpus if other.cache == cpu.cache]
            _write(folder / "topology/physical_package_id", [cpu.socket])
            _write(folder / "topology/core_cpus_list", siblings)
            for index, (level, kind, shared) in enumerate(
                [(1, "Data", siblings), (1, "Instruction", siblings), (3, "Unified", sharers)]
            ):
                _write(folder / f"cache/index{index}/level", [level])
                _write(folder / f"cache/index{index}/shared_cpu_list", shared)
                (folder / f"cache/index{index}/type").write_text(f"{kind}\n")


def _write(path: Path, numbers: Iterable[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fold_numbers(sorted(numbers)) + "\n")


def facts_of(machine: Machine, *gpu_nodes: int) -> MachineFacts:
    """What poprun would find on ``machine``, with a GPU near each of the nodes that are named."""
    cpus = machine.cpus()
    return replace(
        planning.LAPTOP,
        cores=tuple(cpu.number for cpu in cpus),
        cpus=cpus,
        memory_nodes=tuple(sorted({cpu.node for cpu in cpus})),
        gpus=tuple(Gpu(name=str(index), node=node) for index, node in enumerate(gpu_nodes)),
    )


LAPTOP: Final = Machine()
LAPTOP_WITH_SMT: Final = Machine(num_threads=2)
TWO_SOCKETS: Final = Machine(num_sockets=2, num_cores=8, is_interleaved=True)
TWO_SOCKETS_WITH_SMT: Final = Machine(num_sockets=2, num_cores=8, num_threads=2)
EIGHT_NODES: Final = Machine(num_sockets=2, num_nodes=4, num_caches=2, num_cores=4)
"""A server whose sockets are set to four nodes each, every node with two caches of four cores."""
