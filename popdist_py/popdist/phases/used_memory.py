"""The memory that this process uses on the host, or on the device on which a model computes."""

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

import torch

from popdist.ground.accelerators import accelerator


def give_back_memory(device: torch.device) -> None:
    """Make malloc and the cache of torch return memory that is not in use to the operating system."""
    with suppress(AttributeError):  # another library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    if device.type != "cpu":
        empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of the peak memory use on ``device``, which :func:`peak_bytes` returns."""
    if device.type != "cpu":
        accelerator.ask_memory("reset_peak_memory_stats", device)
    else:
        with suppress(OSError):  # otherwise the peak is the peak of the process's whole life, which is not less
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory use of this process on ``device`` since the last :func:`reset_peak`, in bytes."""
    if device.type != "cpu":
        return accelerator.ask_memory("max_memory_reserved", device)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    rows = dict(row.split(":", 1) for row in status.splitlines() if ":" in row)
    return int(rows["VmHWM"].split()[0]) * 1024


def resident_bytes(device: torch.device) -> int:
    """Return the present memory use of this process on ``device``, in bytes."""
    if device.type != "cpu":
        return accelerator.ask_memory("memory_reserved", device)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
