"""The map of cores that is read from /sys, for machines of many kinds."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from poprun.plan.topology import Cpu
from poprun.probe.machine import read_cpus, read_gpus, read_memory_nodes
from tests.machines import EIGHT_NODES, LAPTOP, LAPTOP_WITH_SMT, TWO_SOCKETS, TWO_SOCKETS_WITH_SMT, Machine


@pytest.mark.parametrize("machine", [LAPTOP, LAPTOP_WITH_SMT, TWO_SOCKETS, TWO_SOCKETS_WITH_SMT, EIGHT_NODES])
def test_every_core_is_where_it_is(tmp_path: Path, machine: Machine) -> None:
    """Node, socket, last-level cache and physical core are those of the machine."""
    machine.write(tmp_path)

    assert read_cpus(range(1000), str(tmp_path)) == machine.cpus()
    assert read_memory_nodes(str(tmp_path), "/nowhere") == tuple(sorted({cpu.node for cpu in machine.cpus()}))


def test_two_sockets_in_numbers(tmp_path: Path) -> None:
    """One map written out: even numbers on one socket, odd ones on the other."""
    replace(TWO_SOCKETS, num_cores=2).write(tmp_path)

    assert read_cpus(range(4), str(tmp_path)) == (
        Cpu(number=0, core=0, cache=0, node=0, socket=0),
        Cpu(number=1, core=1, cache=1, node=1, socket=1),
        Cpu(number=2, core=2, cache=0, node=0, socket=0),
        Cpu(number=3, core=3, cache=1, node=1, socket=1),
    )


def test_what_is_not_allowed_is_not_on_the_map(tmp_path: Path) -> None:
    """The affinity of the process, and with it the cpuset of its control group, bounds the map."""
    TWO_SOCKETS.write(tmp_path)

    assert [cpu.number for cpu in read_cpus({1, 3, 4}, str(tmp_path))] == [1, 3, 4]


def test_cores_that_are_offline(tmp_path: Path) -> None:
    """They are left out, and the remaining thread of a physical core stands for it."""
    LAPTOP_WITH_SMT.write(tmp_path, offline=[0, 3])
    found = {cpu.number: cpu.core for cpu in read_cpus(range(8), str(tmp_path))}

    assert found == {1: 1, 2: 2, 4: 4, 5: 1, 6: 2, 7: 7}


def test_a_machine_that_tells_nothing() -> None:
    """Without /sys every core stands alone on one node, and no memory is known."""
    assert read_cpus({2, 5}, "/nowhere") == (
        Cpu(number=2, core=2, cache=-1, node=0, socket=0),
        Cpu(number=5, core=5, cache=-1, node=0, socket=0),
    )
    assert read_memory_nodes("/nowhere", "/nowhere") == ()


def test_memory_that_is_not_allowed(tmp_path: Path) -> None:
    """Nodes without memory, and those that the control group withholds, are no nodes to take memory from."""
    EIGHT_NODES.write(tmp_path)
    (tmp_path / "node/has_memory").write_text("0-5\n")
    (tmp_path / "status").write_text("Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t1,4-7\n")

    assert read_memory_nodes(str(tmp_path), str(tmp_path / "status")) == (1, 4, 5)


def test_this_machine() -> None:
    """Every core of this process is on its own machine's map."""
    assert {cpu.number for cpu in read_cpus(os.sched_getaffinity(0))} == os.sched_getaffinity(0)


def test_gpus_tell_their_node(tmp_path: Path) -> None:
    """By their address on the PCI bus, which the driver writes longer than the kernel; -1 is none."""
    for address, node in [("0000:3b:00.0", "1"), ("0000:86:00.0", "-1")]:
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    inventory = "0, GPU-a, 00000000:3B:00.0\n1, GPU-b, 00000000:86:00.0\n2, GPU-c, 00000000:AF:00.0\n3, GPU-d\n"

    assert [gpu.node for gpu in read_gpus(inventory, "", None, str(tmp_path))] == [1, None, None, None]
    assert [gpu.node for gpu in read_gpus(inventory, "", "GPU-a", str(tmp_path))] == [1]
