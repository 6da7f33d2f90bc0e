"""A machine as a planner sees it: its devices, their memory and speed, and the links between them.

All figures are those of data sheets; `constants` says how much of them programs reach.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal, TypeGuard

from popsize.errors import MachineError, shown

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "tf32", "fp16", "bf16", "fp8")

GIGA: Final = 10**9
TERA: Final = 10**12
GIB: Final = 2**30


def gib(size: float) -> str:
    """Bytes in GiB: two digits behind the point, or three that are not 0."""
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """One accelerator, or the share of a CPU that one instance has.

    Attributes:
        name: Such as ``A100-80GB``.
        memory_bytes: Its own memory, as much as a program can use.
        flops: Operations a second of its matrix units, for each precision.
        memory_bytes_per_second: How fast its memory is read.
        launches_ahead: Whether a CPU starts its kernels one by one, ahead of it, as those of a GPU.
        operator_seconds: What an operation costs beside its work, where nothing runs ahead: on a CPU.
        streaming_bytes: Slower memory beside it, which a program can use for what waits.
        streaming_bytes_per_second: How fast that is read.
        source: Where the figures stand.
    """

    name: str
    memory_bytes: float
    flops: Mapping[str, float]
    memory_bytes_per_second: float
    launches_ahead: bool = False
    operator_seconds: float = 0.0
    streaming_bytes: float = 0.0
    streaming_bytes_per_second: float = 0.0
    source: str = ""

    def precision(self, asked: str | None) -> Precision:
        """``asked`` if the device has it; with None its usual one, of 16 bits if it has those.

        Raises:
            MachineError: The device has no units for it.
        """
        known = [name for name in PRECISIONS if name in self.flops]
        usual: tuple[Precision, ...] = ("bf16", "fp16")
        if asked is None:
            return next(name for name in (*usual, *known) if name in known)
        if asked not in known:
            raise MachineError(f"precision={asked}: it is one of {', '.join(known)} on {self.name}")
        return next(name for name in known if name == asked)

    def flops_at(self, precision: Precision) -> float:
        """Operations a second in ``precision``; those of fp32 for what the device has no unit for."""
        order = {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16", "fp16"), "tf32": ("tf32",)}.get(
            precision, (precision,)
        )
        return next((self.flops[name] for name in (*order, "fp32") if name in self.flops), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Devices in hosts, and the links between them.

    Attributes:
        name: Such as ``64xA100-80GB`` or ``POD64``.
        device: What each device is.
        num_devices: How many there are in all.
        devices_per_host: How many share the fast links.
        link_bytes_per_second: What one device sends to its neighbours in the host, one way.
        network_bytes_per_second: What one host sends to others, all its network cards together, one way.
        collective_seconds: What a collective of two devices waits for beside its bytes; 0: as on GPUs.
        source: Where the figures of the links stand.
    """

    name: str
    device: Device
    num_devices: int
    devices_per_host: int
    link_bytes_per_second: float
    network_bytes_per_second: float
    collective_seconds: float = 0.0
    source: str = ""


def _gpu(name: str, gib: float, tflops: Mapping[str, float], gigabytes: float, source: str) -> Device:
    return Device(
        name=name,
        memory_bytes=gib * GIB,
        flops=MappingProxyType({precision: value * TERA for precision, value in tflops.items()}),
        memory_bytes_per_second=gigabytes * GIGA,
        launches_ahead=True,
        streaming_bytes=64 * GIB,
        streaming_bytes_per_second=25 * GIGA,
        source=source,
    )


_AMPERE: Final = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_HOPPER: Final = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_A100: Final = "NVIDIA A100 data sheet; memory as nvidia-smi says it"
_H100: Final = "NVIDIA H100 data sheet; memory as nvidia-smi says it"

DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        "A100-40GB": _gpu("A100-40GB", 39.4, _AMPERE, 1555, _A100),
        "A100-80GB": _gpu("A100-80GB", 79.2, _AMPERE, 2039, _A100),
        "H100-80GB": _gpu("H100-80GB", 79.1, _HOPPER, 3350, _H100),
        "H100-96GB": _gpu("H100-96GB", 95.0, _HOPPER, 2400, "torchtitan's notes on its benchmarks"),
        "H200-141GB": _gpu("H200-141GB", 139.8, _HOPPER, 4800, "NVIDIA H200 data sheet"),
        "GC200": Device(
            name="GC200",
            memory_bytes=900e6,
            flops=MappingProxyType({"fp32": 62.5 * TERA, "fp16": 250 * TERA}),
            memory_bytes_per_second=47.5 * TERA,
            streaming_bytes=64 * GIB,
            streaming_bytes_per_second=20 * GIGA,
            source="Graphcore IPU-M2000 data sheet: 900 MB in-processor, 250 TFLOP/s FP16.16, 256 GB for four",
        ),
    }
)
"""The devices that a name is enough for."""

_ALIASES: Final = MappingProxyType(
    {"A100": "A100-80GB", "H100": "H100-80GB", "H200": "H200-141GB", "IPU": "GC200"}
)

_LINKS: Final[Mapping[str, tuple[int, float, float, str]]] = MappingProxyType(
    {
        "A100": (
            8,
            300 * GIGA,
            100 * GIGA,
            "HGX A100: NVLink 600 GB/s both ways; eight network cards of 100 Gbit/s",
        ),
        "H100": (8, 450 * GIGA, 400 * GIGA, "DGX H100: NVLink 900 GB/s both ways, eight cards of 400 Gbit/s"),
        "H200": (8, 450 * GIGA, 400 * GIGA, "DGX H200: NVLink 900 GB/s both ways, eight cards of 400 Gbit/s"),
        "GC200": (
            64,
            160 * GIGA,
            320 * GIGA,
            "IPU-POD64: ten IPU-Links of 32 GB/s both ways; 100 Gbit/s a machine between pods",
        ),
    }
)
"""For each kind of device: how many share the fast links, bytes a second of a link and of a host, source."""

_MACHINE_IPUS: Final = 4
_LINKED_IPUS: Final = 64


