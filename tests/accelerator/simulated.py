"""The module ``torch.simulated``: what torch, and programs, ask of the simulated accelerator.

To import this module makes the device type ``simulated`` known to torch. The environment variables
``SIMULATED_DEVICES`` and ``SIMULATED_MEMORY_BYTES`` say how many devices there are, and how much memory each has.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from tests.accelerator.build import library

DeviceLike: TypeAlias = torch.device | str | int | None

_initialized = False
"""torch's name for whether the device is in use."""

Event = partial(torch.Event, "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """What `get_device_properties` returns."""

    name: str
    total_memory: int  # in bytes
    multi_processor_count: int = 1


def _index_of(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether this process has begun to use a device."""
    return _initialized and not _is_in_bad_fork()


def _lazy_init() -> None:
    """Note that a device is used: torch 2.11 does not synchronize a device before it has called this function."""
    global _initialized  # noqa: PLW0603 - torch reads it
    _initialized = True


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.simulated.is_in_bad_fork())


def device_count() -> int:
    """Return the number of devices."""
    return int(torch.ops.simulated.num_devices())


def current_device() -> int:
    """Return the index of this thread's device."""
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    """Choose this thread's device."""
    torch.accelerator.set_device_index(_index_of(device))


@contextmanager
def device(chosen: DeviceLike) -> Iterator[None]:
    """Return a context in which this thread's device is the device ``chosen``."""
    before = current_device()
    set_device(chosen)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: DeviceLike = None) -> None:
    """Wait until all work of a device is done."""
    torch.accelerator.synchronize(_index_of(device))


def Stream(device: DeviceLike = None, priority: int = 0, **_others: Any) -> torch.Stream:  # noqa: N802
    """Return a new stream."""
    return torch.Stream(torch.device("simulated", _index_of(device)), priority=priority)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the current stream of this thread on a device."""
    return torch.accelerator.current_stream(_index_of(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream that is current where no program has chosen any."""
    kind: Any = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index_of(device), device_type=int(kind))


def set_stream(stream: torch.Stream) -> None:
    """Choose this thread's stream, and its device."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    """Return a context in which the stream ``chosen`` is this thread's current stream."""
    if chosen is None:
        yield
    else:
        with chosen:
            yield


def _generator(device: DeviceLike) -> torch.Generator:
    generator: torch.Generator = torch.ops.simulated.default_generator(_index_of(device))
    return generator


def get_rng_state(device: DeviceLike = "simulated") -> torch.Tensor:
    """Return the state of a device's generator."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "simulated") -> None:
    """Set the state of a device's generator."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state(i) for i in range(device_count())]


def manual_seed(seed: int) -> None:
    """Seed the generator of this thread's device."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for i in range(device_count()):
        _generator(i).manual_seed(seed)


def initial_seed() -> int:
    """Return the seed of the generator of this thread's device."""
    return _generator(None).initial_seed()


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device."""
    return get_device_properties(device).name


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return the properties of a device."""
    _free, total = mem_get_info(device)
    return DeviceProperties(name="Simulated accelerator", total_memory=total)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the number of bytes that are free, and that there are."""
    free, total = torch.accelerator.get_memory_info(_index_of(device))
    return free, total


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the number of bytes that tensors have."""
    return torch.accelerator.memory_allocated(_index_of(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes that tensors had at any time."""
    return torch.accelerator.max_memory_allocated(_index_of(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Forget the most bytes that tensors had."""
    torch.accelerator.reset_peak_memory_stats(_index_of(device))


def empty_cache() -> None:
    """Do nothing: a free block has no pages, or may be used again."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may use."""
    return [torch.bfloat16, torch.float16]


def _register() -> None:
    torch.ops.load_library(str(library()))
    rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", sys.modules[__name__])
    generate_methods_for_privateuse1_backend(for_storage=True)


_register()
