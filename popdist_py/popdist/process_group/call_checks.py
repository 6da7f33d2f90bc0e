"""The arguments of torch's collectives: their tensors without autograd, their operations, and the checks of them.

What is wrong raises what gloo raises: RuntimeError, mostly.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils.dlpack import from_dlpack

from popdist.host_memory.addition import KINDS, Op

_OPS: Final[dict[Any, Op]] = {
    c10d.ReduceOp.SUM: "sum",
    c10d.ReduceOp.AVG: "mean",
    c10d.ReduceOp.MIN: "min",
    c10d.ReduceOp.MAX: "max",
    c10d.ReduceOp.PRODUCT: "product",
}


def bare(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors without their gradients: autograd does not follow what is written into them."""
    return [tensor.data if not tensor.is_inference() else _writable(tensor) for tensor in tensors]


def _writable(tensor: Tensor) -> Tensor:
    """The numbers of a tensor of inference mode, as a tensor that may be written into outside of it."""
    with torch.inference_mode(mode=False):
        return from_dlpack(tensor.resolve_neg())


def op_of(reduce_op: Any, tensors: Sequence[Tensor]) -> Op | None:  # noqa: ANN401 - ReduceOp or its enumeration
    """The name of the operation in popdist; None if popdist does not combine such tensors so."""
    for tensor in tensors:
        if tensor.dtype not in KINDS:
            return None
    op = _OPS.get(getattr(reduce_op, "op", reduce_op))
    return None if op == "mean" and not all(tensor.is_floating_point() for tensor in tensors) else op


def seconds(timeout: timedelta | None) -> float | None:
    """A timeout in seconds; None where there is none, which torch also says by a negative one."""
    return None if timeout is None or timeout < timedelta(0) else timeout.total_seconds()


def check_root(call: str, root: int, size: int) -> None:
    """Raise RuntimeError unless ``root`` is a rank of the group."""
    if not 0 <= root < size:
        raise RuntimeError(f"popdist::{call}: invalid root rank: {root} (expected 0 to {size - 1})")


def check_peer(call: str, rank: int, size: int) -> None:
    """Raise RuntimeError unless ``rank`` is one of the group; gloo would wait for ever for another, or crash."""
    if not 0 <= rank < size:
        raise RuntimeError(f"popdist::{call}: invalid rank: {rank} (expected 0 to {size - 1})")


def check_single(call: str, *tensors: Sequence[object]) -> None:
    """Raise RuntimeError unless each of the lists has one element.

    gloo reads several as those of several devices, and combines them with each other.
    """
    for listed in tensors:
        if len(listed) != 1:
            raise RuntimeError(f"popdist::{call}: expected a single tensor, got {len(listed)}")


def check_written(call: str, tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if numbers of one of the tensors, which are written into, lie in one place."""
    for tensor in tensors:
        if any(length > 1 and stride == 0 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RuntimeError(
                f"popdist::{call}: more than one element of the written-to tensor refers to a single memory "
                f"location, as after expand(): {_describe(tensor)}. Please clone() the tensor before."
            )


def check_rows(call: str, rows: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], size: int) -> None:
    """Raise RuntimeError unless there is a row for each of ``tensors``, with a tensor like it for each rank."""
    if len(rows) != len(tensors):
        raise RuntimeError(
            f"popdist::{call}: expected as many lists as tensors, got {len(rows)} and {len(tensors)}"
        )
    for row, tensor in zip(rows, tensors, strict=True):
        if len(row) != size:
            raise RuntimeError(
                f"popdist::{call}: invalid tensor list: expected a tensor for each of the {size} ranks (the world "
                f"size), got {len(row)}"
            )
        for part in row:
            if part.shape != tensor.shape or part.dtype != tensor.dtype or not part.is_cpu:
                what = "type" if part.dtype != tensor.dtype else "size"
                raise RuntimeError(
                    f"popdist::{call}: invalid tensor {what}: expected {_describe(tensor)} for every rank, got "
                    f"{_describe(part)}"
                )


def check_parts(call: str, wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> None:
    """Raise RuntimeError unless each of ``wholes`` is as long as its part for all ranks."""
    if len(wholes) != len(parts):
        raise RuntimeError(
            f"popdist::{call}: expected as many outputs as inputs, got lists of {len(wholes)} and {len(parts)}"
        )
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            what = "type" if whole.dtype != part.dtype else "size"
            raise RuntimeError(
                f"popdist::{call}: invalid tensor {what}: {_describe(whole)} is not made of {size} parts of "
                f"{_describe(part)}, one for each rank"
            )


def check_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Raise RuntimeError unless there is a tensor to each rank, and one from each, all of one dtype."""
    for name, listed in (("input", inputs), ("output", outputs)):
        if len(listed) != size:
            raise RuntimeError(
                f"popdist::alltoall: {name} tensor list size {len(listed)} does not match world size {size}"
            )
    _check_dtypes([*outputs, *inputs])


def check_splits(output: Tensor, input: Tensor, lengths: Sequence[Sequence[int]], size: int) -> None:  # noqa: A002 - torch's name
    """Raise RuntimeError unless ``lengths`` cut the first dimensions of two tensors into a part for each rank.

    Args:
        output: What is received into.
        input: What is sent.
        lengths: Of the parts of both, in this order; none mean equal ones.
        size: Ranks of the group.
    """
    _check_dtypes([output, input])
    for tensor, parts in zip((output, input), lengths, strict=True):
        rows = len(tensor) if tensor.dim() else 0
        problem = ""
        if not parts:
            problem = "dim 0 does not divide equally across group size" if rows % size else ""
        elif len(parts) != size:
            problem = "Number of tensor splits not equal to group size"
        elif sum(parts) != rows or min(parts) < 0:
            problem = "Split sizes doesn't match total dim 0 size"
        if problem:
            asked = list(parts) or "equal lengths"
            raise RuntimeError(
                f"popdist::alltoall: {problem}: {_describe(tensor)} cannot be cut into {asked} for {size} ranks"
            )


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    if len({tensor.dtype for tensor in tensors}) > 1:
        found = ", ".join(sorted({_describe(tensor) for tensor in tensors}))
        raise RuntimeError(
            f"popdist::alltoall: input and output tensors must have the same type, but there are {found}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
