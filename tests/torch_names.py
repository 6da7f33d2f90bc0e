"""What torch calls by another name since 2.12, under the newer name in every torch."""

from typing import Any, Final

import torch
from torch import distributed

_OLDER: Final = {
    "all_gather_single": ("all_gather_into_tensor", "_allgather_base"),  # of the module, and of a group
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "all_to_all_single": ("alltoall_base",),
    "reduce_scatter_single": ("reduce_scatter_tensor", "_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
}

VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

HAS_GLOO_LISTS: Final = VERSION >= (2, 12)
"""Whether gloo exchanges lists of tensors; the laws of what popdist and gloo both do leave them out where not."""


def named(owner: object, name: str) -> Any:  # noqa: ANN401 - whatever torch has there
    """What ``owner``, a module or a group of torch's, has by this name or by the older one."""
    return getattr(owner, next(it for it in (name, *_OLDER[name]) if hasattr(owner, it)))


all_gather_single: Any = named(distributed, "all_gather_single")
reduce_scatter_single: Any = named(distributed, "reduce_scatter_single")
