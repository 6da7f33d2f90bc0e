"""What torch calls by another name since 2.12, under the newer name in every torch."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

_OLDER: Final = {
    "all_gather_single": ("all_gather_into_tensor", "_allgather_base"),  # of the module, and of a group
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "all_to_all_single": ("alltoall_base",),
    "reduce_scatter_single": ("reduce_scatter_tensor", "_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
}

VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

HAS_MUON: Final = hasattr(torch.optim, "Muon")
"""Whether torch has this optimizer."""

HAS_GLOO_LISTS: Final = VERSION >= (2, 12)
"""Whether gloo exchanges lists of tensors; the laws of what popdist and gloo both do leave them out where not."""

HAS_OPERATORS: Final = VERSION >= (2, 11)
"""Whether a call of a collective's operator itself reaches a group of popdist's."""

HAS_FAKE_COLLECTIVES: Final = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")
"""Whether torch has collectives of fake tensors."""

HAS_GLOO_REDUCE_SCATTER: Final = VERSION > (2, 6)
"""Whether gloo reduces and scatters a list of tensors."""

HAS_FSDP_ON_CPU: Final = VERSION > (2, 6)
"""Whether FSDP2 runs on a CPU: in torch 2.6 it asks the CPU's stream for an event, and there is none."""

HAS_SWAPPED_MEMORY: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether the memory of a tensor can be moved."""

HAS_FSDP_MEMORY: Final = hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm")
"""Whether FSDP2 asks a group for memory."""

IS_ASYNC_KNOWN: Final = hasattr(distributed.AllreduceOptions(), "asyncOp")
"""Whether torch tells a group which calls are asynchronous: else all are taken to be."""

needs_fsdp = pytest.mark.skipif(
    not HAS_FSDP_ON_CPU, reason=f"FSDP2 on a CPU needs torch 2.7; this is {torch.__version__}"
)

Law = TypeVar("Law", bound=Callable[..., object])


def where(has: bool) -> Callable[[Law], Law | None]:  # noqa: FBT001 - one of the constants above
    """Keep a law only where torch has what it is about."""
    return lambda law: law if has else None


def named(owner: object, name: str) -> Any:
    """What ``owner``, a module or a group of torch's, has by this name or by the older one."""
    return getattr(owner, next(it for it in (name, *_OLDER[name]) if hasattr(owner, it)))


all_gather_single: Any = named(distributed, "all_gather_single")
reduce_scatter_single: Any = named(distributed, "reduce_scatter_single")
