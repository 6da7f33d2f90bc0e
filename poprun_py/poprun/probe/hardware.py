"""The cores and CUDA devices that this process may use, and where each one sits: NUMA node, socket, cache.

Cores: the kernel's Documentation/admin-guide/cputopology.rst and ABI/stable/sysfs-devices-node. The affinity of a
process never leaves the cpuset of its control group, nor `Mems_allowed_list` the nodes of it, so both say what the
control group allows.

Devices: the driver's own `nvidia-smi`, asked only where the driver is. poprun never imports torch, and a
machine without a GPU pays a look at the file system.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final

from poprun.plan.program_environment import VISIBLE_DEVICES
from poprun.plan.topology import Cpu, Gpu, Occupant
from poprun.probe.limits import cpu_quota, read_text
from poprun.process.spawn import answer_of
from poprun.text.ranges import parse_numbers

SYSTEM: Final = "/sys/devices/system"
STATUS: Final = "/proc/self/status"
PCI: Final = "/sys/bus/pci/devices"

_SMI_SECONDS: Final = 10.0
_SMI: Final = "nvidia-smi"
_DRIVER: Final = ("/proc/driver/nvidia", "/dev/nvidiactl")
_INVENTORY: Final = "--query-gpu=index,uuid,pci.bus_id"
_PROCESSES: Final = "--query-compute-apps=gpu_uuid,pid"
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
        system: Folder in which the kernel describes the machine.
    """
    online = _numbers(os.path.join(system, "cpu", "online")) or allowed
    node_of = _node_of_cores(os.path.join(system, "node"))
    return tuple(
        _cpu(os.path.join(system, "cpu", f"cpu{number}"), number, node_of)
        for number in sorted(set(allowed).intersection(online))
    )


def read_memory_nodes(system: str = SYSTEM, status: str = STATUS) -> tuple[int, ...]:
    """The NUMA nodes that have memory which this process may use, ascending; none where the kernel does not say.

    Args:
        system: Folder in which the kernel describes the machine.
        status: File in which it describes the process.
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
        socket=max(0, _number(os.path.join(topology, "physical_package_id"))),
    )


def _caches(folder: str) -> Iterator[tuple[int, int]]:
    """The level of each cache of a core that holds data, and the first core that shares it."""
    with suppress(OSError):
        for name in os.listdir(folder):
            cache = os.path.join(folder, name)
            sharers = _numbers(os.path.join(cache, "shared_cpu_list"))
            if sharers and _text(os.path.join(cache, "type")) != _INSTRUCTIONS:
                yield _number(os.path.join(cache, "level")), sharers[0]


def _node_of_cores(folder: str) -> dict[int, int]:
    return {
        core: node
        for node in _numbers(os.path.join(folder, "online"))
        for core in _numbers(os.path.join(folder, f"node{node}", "cpulist"))
    }


def find_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The devices in slot order; ``CUDA_VISIBLE_DEVICES`` of ``environment`` is the inventory when it is set."""
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    signs = (*_DRIVER, *(os.path.join(folder, _SMI) for folder in folders))
    if not any(map(os.path.exists, signs)):
        return ()
    return read_gpus(_ask(_INVENTORY), _ask(_PROCESSES), environment.get(VISIBLE_DEVICES))


def read_gpus(inventory: str, processes: str, visible: str | None, pci: str = PCI) -> tuple[Gpu, ...]:
    """The devices that the driver lists and the user leaves visible.

    Args:
        inventory: ``index, uuid, address on the PCI bus`` of each device of the machine, one a line.
        processes: ``uuid, pid`` of a device and a process that holds memory on it, one a line.
        visible: ``CUDA_VISIBLE_DEVICES``, or None when it is not set. CUDA reads it up to the first entry that is
            no device of the machine, and so does this; an entry may be the beginning of one uuid.
        pci: Folder in which the kernel describes the devices on the PCI bus.
    """
    rows = [list(map(str.strip, line.split(","))) for line in inventory.splitlines() if "," in line]
    uuids = {index: uuid for index, uuid, *_ in rows}
    nodes = {uuid: _node_of(address, pci) for _, uuid, *rest in rows for address in rest}
    occupants = _occupants(processes)
    found = list(uuids.items()) if visible is None else []
    for name in map(str.strip, visible.split(",") if visible is not None else ()):
        uuid = _uuid_of(name, uuids)
        if uuid is None:
            break
        found.append((name, uuid))
    return tuple(
        Gpu(name=name, uuid=uuid, occupants=occupants.get(uuid, ()), node=nodes.get(uuid)) for name, uuid in found
    )


def _occupants(processes: str) -> dict[str, tuple[Occupant, ...]]:
    """The processes that hold memory on each device; one without a number, as in a container, has the number 0."""
    from poprun.process.process_tree import user_of  # noqa: PLC0415 - few machines have GPUs

    found: dict[str, tuple[Occupant, ...]] = {}
    for line in processes.splitlines():
        uuid, _, number = map(str.strip, line.partition(","))
        pid = int(number) if number.isdecimal() else 0
        if uuid:
            found[uuid] = (*found.get(uuid, ()), Occupant(pid=pid, user=user_of(pid)))
    return found


def _uuid_of(name: str, uuids: Mapping[str, str]) -> str | None:
    """The uuid of the device that ``name`` means; a slice of one (``MIG-…``) is its own."""
    if name in uuids:
        return uuids[name]
    if name.startswith("MIG-"):
        return name
    matches = [uuid for uuid in uuids.values() if name.startswith("GPU-") and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _node_of(address: str, pci: str) -> int | None:
    """The NUMA node of a device, or None where the kernel does not know; the driver writes longer addresses."""
    domain, _, rest = address.lower().partition(":")
    node = _number(os.path.join(pci, f"{domain[-4:]}:{rest}", "numa_node"))
    return node if node >= 0 else None


def _ask(query: str) -> str:
    """What the driver answers; nothing when it is not installed or takes too long."""
    return answer_of((_SMI, "--format=csv,noheader", query), _SMI_SECONDS) or ""


def _numbers(path: str) -> tuple[int, ...]:
    """The numbers of a file that lists them; none when it is not there or holds something else."""
    with suppress(OSError, ValueError):
        return parse_numbers(read_text(path).strip())
    return ()


def _number(path: str) -> int:
    """The number that a file holds; -1 when it is not there or holds something else."""
    with suppress(OSError, ValueError):
        return int(read_text(path))
    return -1


def _text(path: str) -> str:
    with suppress(OSError):
        return read_text(path).strip()
    return ""
