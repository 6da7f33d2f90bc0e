"""The accelerators of torch: the only module of popdist that treats the accelerators of makers differently.

Everywhere else an accelerator is a ``torch.device`` whose type is not ``cpu``. Streams and events are the classes
of ``torch.accelerator``. A function here initializes an accelerator only if its docstring says so.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from popdist.errors import BackendError
from popdist.ground import torch_private, torch_private_groups
from popdist.ground.accelerators import TYPES
from popdist.ground.contract import Contract

_DIRECT: Final = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
"""The backends of torch.distributed that send directly between accelerators, with the names of their classes."""

IDENTITY_BYTES: Final = 16


def found_type() -> str | None:
    """Return the device type of the accelerator that this torch is built for; None for a CPU-only torch."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises an error if it finds no device
        return None
    return None if found is None else found.type


def num_devices() -> int:
    """Return the number of accelerators that this process can see."""
    found = found_type()
    return 0 if found is None else int(torch.get_device_module(found).device_count())


def type_in_use() -> str | None:
    """Return the device type of the accelerator that this process has initialized; None if it initialized none."""
    found = found_type()
    if found is None:
        return None
    is_initialized = getattr(torch.get_device_module(found), "is_initialized", None)
    is_used = num_devices() > 0 if is_initialized is None else is_initialized()
    return found if is_used else None


def devices_of(contract: Contract, *, are_dealt: bool) -> tuple[torch.device, ...]:
    """Return the accelerators of an instance, or the CPU if there are none; see `popdist.devices()`. If no
    launcher has assigned accelerators, the instances of a host use the accelerators in ascending order.
    """
    if not are_dealt:
        num_needed = max(1, contract.ipus_per_replica // contract.parallelism.instances_per_replica)
        first = contract.local_instance_index * num_needed
        ordinals = tuple(range(first, min(first + num_needed, num_devices())))
    elif contract.devices and (
        max(contract.devices) >= num_devices() or contract.device_type not in ("", found_type())
    ):
        given = f"{contract.device_type or 'accelerator'} {', '.join(map(str, contract.devices))}"
        seen = f"{num_devices()} of type {found_type()}" if num_devices() else "none"
        raise BackendError(
            f"poprun gave this instance {given}, and torch {torch.__version__} sees {seen}: install a torch that "
            "is built for the accelerator and the driver of this machine (`poprun --doctor` tells which), or "
            "compute on the CPU: poprun --offline-mode"
        )
    else:
        ordinals = contract.devices
    return tuple(torch.device(str(found_type()), it) for it in ordinals) or (torch.device("cpu"),)


def ask_memory(name: str, device: torch.device) -> int:
    """Call torch's function ``name``, such as ``memory_reserved``, for ``device``, and return its result.

    torch 2.9 has such functions in ``torch.accelerator``.

    Raises:
        BackendError: If neither module has the function.
    """
    for owner in (torch.get_device_module(device), torch.accelerator):
        if hasattr(owner, name):
            return cast("int", getattr(owner, name)(device))
    raise BackendError(torch_private.needs(2, 9, f"to call {name} of {device.type}"))


@contextmanager
def in_stream(stream: torch.Stream) -> Iterator[None]:
    """A context in which this thread computes in ``stream``; before torch 2.8 a stream itself is no context."""
    number, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(number)


def use_device_of(module: nn.Module) -> None:
    """Make the accelerator that has the first parameter of ``module`` the default device; do nothing for the CPU.

    Each instance sees the accelerators of all instances: without this call ``.cuda()`` and the program's own
    kernels use the first accelerator.
    """
    device = next((it.device for it in module.parameters()), torch.device("cpu"))
    if device.type == found_type() and device.index is not None:
        torch.accelerator.set_device_index(device)


def name_of(device: torch.device) -> str:
    """Return the name that the maker gives the model of ``device``; the device type if there is no such name."""
    find_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device.type if find_name is None else find_name(device))


def identity_of(device: torch.device, host: str) -> bytes:
    """Return 16 bytes that identify ``device`` among the devices of all hosts; initializes ``device``."""
    find_properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = None if find_properties is None else find_properties(device)
    # NCCL identifies a device by its place on the bus, and two slices of one GPU have the same place
    places = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    named = getattr(properties, "uuid", device.index) if None in places else places
    return hashlib.blake2b(f"{host} {device.type} {named}".encode(), digest_size=IDENTITY_BYTES).digest()


def collectives_of(device_type: str) -> str:
    """Return the backend of torch.distributed that sends between accelerators of a type; "" if there is none."""
    try:
        name = dist.get_default_backend_for_device(device_type)
    except ValueError:  # torch raises this error for a device that registers no backend
        return ""
    return name if name in _DIRECT and hasattr(dist, _DIRECT[name]) else ""


def connect(device_type: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect all ranks' accelerators by NCCL or XCCL, and initialize this rank's; return torch's backend."""
    return torch_private_groups.connect_direct(
        getattr(dist, _DIRECT[collectives_of(device_type)]), store, rank, size, timeout
    )


def stop_choosing_by_time() -> None:
    """Make cuDNN choose algorithms by shapes, not by measured time, because times differ between processes."""
    torch.backends.cudnn.benchmark = False


def arithmetic_in_words() -> str:
    """Return settings of CUDA's convolutions, such as ``, convolutions in TF32``; empty if torch has no CUDA."""
    if found_type() != "cuda":
        return ""
    cudnn = torch.backends.cudnn
    return f", convolutions {'in TF32' if cudnn.allow_tf32 else 'whole'}{' chosen by time' * cudnn.benchmark}"


def dispatch_key(device_type: str) -> str:
    """Return torch's dispatch key for devices of the type ``device_type``."""
    return device_type.upper() if device_type in TYPES else "PrivateUse1"


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's operations on ``device`` are now captured, as in a CUDA graph, to run later."""
    is_recorded = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return is_recorded is not None and bool(is_recorded())


def random_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of ``device`` as a CPU tensor."""
    state: Tensor = torch.get_device_module(device).get_rng_state(*_number(device))
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the default generator of ``device`` to ``state``."""
    torch.get_device_module(device).set_rng_state(state, *_number(device))


@contextmanager
def forked_random_states(seed: int | None = None) -> Iterator[None]:
    """A context in which torch's default generators (of the CPU and of all accelerators in use) begin with
    ``seed``, if given; its end restores the states of the generators.
    """
    found = type_in_use()
    devices = [] if found is None else [torch.device(found, ordinal) for ordinal in range(num_devices())]
    states = [(device, random_state(device)) for device in devices]
    try:
        with torch.random.fork_rng(()):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                for device in devices:
                    set_random_state(device, torch.Generator(device).manual_seed(seed).get_state())
            yield
    finally:
        for device, state in states:
            set_random_state(device, state)


def _number(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments of torch's functions for ``device``: ``device``, or none on a Mac."""
    return () if device.type == "mps" else (device,)
