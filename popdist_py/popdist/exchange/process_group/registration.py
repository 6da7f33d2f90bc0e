"""The registration of the process group's backend ``popdist`` with torch.distributed.

When torch is imported, torch calls :func:`register` through ``popdist_backend``. Every program with torch pays for
this call, so nothing here opens or starts anything.
"""

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from popdist.ground.accelerators import TYPES
from popdist.ground.installation.torch_found import trouble_of_torch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

NAME: Final = "popdist"

_INSTANCES_PER_REPLICA: Final = "POPDIST_NUM_INSTANCES_PER_REPLICA"
"""A variable's name in `popdist.ground.contract`, repeated, because few programs need to import that module."""


def register() -> None:
    """Register the backend, so that ``init_process_group("popdist")`` works; a second call does nothing. Raises
    ImportError if popdist cannot train with this torch.
    """
    import torch
    from torch import distributed as dist

    if trouble := trouble_of_torch(torch.__version__, has_distributed=dist.is_available()):
        raise ImportError(trouble)
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", *TYPES])
    if _INSTANCES_PER_REPLICA in os.environ:
        remember_wrappers()


@cache
def remember_wrappers() -> "WeakSet[nn.Module]":
    """Record all DistributedDataParallel and FullyShardedDataParallel from the first call on; return the set."""
    from torch.nn.modules.module import register_module_module_registration_hook
    from torch.nn.parallel import DistributedDataParallel

    wrappers: WeakSet[nn.Module] = WeakSet()

    def remember(wrapper: "nn.Module", _name: str, _module: object) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # this module is loaded if any such wrapper exists
        is_fsdp = fsdp is not None and isinstance(wrapper, fsdp.FullyShardedDataParallel)
        if is_fsdp or isinstance(wrapper, DistributedDataParallel):
            wrappers.add(wrapper)

    register_module_module_registration_hook(remember)
    return wrappers


def _create(options: Any, _backend_options: object) -> "ProcessGroup":
    # imported here, because only programs that make a group need these modules
    import torch
    from torch import distributed as dist

    from popdist.exchange.process_group.torch_process_group import PopdistProcessGroup
    from popdist.ground.accelerators import accelerator
    from popdist.ground.contract import read_share_tensors
    from popdist.ground.environments import Launcher, detect

    device, found, warns = None, accelerator.found_type(), True
    if accelerator.num_devices():  # asked only now, because asking at the start would take long
        environment = detect(os.environ)
        warns = not environment.contract.shares_device
        dealt = accelerator.devices_of(environment.contract, are_dealt=environment.launcher is Launcher.POPRUN)[0]
        device = (
            dealt if dealt.type == found else torch.device(str(found), torch.accelerator.current_device_index())
        )
    dist.Backend.backend_capability[NAME] = ["cpu"] if device is None else ["cpu", device.type]
    return PopdistProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        timeout=options.timeout,
        members=tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        device=device,
        warns_of_sharing=warns,
        share_tensors=read_share_tensors(os.environ),
    )
