"""The parts of DTensors that this instance holds: popdist adds, compares and sends these like plain tensors."""

import sys
from typing import Any

import torch
from torch import Tensor


def is_distributed(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # loaded by whoever makes one, and by nobody else
    return module is not None and isinstance(tensor, module.DTensor)


def is_fully_sharded(module: object) -> bool:
    """Whether ``fully_shard`` was called on ``module``."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def local_part(tensor: Any) -> Tensor:  # noqa: ANN401 - torch's stubs do not know a DTensor's methods
    """The part of a DTensor that is here, in the same memory and without gradient; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return] # a tensor
    with torch.no_grad():
        part = tensor.detach().to_local()
        # what a collective still writes is of another class
        return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return] # as above


def part_itself(tensor: Any) -> Tensor:  # noqa: ANN401 - as above
    """The tensor that a DTensor holds the part in which is here; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return] # a tensor
    names, _ = tensor.__tensor_flatten__()
    return next(it for name in names if isinstance(it := getattr(tensor, name), Tensor))


def local_gradient(parameter: Any) -> Tensor | None:  # noqa: ANN401 - as above
    """The part of the gradient that is here; one that is placed otherwise than its parameter is first moved there.

    All instances of the parameter's mesh call it, for their parameters in one order.
    """
    gradient = parameter.grad
    if gradient is None or not is_distributed(gradient):
        return gradient  # type: ignore[no-any-return] # as above
    if is_distributed(parameter) and gradient.placements != parameter.placements:
        with torch.no_grad():
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def placed_as(parameter: Any, part: Tensor) -> Tensor:  # noqa: ANN401 - as above
    """``part`` as the part of a tensor that is placed as ``parameter``, in the same memory."""
    if not is_distributed(parameter):
        return part
    whole: Tensor = type(parameter).from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole
