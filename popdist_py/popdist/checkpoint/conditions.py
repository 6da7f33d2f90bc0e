"""What the bits of a run depend on beside samples and weights: recorded in checkpoints, compared on loading."""

import platform
from pathlib import Path
from typing import Final

import torch

from popdist import contract, queries

_CPU_NAMES: Final = ("model name", "cpu model", "CPU part")
"""What different kernels call it in ``/proc/cpuinfo``."""

_CPU_INFO: Final = Path("/proc/cpuinfo")

Conditions = dict[str, str | int]
"""Each condition in words, such as ``threads per replica``, and what it is."""


def current_conditions() -> Conditions:
    """Those of this instance now."""
    device = queries.device()
    return {
        "popdist": contract.VERSION,
        "torch": torch.__version__,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CPU": _cpu_kind(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads per replica": torch.get_num_threads(),
        "algorithms": "deterministic" if torch.are_deterministic_algorithms_enabled() else "any",
        "replicas": queries.num_replicas(),
    }


def differences(before: Conditions, now: Conditions) -> list[str]:
    """Each condition that has changed, in words; one that only one side knows is not compared."""
    return [
        f"{name}: {before[name]} then, {now[name]} now"
        for name in now
        if name in before and before[name] != now[name]
    ]


def _cpu_kind() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    kinds = (value.strip() for name, _, value in pairs if name.strip() in _CPU_NAMES)
    return next(kinds, platform.machine())
