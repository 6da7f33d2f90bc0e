"""Descriptions of machines: their devices, memory, speeds, and the links between devices.

All figures come from data sheets. The module `constants` has the shares of these figures that programs reach.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal, TypeGuard, get_args

from popsize.errors import MachineError, shown

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)

GIGA: Final = 10**9
TERA: Final = 10**12
GIB: Final = 2**30


_SIZES: Final = {
    "b": 1,
    **{name: 1000**power for power, name in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{name: 1024**power for power, name in enumerate(("kib", "mib", "gib", "tib"), 1)},
}


def bytes_of(text: str, unit: str = "b") -> int | None:
    """Return the bytes of a size such as ``2 GB``; ``unit`` is the default unit. None if ``text`` is no size."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    size = _SIZES.get((match[2] or unit).lower()) if match else None
    return None if match is None or size is None else int(float(match[1]) * size) or None


def gib(size: float) -> str:
    """Return ``size`` bytes as a number of GiB in text, such as ``11.80`` or ``0.0123``."""
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """The memory and the speeds of one GPU, IPU, or share of a CPU that one instance uses."""

    name: str  # such as ``A100-80GB``
    memory_bytes: float  # the device's own memory that a program can use
    flops: Mapping[str, float]  # operations per second of the matrix units, for each precision
    memory_bytes_per_second: float  # how fast the device's own memory is read
    launches_ahead: bool = False  # whether a CPU launches kernels ahead of the device, as for a GPU
    operator_seconds: float = 0.0  # overhead of each operation if nothing launches ahead, as on a CPU
    streaming_bytes: float = 0.0  # slower memory beside the device, for data that the device does not use now
    streaming_bytes_per_second: float = 0.0  # how fast the slower memory is read
    streaming_write_bytes_per_second: float = 0.0  # how fast the slower memory is written

    @property
    def is_compiled_for(self) -> bool:
        """Whether the device runs whole compiled programs, as an IPU does, and not single operations."""
        return not (self.launches_ahead or self.operator_seconds)

    def precision(self, asked: str | None) -> Precision:
        """Return the precision ``asked``, or the usual one for None. Raise MachineError if the device lacks it."""
        known = [name for name in PRECISIONS if name in self.flops]
        usual: tuple[Precision, ...] = ("bf16", "fp16", *PRECISIONS)
        chosen = next((name for name in usual if name in known and asked in (None, name)), None)
        if chosen is None:
            raise MachineError(f"precision={asked}: it is one of {', '.join(known)} on {self.name}")
        return chosen

    def flops_at(self, precision: Precision) -> float:
        """Return operations per second in ``precision``, or, if the device lacks it, in 16 or 32 bits."""
        order = {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16", "fp16")}.get(precision, (precision,))
        return next((self.flops[name] for name in (*order, "fp32") if name in self.flops), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """The devices of one or several equal hosts, and the speeds of the links between the devices."""

    name: str  # such as ``64xA100-80GB`` or ``POD64``
    device: Device  # the device; all devices are equal
    num_devices: int  # number of devices of all hosts together
    devices_per_host: int  # number of devices that the fast links connect
    link_bytes_per_second: float  # what one device can send to the other devices of its host, one way
    network_bytes_per_second: float  # what all network cards of one host together can send, one way
    collective_seconds: float = 0.0  # latency of a collective of two devices, without its bytes; 0: as on GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevices:
    """The devices for which a mapping was planned, as the mapping's file describes them."""

    machine: str
    device: str
    memory_gib: float  # of each device
    per_host: int
    are_gpus: bool

    def __post_init__(self) -> None:
        """Check the values. Raise ValueError if one has a type or range that poprun-size never writes."""
        are_numbers = _is_number(self.memory_gib, 0), _is_number(self.per_host, 1)
        if not (all(are_numbers) and {type(self.machine), type(self.device)} == {str}):
            raise ValueError(f"{shown(asdict(self))} are no devices")

    @classmethod
    def of(cls, machine: Machine) -> "PlannedDevices":
        """Return the description of ``machine`` for the file of a mapping."""
        device = machine.device
        return cls(
            machine=machine.name,
            device=device.name,
            memory_gib=device.memory_bytes / GIB,
            per_host=min(machine.devices_per_host, machine.num_devices),
            are_gpus=device.launches_ahead,
        )


_LARGEST: Final = 10**12
FIGURES: Final[Mapping[str, tuple[float, float | None]]] = {
    "memory_gib": (1e-6, None),
    "memory_gb_per_second": (1e-6, None),
    "devices_per_host": (1, 1),
    "link_gb_per_second": (1e-6, None),
    "network_gb_per_second": (1e-6, None),
    "streaming_gib": (0, 0),
    "streaming_gb_per_second": (0, 0),
    "streaming_write_gb_per_second": (0, 0),
    "num_devices": (1, 1),
    "operator_seconds": (0, 0),
    "collective_seconds": (0, 0),
}
"""The least value and the default of each number in a machine's description, except ``tflops``. None: no default.
"""

_WHOLE: Final = ("devices_per_host", "num_devices")


def machines_of(tables: object, origin: str) -> dict[str, Machine]:
    """Return, by name, the machines that ``tables``, the content of the YAML file ``origin``, describes.

    Each machine has ``tflops`` and `FIGURES`. If ``operator_seconds`` is given, nothing launches kernels ahead of
    the device. Raises MachineError, which names the file, if a machine is described wrongly.
    """
    if not isinstance(tables, dict) or not tables:
        raise MachineError(f"{origin}: no machines are described; give a name and its figures below it")
    return {str(name): _described(str(name), table, origin) for name, table in tables.items()}


def _described(name: str, table: object, origin: str) -> Machine:
    """Return the machine ``name``, which ``table``, a part of the YAML file ``origin``, describes."""
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
    written = figures["streaming_write_gb_per_second"] or figures["streaming_gb_per_second"]
    device = Device(
        name=name,
        memory_bytes=figures["memory_gib"] * GIB,
        flops=_speeds(table.get("tflops"), f"{origin}: {name}"),
        memory_bytes_per_second=figures["memory_gb_per_second"] * GIGA,
        launches_ahead="operator_seconds" not in table,
        operator_seconds=figures["operator_seconds"],
        streaming_bytes=figures["streaming_gib"] * GIB,
        streaming_bytes_per_second=figures["streaming_gb_per_second"] * GIGA,
        streaming_write_bytes_per_second=written * GIGA,
    )
    return Machine(
        name=name,
        device=device,
        num_devices=int(figures["num_devices"]),
        devices_per_host=int(figures["devices_per_host"]),
        link_bytes_per_second=figures["link_gb_per_second"] * GIGA,
        network_bytes_per_second=figures["network_gb_per_second"] * GIGA,
        collective_seconds=figures["collective_seconds"],
    )


def _figure(table: Mapping[str, object], key: str, place: str) -> float:
    """Return a machine's number called ``key`` in a YAML file, or its default. Raise MachineError if wrong."""
    least, default = FIGURES[key]
    value = table.get(key, default)
    whole = key in _WHOLE
    if not _is_number(value, least) or (whole and value != int(value)):
        word = "a whole number" if whole else "a number"
        raise MachineError(f"{place} needs {key}, {word} of {least:g} or more; it is {shown(value)}")
    return float(value)


def _speeds(tflops: object, place: str) -> dict[str, float]:
    """Return each precision's operations per second; ``tflops`` has one number for all, or one number for each."""
    speeds: dict[str, Any] = tflops if isinstance(tflops, dict) else dict.fromkeys(PRECISIONS, tflops)
    if not speeds or not all(key in PRECISIONS and _is_number(value, 1e-9) for key, value in speeds.items()):
        raise MachineError(f"{place} needs tflops: a number, or one for each of {', '.join(PRECISIONS)}")
    return {key: value * TERA for key, value in speeds.items()}


def _is_number(value: object, least: float) -> TypeGuard[float]:
    """Whether ``value`` is a number from ``least`` to 10^12, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _LARGEST


_GPU: Final = {"devices_per_host": 8, "streaming_gib": 64, "streaming_gb_per_second": 25}
_A100: Final = _GPU | {
    "tflops": {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0},
    # HGX A100: NVLink 600 GB/s both ways; eight network cards of 100 Gbit/s
    "link_gb_per_second": 300,
    "network_gb_per_second": 100,
}
_H100: Final = _GPU | {
    "streaming_gb_per_second": 50,  # of PCIe 5; the A100 has PCIe 4
    "tflops": {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9},
    # DGX H100 and DGX H200: NVLink 900 GB/s both ways; eight network cards of 400 Gbit/s
    "link_gb_per_second": 450,
    "network_gb_per_second": 400,
}
_GC200: Final = {
    # Graphcore's data sheet of the IPU-M2000: 900 MB in-processor, 250 TFLOP/s FP16.16, 256 GB for four
    "memory_gib": 900e6 / GIB,
    "tflops": {"fp32": 62.5, "fp16": 250},
    "memory_gb_per_second": 47_500,
    "streaming_gib": 64,
    "streaming_gb_per_second": 20,
    "operator_seconds": 0,
    # IPU-POD64: ten IPU-Links of 32 GB/s both ways; 100 Gbit/s a machine between pods
    "devices_per_host": 64,
    "link_gb_per_second": 160,
    "network_gb_per_second": 320,
}

DEVICES: Final[Mapping[str, Machine]] = machines_of(
    {
        # Speeds are from NVIDIA's data sheets. The memory is the memory that nvidia-smi prints.
        "A100-40GB": _A100 | {"memory_gib": 39.4, "memory_gb_per_second": 1555},
        "A100-80GB": _A100 | {"memory_gib": 79.2, "memory_gb_per_second": 2039},
        "H100-80GB": _H100 | {"memory_gib": 79.65, "memory_gb_per_second": 3350},
        # These are PCIe cards: NVLink connects two cards with 600 GB/s both ways.
        "H100-PCIe-80GB": _H100
        | {
            "tflops": {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0},
            "memory_gib": 79.65,
            "memory_gb_per_second": 2000,
            "link_gb_per_second": 300,
        },
        "H100-NVL-94GB": _H100
        | {
            "tflops": {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5},
            "memory_gib": 93.58,
            "memory_gb_per_second": 3900,
            "link_gb_per_second": 300,
        },
        # The source is torchtitan's notes on its benchmarks.
        "H100-96GB": _H100 | {"memory_gib": 95.0, "memory_gb_per_second": 2400},
        "H200-141GB": _H100 | {"memory_gib": 139.8, "memory_gb_per_second": 4800},
        "GC200": _GC200,
    },
    "popsize",
)
"""The devices that poprun-size knows by name, each as a machine of one device with the links of a usual host."""


def is_called(name: str, model: str) -> bool:
    """Return whether ``model``, a driver's name such as ``A100-SXM4-80GB``, means the known device ``name``."""
    kind, model_form, form = name.partition("-")[0], _form_of(model), _form_of(name)
    has_form = any(_form_of(other) == model_form for other in DEVICES if other.startswith(f"{kind}-"))
    return form == (model_form if has_form else "") and re.search(rf"\b{kind}\b", model) is not None


def _form_of(name: str) -> str:
    """Return the form of a device, ``PCIe`` or ``NVL``, that its name contains; "" if it contains none."""
    match = re.search(r"\b(PCIe|NVL)\b", name)
    return match[0] if match else ""


_ALIASES: Final = {"A100": "A100-80GB", "H100": "H100-80GB", "H200": "H200-141GB", "IPU": "GC200"}
_PODS: Final = ("POD16", "POD64", "POD128", "POD256")
_MACHINE_IPUS: Final = 4
_LINKED_IPUS: Final = 64
"""The largest number of IPUs that IPU-Links connect. A network connects more IPUs than this number."""


def named_machine(text: str, machines: Mapping[str, Machine] = MappingProxyType({})) -> Machine:
    """Return the machine called ``text``, such as ``64xA100-80GB`` or ``4xPOD64``, or a machine in ``machines``.

    Raises MachineError if no machine has the name.
    """
    match = re.fullmatch(r"(?:(\d{1,15})\s*[x*]\s*)?(.+)", text.strip())
    number, name = (match[1], match[2]) if match else (None, text)
    if number is not None and not int(number):
        raise MachineError(f"{text!r} has no device: give a count of at least 1, such as 8x{name}")
    known = {key.upper(): machine for key, machine in DEVICES.items()}
    known |= {alias: DEVICES[key] for alias, key in _ALIASES.items()}
    machine = machines.get(name) or known.get(name.upper())
    if machine is None and (pod := re.fullmatch(r"POD_?(\d{1,15})", name, re.IGNORECASE)):
        size = int(pod[1])
        if size < _MACHINE_IPUS or size % _MACHINE_IPUS:
            raise MachineError(
                f"{text!r} is no pod: an IPU-Machine has four IPUs, so pods are POD4, {', '.join(_PODS)}"
            )
        return replace(
            DEVICES["GC200"],
            name=text,
            num_devices=size * int(number or 1),
            devices_per_host=min(size, _LINKED_IPUS),
        )
    if machine is None:
        near = get_close_matches(name.upper(), [*known, *machines, *_PODS], 3, 0.4) or DEVICES
        raise MachineError(
            f"no machine is called {name!r}: nearest are {', '.join(near)}; a YAML file adds others"
        )
    return replace(machine, name=text, num_devices=int(number or machine.num_devices))