def named_machine(text: str, machines: Mapping[str, Machine] = MappingProxyType({})) -> Machine:
    """The machine that ``text`` names: ``64xA100-80GB``, ``POD64``, ``4xPOD64``, or one of ``machines``.

    Raises:
        MachineError: It names none; the nearest names are said.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.+)", text.strip())
    count, name = (int(match[1] or 0), match[2]) if match else (0, text)
    if match and match[1] and count < 1:
        raise MachineError(f"{text!r} has no device: give a count of at least 1, such as 8x{name}")
    if name in machines:
        known = machines[name]
        return replace(known, name=text, num_devices=count or known.num_devices)
    if pod := re.fullmatch(r"POD_?(\d+)", name, re.IGNORECASE):
        return _pod(text, int(pod[1]) * (count or 1), int(pod[1]))
    upper = {key.upper(): key for key in (*DEVICES, *_ALIASES)}
    key = upper.get(name.upper())
    if key is None:
        near = get_close_matches(name.upper(), [*upper, *machines, "POD16", "POD64", "POD128", "POD256"], 3, 0.4)
        raise MachineError(
            f"no machine is called {name!r}: nearest are {', '.join(near) or ', '.join(DEVICES)}; "
            "a YAML file adds others"
        )
    device = DEVICES[_ALIASES.get(key, key)]
    return _of_device(text, device, count or 1)


def _of_device(name: str, device: Device, num_devices: int) -> Machine:
    """Hosts of the usual size with ``num_devices`` devices."""
    per_host, link, network, source = _LINKS[device.name.split("-")[0]]
    return Machine(
        name=name,
        device=device,
        num_devices=num_devices,
        devices_per_host=per_host,
        link_bytes_per_second=link,
        network_bytes_per_second=network,
        source=source,
    )


def _pod(name: str, num_devices: int, size: int) -> Machine:
    """Pods of ``size`` IPUs; IPU-Links connect 64 at most, a network the rest."""
    if size < _MACHINE_IPUS or size % _MACHINE_IPUS:
        raise MachineError(
            f"{name!r} is no pod: an IPU-Machine has four IPUs, so pods are POD4, POD16, POD64, POD128, POD256"
        )
    return replace(_of_device(name, DEVICES["GC200"], num_devices), devices_per_host=min(size, _LINKED_IPUS))


_LARGEST: Final = 10**12
FIGURES: Final[Mapping[str, tuple[float, float | None]]] = MappingProxyType(
    {
        "memory_gib": (1e-6, None),
        "memory_gb_per_second": (1e-6, None),
        "devices_per_host": (1, 1),
        "link_gb_per_second": (1e-6, None),
        "network_gb_per_second": (1e-6, None),
        "streaming_gib": (0, 0),
        "streaming_gb_per_second": (0, 0),
        "num_devices": (1, 1),
        "operator_seconds": (0, 0),
        "collective_seconds": (0, 0),
    }
)
"""Figures of a machine in a YAML file beside ``tflops``: the least, and the default; None: it is needed."""

_WHOLE: Final = ("devices_per_host", "num_devices")


def machines_of(tables: object, origin: str) -> dict[str, Machine]:
    """The machines that a YAML file describes, by name.

    Each has ``tflops`` (a number, or one for each precision) and those of `FIGURES` that have no default;
    ``operator_seconds`` is that of a device that no CPU launches kernels for.

    Raises:
        MachineError: It describes no machines, or one lacks something.
    """
    if not isinstance(tables, dict) or not tables:
        raise MachineError(f"{origin}: no machines are described; give a name and its figures below it")
    return {str(name): _described(str(name), table, origin) for name, table in tables.items()}


def _described(name: str, table: object, origin: str) -> Machine:
    """One machine of a YAML file."""
    if not name.isprintable():
        raise MachineError(f"{origin}: {name!r} has letters that cannot be printed: give another name")
    if not isinstance(table, dict):
        raise MachineError(f"{origin}: {name} has no figures below it")
    if unknown := [str(key) for key in table if key not in FIGURES and key != "tflops"]:
        raise MachineError(
            f"{origin}: {name} has {', '.join(unknown)}, which says nothing about a machine: "
            f"figures are tflops, {', '.join(FIGURES)}"
        )
    figures = {key: _figure(table, key, f"{origin}: {name}") for key in FIGURES}
    if figures["streaming_gib"] and not figures["streaming_gb_per_second"]:
        raise MachineError(f"{origin}: {name} has streaming_gib and needs streaming_gb_per_second")
    device = Device(
        name=name,
        memory_bytes=figures["memory_gib"] * GIB,
        flops=MappingProxyType(_speeds(table.get("tflops"), f"{origin}: {name}")),
        memory_bytes_per_second=figures["memory_gb_per_second"] * GIGA,
        launches_ahead="operator_seconds" not in table,
        operator_seconds=figures["operator_seconds"],
        streaming_bytes=figures["streaming_gib"] * GIB,
        streaming_bytes_per_second=figures["streaming_gb_per_second"] * GIGA,
        source=origin,
    )
    return Machine(
        name=name,
        device=device,
        num_devices=int(figures["num_devices"]),
        devices_per_host=int(figures["devices_per_host"]),
        link_bytes_per_second=figures["link_gb_per_second"] * GIGA,
        network_bytes_per_second=figures["network_gb_per_second"] * GIGA,
        collective_seconds=figures["collective_seconds"],
        source=origin,
    )


def _figure(table: Mapping[str, object], key: str, place: str) -> float:
    """One of `FIGURES` of a machine in a YAML file."""
    least, default = FIGURES[key]
    value = table.get(key, default)
    whole = key in _WHOLE
    if not _is_number(value, least) or (whole and value != int(value)):
        word = "a whole number" if whole else "a number"
        raise MachineError(f"{place} needs {key}, {word} of {least:g} or more; it is {shown(value)}")
    return float(value)


def _speeds(tflops: object, place: str) -> dict[str, float]:
    """Operations a second for each precision, from a number for all, or one for each."""
    speeds: dict[str, Any] = tflops if isinstance(tflops, dict) else dict.fromkeys(PRECISIONS, tflops)
    if not speeds or not all(key in PRECISIONS and _is_number(value, 1e-9) for key, value in speeds.items()):
        raise MachineError(f"{place} needs tflops: a number, or one for each of {', '.join(PRECISIONS)}")
    return {key: value * TERA for key, value in speeds.items()}


def _is_number(value: object, least: float) -> TypeGuard[float]:
    """Whether a value is a number from ``least`` on that a machine could have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _LARGEST
