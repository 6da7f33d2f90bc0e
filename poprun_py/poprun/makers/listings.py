"""Parsing of what nvidia-smi, xpu-smi and drivers print about GPUs; each GPU or slice becomes a row. Pure."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from popdist.ground.values import dataclass

_MIB: Final = 2**20
_GIB: Final = 2**30
_NUMBER: Final = r"[0-9]+"
_GPU_LINE: Final = r"GPU ([0-9]+): .*\(UUID: \S+\)"
_SLICE_LINE: Final = r"\s+MIG (\S+)\s+Device\s+[0-9]+: \(UUID: ([^)\s]+)\)"
_SLICE_MEMORY: Final = r"\.([0-9]+)gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A GPU, or a slice of a GPU, in the list of the tool or driver of its maker (NVIDIA, AMD or Intel)."""

    name: str  # the name in masks: a number, or the UUID of a slice
    uuid: str  # the name that is the same for all users of the machine
    whole: str = ""  # for a slice, the name of its device in masks; empty for a device
    address: str = ""  # the address on the PCI bus
    model: str = ""
    memory_bytes: int = 0  # 0 if it is not known
    pids: tuple[int, ...] = ()  # processes with memory on the device; 0 for a process whose id is hidden


def read_nvidia(answers: Sequence[str], files: Mapping[str, str]) -> tuple[Listed, ...]:
    """Return the GPUs and MIG slices in ``answers``, the outputs of three calls of nvidia-smi."""
    del files
    inventory, processes, tree = answers
    pids: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for line in processes.splitlines():
        uuid, _, number = map(str.strip, line.partition(","))
        if uuid:
            pids[uuid] += (int(number) if number.isdecimal() else 0,)
    slices = _slices(tree)
    listed = list[Listed]()
    for line in inventory.splitlines():
        if "," not in line:
            continue
        index, uuid, address, model, memory, *_ = (*map(str.strip, line.split(",")), "", "", "")
        gpu = Listed(
            name=index, uuid=uuid, address=address, model=model, memory_bytes=_first_number(memory) * _MIB
        )
        parts = [
            replace(
                gpu, name=name, uuid=name, whole=index, model=f"{model} MIG {kind}", memory_bytes=_size_of(kind)
            )
            for kind, name in slices.get(index, ())
        ]
        listed += [replace(it, pids=pids.get(it.uuid, ())) for it in parts or [gpu]]
    return tuple(listed)


def _slices(tree: str) -> dict[str, list[tuple[str, str]]]:
    """Return {GPU's number: (kind, UUID) of each MIG slice} from ``tree``, the output of ``nvidia-smi -L``."""
    slices: dict[str, list[tuple[str, str]]] = {}
    index = ""
    for line in tree.splitlines():
        if gpu := re.match(_GPU_LINE, line):
            index = gpu[1]
        elif part := re.match(_SLICE_LINE, line):
            slices.setdefault(index, []).append((part[1], part[2]))
    return slices


def _size_of(kind: str) -> int:
    """Return the memory in bytes of a MIG slice of the kind ``kind``, such as ``3g.20gb``; 0 if it is unknown."""
    match = re.search(_SLICE_MEMORY, kind)
    return int(match[1]) * _GIB if match else 0


def read_amd(answers: Sequence[str], files: Mapping[str, str]) -> tuple[Listed, ...]:
    """Return the AMD GPUs that this process may open, from the driver's ``files`` in /sys, in ROCm's order."""
    del answers
    nodes = sorted(int(path.split("/")[-2]) for path in files if path.endswith("/gpu_id"))
    folder = next((path.rpartition("/")[0].rpartition("/")[0] for path in files if path.endswith("/gpu_id")), "")
    gpus = list[Listed]()
    for node in nodes:
        gpu_id = files[f"{folder}/{node}/gpu_id"].strip()
        properties = _properties(files.get(f"{folder}/{node}/properties", ""))
        if gpu_id in ("", "0") or not properties:  # a processor, or a GPU that is not for this control group
            continue
        minor, place = properties.get("drm_render_minor", 0), properties.get("location_id", 0)
        address = f"{properties.get('domain', 0):04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}"
        unique = properties.get("unique_id", 0)
        product = files.get(f"/sys/class/drm/renderD{minor}/device/product_name", "").strip()
        banks = (text for path, text in files.items() if path.startswith(f"{folder}/{node}/mem_banks/"))
        holders = (
            path.split("/")
            for path, text in files.items()
            if path.endswith(f"/vram_{gpu_id}") and _first_number(text)
        )
        gpus.append(
            Listed(
                name=str(len(gpus)),
                uuid=f"GPU-{unique:016x}" if unique else address,
                address=address,
                model=product or f"gfx{properties.get('gfx_target_version', 0)}",
                memory_bytes=sum(_properties(bank).get("size_in_bytes", 0) for bank in banks),
                pids=tuple(int(parts[-2]) for parts in holders),
            )
        )
    return tuple(gpus)


def _properties(text: str) -> dict[str, int]:
    """Return the lines of ``text``, a file of the kernel, as a dict: each line has a name and a number."""
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: int(number) for name, _, number in pairs if number.isdecimal()}


def read_intel(answers: Sequence[str], files: Mapping[str, str]) -> tuple[Listed, ...]:
    """Return the Intel GPUs, or their tiles if a GPU has several, from ``answers``, the outputs of xpu-smi."""
    import csv

    inventory, processes = answers
    listed = list[Listed]()
    for row in csv.reader(inventory.splitlines()):
        if len(row) < len(("id", "model", "address", "memory")) or not row[0].isdecimal():
            continue
        card, model, address, memory = (cell.strip() for cell in row[:4])
        num_tiles = max(1, sum(f"/{address}/" in path for path in files))
        whole = Listed(
            name=card,
            uuid=address,
            address=address,
            model=model,
            memory_bytes=_first_number(memory) * _MIB,
            pids=tuple(_holders(processes, card)),
        )
        tiles = (
            replace(
                whole,
                name=f"{card}.{tile}",
                uuid=f"{address}/{tile}",
                whole=card,
                memory_bytes=whole.memory_bytes // num_tiles,
            )
            for tile in range(num_tiles)
        )
        listed += [whole] if num_tiles == 1 else tiles
    return tuple(listed)


def _holders(processes: str, card: str) -> Iterator[int]:
    """Yield the ids of processes that use the GPU ``card``, from xpu-smi's list; leave out xpu-smi itself."""
    for line in processes.splitlines():
        cells = line.split()
        if len(cells) < len(("id", "command", "card", "shared", "memory")) or not cells[0].isdecimal():
            continue
        if cells[-3] == card and os.path.basename(cells[1]) not in ("xpu-smi", "xpumd"):
            yield int(cells[0])


def arrange_tiles(devices: Sequence[Listed], environment: Mapping[str, str]) -> Sequence[Listed]:
    """Return ``devices`` with the names that Intel's runtime gives them: 0, 1, 2 …, or card and tile (``0.1``)."""
    if environment.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE":
        return devices
    return [replace(it, name=str(number), whole=it.name) for number, it in enumerate(devices)]


def _first_number(text: str) -> int:
    """Return the first whole number in ``text``, such as ``143771 MiB``; 0 if there is no number."""
    match = re.search(_NUMBER, text)
    return int(match[0]) if match else 0
