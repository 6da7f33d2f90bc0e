"""The device that a program of the check computes on."""

import json
import os
from importlib import import_module
from typing import Any

import torch
from gpu_check.jobs import DEVICE, RANKS_SHARE, RESULT

import popdist
from popdist.ground.accelerators import accelerator
from popdist.job import context


def chosen_device() -> torch.device:
    """Return the device of this instance, after a line that says who chose it.

    Where poprun dealt no device of the type that is checked, the check names one, and has popdist return it.
    """
    if module := os.environ.get("GPU_CHECK_DEVICE_MODULE"):
        import_module(module)
    if RANKS_SHARE in os.environ:
        connect_by_nccl(os.environ.get("RANK", "0"))
    asked = os.environ.get(DEVICE, "cpu")
    try:
        found = popdist.device()
    except popdist.BackendError:
        found = None
    chosen_by = "poprun"
    if found is None or found.type != asked:
        found, chosen_by = torch.device("cpu") if asked == "cpu" else torch.device(asked, 0), "the check"
        vars(context)["devices"] = lambda: (found,)
    print(f"device {found}, chosen by {chosen_by}", flush=True)
    return found


def connect_by_nccl(rank: str) -> None:
    """Have NCCL, and popdist over NCCL, take each rank for a host of its own, whose GPU is no other rank's.

    NCCL compares hosts before it compares devices.
    """
    os.environ |= {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
    }
    identity = rank.encode().rjust(accelerator.IDENTITY_BYTES, b"#")
    vars(accelerator)["identity_of"] = lambda _device, _host: identity


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def print_result(**values: Any) -> None:
    """Print the result of the job from instance 0."""
    if popdist.is_main():
        print(f"{RESULT}{json.dumps(values)}", flush=True)
