"""The registration of the backend ``popdist`` with torch.

When torch is imported, it has ``popdist_backend`` call :func:`register`: every program with torch pays for it, so
nothing here opens or starts anything.
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
"""As `popdist.ground.contract` has it, which few programs that import torch need."""


def register() -> None:
    """Make ``init_process_group("popdist")`` work; does nothing the second time.

    Raises:
        ImportError: If popdist cannot train with this torch.
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
    """Return every module that is made from now on in which torch adds up gradients: DDP's, and FSDP's of old."""
    from torch.nn.modules.module import register_module_module_registration_hook
    from torch.nn.parallel import DistributedDataParallel

    made: WeakSet[nn.Module] = WeakSet()

    def remember(wrapper: "nn.Module", _name: str, _module: object) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # loaded by whoever makes such a wrapper
        is_fsdp = fsdp is not None and isinstance(wrapper, fsdp.FullyShardedDataParallel)
        if is_fsdp or isinstance(wrapper, DistributedDataParallel):
            made.add(wrapper)

    register_module_module_registration_hook(remember)
    return made


def _create(options: Any, _backend_options: object) -> "ProcessGroup":
    # Only programs that make a group need these.
    import torch
    from torch import distributed as dist

    from popdist.exchange.process_group.torch_process_group import PopdistProcessGroup
    from popdist.ground.accelerators import accelerator
    from popdist.ground.contract import read_share_tensors
    from popdist.ground.environments import Launcher, detect

    device, found, warns = None, accelerator.found_type(), True
    if accelerator.num_devices():  # to ask that at the start would take long
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
