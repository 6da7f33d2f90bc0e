"""The ways in which torch's collectives may be called: with options, or with what they hold.

C++ and ``torch.distributed`` pass lists of tensors and options. The bindings also take a tensor and its root,
operation or timeout, so a group written in Python has to, too.
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
    """The options that ``make`` makes, with ``values``; None leaves a default."""
    made = make()
    for name, value in values.items():
        if value is not None:
            setattr(made, name, value)
    return made


def as_list(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor as a list of it."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def bare(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without their gradients: what is written into them is no business of autograd's."""
    return [it.data for it in tensors]


def op_of(reduce_op: Any, tensors: Sequence[Tensor]) -> Op | None:  # noqa: ANN401 - ReduceOp or its enumeration
    """What shared memory calls the operation; None if it does not combine such tensors so."""
    for tensor in tensors:
        if tensor.dtype not in KINDS:
            return None
    if reduce_op == SUM:
        return "sum"
    op = _OPS.get(getattr(reduce_op, "op", reduce_op))
    return None if op == "mean" and not all(it.is_floating_point() for it in tensors) else op


def seconds(timeout: timedelta | None) -> float | None:
    """A timeout as seconds; None for torch's way to say that there is none."""
    return None if timeout is None or timeout < timedelta(0) else timeout.total_seconds()


def check_rows(rows: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], size: int) -> None:
    """Refuse what is not a list, for each of ``tensors``, of one like it for each rank.

    Raises:
        ValueError: Says what was found.
    """
    for row, tensor in zip(rows, tensors, strict=True):
        if len(row) != size:
            raise ValueError(f"expected a tensor for each of the {size} ranks, got {len(row)}")
        for it in row:
            if it.numel() != tensor.numel() or it.dtype != tensor.dtype or not it.is_cpu:
                raise ValueError(f"expected {_describe(tensor)} for every rank, got {_describe(it)}")


def check_parts(wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> None:
    """Refuse what is not as long as a part for each rank.

    Raises:
        ValueError: Says what was found.
    """
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{_describe(whole)} is not made of {size} parts of {_describe(part)}, one for each rank"
            )


def check_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Refuse what is not a tensor for each rank, and one from each.

    Raises:
        ValueError: Says what was found.
    """
    if (len(outputs), len(inputs)) != (size, size):
        raise ValueError(
            f"expected {size} tensors to send and {size} to receive, got {len(inputs)} and {len(outputs)}"
        )


def check_splits(tensor: Tensor, lengths: Sequence[int], size: int) -> None:
    """Refuse lengths that do not cut the first dimension of ``tensor`` into a part for each rank.

    Raises:
        ValueError: Says what was found.
    """
    rows = len(tensor) if tensor.dim() else 0
    if rows % size if not lengths else len(lengths) != size or sum(lengths) != rows or min(lengths) < 0:
        asked = list(lengths) or "equal lengths"
        raise ValueError(f"{_describe(tensor)} cannot be cut into {asked} for {size} ranks")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
