"""The local parts of DTensors, which popdist treats like plain tensors; dtype, shape and strides of tensors."""

import math
import sys
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


def is_distributed(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # this module is loaded if any DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def is_fully_sharded(module: object) -> bool:
    """Whether torch's ``fully_shard`` was called on ``module``."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def local_part(tensor: Any) -> Tensor:
    """Return the local part of a DTensor, in the same memory and without gradient; or any other tensor itself."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return] # a tensor
    with torch.no_grad():
        part = tensor.detach().to_local()
        # if a collective still writes the part, the part is of a class that has wait()
        return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return] # a tensor


def part_itself(tensor: Any) -> Tensor:
    """Return the inner tensor (no copy) in which a DTensor keeps its local part; return another tensor itself."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return] # a tensor
    names, _ = tensor.__tensor_flatten__()
    return next(it for name in names if isinstance(it := getattr(tensor, name), Tensor))


def local_gradient(parameter: Any) -> Tensor | None:
    """Return this instance's part of a parameter's gradient; first redistribute a DTensor to the placements of its
    parameter. All instances of the mesh call this function, for their parameters in the same order.
    """
    gradient = parameter.grad
    if gradient is None or not is_distributed(gradient):
        return gradient  # type: ignore[no-any-return] # a tensor
    if is_distributed(parameter) and gradient.placements != parameter.placements:
        with torch.no_grad():
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def placed_as(parameter: Any, part: Tensor) -> Tensor:
    """Return a DTensor that is placed like ``parameter`` and has the local part ``part``, in the same memory."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """The dtype, shape and strides of a tensor without gaps in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return dtype, shape and gap-free strides of ``tensor``; the strides of a DTensor are contiguous."""
        dense = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if not is_distributed(tensor):
            ordered = torch.empty_like(tensor, device="meta", requires_grad=False)
            # in a contiguous tensor a dimension of one element may have any stride
            dense = dense if ordered.is_contiguous() else ordered
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape), stride=dense.stride())

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the form (dtype, shape, strides) that :meth:`to_json` has written as ``value``."""
        name, shape, stride = value
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no dtype {name!r}")  # noqa: TRY004 - the value is wrong, whatever its type
        return cls(dtype=dtype, shape=tuple(shape), stride=tuple(stride))

    def to_json(self) -> list[Any]:
        """Return the form as a list for JSON: dtype, shape and strides."""
        return [str(self.dtype).removeprefix("torch."), [*self.shape], [*self.stride]]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the elements of a tensor of this form occupy."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return an uninitialized CPU tensor of this form: with this dtype, shape and strides."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def view(self, memory: Tensor) -> Tensor:
        """Return a tensor of this form that is a view of the beginning of ``memory``, which is flat bytes."""
        return memory[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{[*self.shape]}"
