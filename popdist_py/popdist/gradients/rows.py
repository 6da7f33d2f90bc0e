"""Rows of numbers: tensors of any shape and dtype, laid end to end to be added to those of other replicas.

Numbers are added in float32, those of double precision in float64, so that what is of half precision loses nothing
on the way; they are rounded once, at the end.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Rows: TypeAlias = list[Tensor]
"""What a replica, a micro batch or a subtree of them brings: one flat tensor for each device and dtype."""

_DOUBLE = frozenset({torch.float64, torch.complex128})


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of ``dtype`` are added."""
    return torch.float64 if dtype in _DOUBLE else torch.float32


def num_reals(tensor: Tensor) -> int:
    """Real numbers in ``tensor``."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def as_reals(tensor: Tensor) -> Tensor:
    """``tensor`` as one row of real numbers, in its own order of elements."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def join(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """A row of ``dtype`` that holds the numbers of ``tensors``, which lie on one device; at least one."""
    return torch.cat([as_reals(tensor).to(dtype) for tensor in tensors])


def cut(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of ``row`` in the shapes, dtypes and strides of ``like``; they may share memory with it."""
    parts = row.split([num_reals(tensor) for tensor in like])
    return [_shaped(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def add_rows(left: Rows, right: Rows) -> Rows:
    """Add ``right`` to ``left``, in place."""
    for total, row in zip(left, right, strict=True):
        total.add_(row)
    return left


def scale_rows(rows: Rows, *, times: float = 1.0, over: float = 1.0) -> Rows:
    """Multiply and divide ``rows`` in place; by 1 changes nothing."""
    for row in rows:
        if times != 1:
            row.mul_(times)
        if over != 1:
            row.div_(over)
    return rows


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        flat = flat.clone() if flat.storage_offset() % 2 else flat  # torch pairs up numbers at even places only
        flat = torch.view_as_complex(flat.view(-1, 2))
    shaped = flat.to(like.dtype).view(like.shape)
    if like.is_contiguous():
        return shaped
    return torch.empty_like(like, requires_grad=False).copy_(shaped)
