"""The arguments of torch's collectives, which may be called in two ways, and the checks of them.

C++ and ``torch.distributed`` pass lists of tensors and an object of options. torch's bindings also take a single
tensor, and the root, operation or timeout without options; so a group written in Python has to take both.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from popdist.host_memory.addition import KINDS, Op

_OPS: Final[dict[Any, Op]] = {
    c10d.ReduceOp.SUM: "sum",
    c10d.ReduceOp.AVG: "mean",
    c10d.ReduceOp.MIN: "min",
    c10d.ReduceOp.MAX: "max",
    c10d.ReduceOp.PRODUCT: "product",
}
SUM: Final = c10d.ReduceOp.SUM


def options(make: Callable[[], Any], **values: object) -> Any:  # noqa: ANN401 - torch's many classes
    """Options made by ``make``, with ``values`` set; a value of None leaves the default."""
    made = make()
    for name, value in values.items():
        if value is not None:
            setattr(made, name, value)
    return made


def as_list(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """A list of tensors; one tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def bare(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without their gradients: autograd does not follow what is written into them."""
    return [tensor.data for tensor in tensors]


def op_of(reduce_op: Any, tensors: Sequence[Tensor]) -> Op | None:  # noqa: ANN401 - ReduceOp or its enumeration
    """The name of the operation in popdist; None if popdist does not combine such tensors so."""
    for tensor in tensors:
        if tensor.dtype not in KINDS:
            return None
    if reduce_op == SUM:
        return "sum"
    op = _OPS.get(getattr(reduce_op, "op", reduce_op))
    return None if op == "mean" and not all(tensor.is_floating_point() for tensor in tensors) else op


def seconds(timeout: timedelta | None) -> float | None:
    """A timeout in seconds; None where there is none, which torch also says by a negative one."""
    return None if timeout is None or timeout < timedelta(0) else timeout.total_seconds()


def check_rows(rows: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], size: int) -> None:
    """Raise ValueError unless there is a row for each of ``tensors``, with a tensor like it for each rank."""
    for row, tensor in zip(rows, tensors, strict=True):
        if len(row) != size:
            raise ValueError(f"expected a tensor for each of the {size} ranks, got {len(row)}")
        for part in row:
            if part.numel() != tensor.numel() or part.dtype != tensor.dtype or not part.is_cpu:
                raise ValueError(f"expected {_describe(tensor)} for every rank, got {_describe(part)}")


def check_parts(wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> None:
    """Raise ValueError unless each of ``wholes`` is as long as its part for all ranks."""
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{_describe(whole)} is not made of {size} parts of {_describe(part)}, one for each rank"
            )


def check_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Raise ValueError unless there is a tensor to each rank, and one from each."""
    if (len(outputs), len(inputs)) != (size, size):
        raise ValueError(
            f"expected {size} tensors to send and {size} to receive, got {len(inputs)} and {len(outputs)}"
        )


def check_splits(tensor: Tensor, lengths: Sequence[int], size: int) -> None:
    """Raise ValueError unless ``lengths`` cut the first dimension of ``tensor`` into a part for each rank."""
    rows = len(tensor) if tensor.dim() else 0
    if rows % size if not lengths else len(lengths) != size or sum(lengths) != rows or min(lengths) < 0:
        asked = list(lengths) or "equal lengths"
        raise ValueError(f"{_describe(tensor)} cannot be cut into {asked} for {size} ranks")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
