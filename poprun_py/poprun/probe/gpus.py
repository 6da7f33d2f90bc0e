"""The CUDA devices that a job may use, and which of them are free.

Asks the driver's own `nvidia-smi`, and only on a machine that has the driver: poprun never imports torch, and a
machine without a GPU pays a look at the file system.
"""

import os
from collections.abc import Mapping
from typing import Final

from poprun.plan.program_environment import VISIBLE_DEVICES
from poprun.plan.topology import Gpu, Occupant
from poprun.probe.cpus import read_number
from poprun.process.start import answer_of

PCI: Final = "/sys/bus/pci/devices"

_TIMEOUT_SECONDS: Final = 10.0
_SMI: Final = "nvidia-smi"
_DRIVER: Final = ("/proc/driver/nvidia", "/dev/nvidiactl")
_INVENTORY: Final = "--query-gpu=index,uuid,pci.bus_id"
_PROCESSES: Final = "--query-compute-apps=gpu_uuid,pid"


def find_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The devices in slot order; ``CUDA_VISIBLE_DEVICES`` of ``environment`` is the inventory when it is set."""
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    signs = (*_DRIVER, *(os.path.join(folder, _SMI) for folder in folders))
    if not any(map(os.path.exists, signs)):
        return ()
    return read_gpus(_ask(_INVENTORY), _ask(_PROCESSES), environment.get(VISIBLE_DEVICES))


def read_gpus(inventory: str, processes: str, visible: str | None, pci: str = PCI) -> tuple[Gpu, ...]:
    """The devices that the driver and the user tell of.

    Args:
        inventory: ``index, uuid, address on the PCI bus`` of each device of the machine, one a line.
        processes: ``uuid, pid`` of a device and a process that holds memory on it, one a line.
        visible: ``CUDA_VISIBLE_DEVICES``, or None when it is not set. CUDA reads it up to the first entry that is
            no device of the machine, and so does this; an entry may be the beginning of one uuid.
        pci: Where the kernel tells of the devices on the PCI bus.
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
    """Who holds memory on each device; a process that cannot be numbered, as in a container, has the number 0."""
    from poprun.process.users import user_of  # noqa: PLC0415 - few machines have GPUs

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
    node = read_number(os.path.join(pci, f"{domain[-4:]}:{rest}", "numa_node"))
    return node if node >= 0 else None


def _ask(query: str) -> str:
    """What the driver answers; nothing when it is not installed or takes too long."""
    return answer_of((_SMI, "--format=csv,noheader", query), _TIMEOUT_SECONDS) or ""
