"""The gradients of a model's parameters, laid end to end in rows of numbers that can be added.

There is one row for each device and dtype in which gradients are added: float64 for double precision, else
float32, so that half precision is rounded once, at the end. Where gradients are rounded on purpose
(``gradient_dtype``), the sum over a replica's micro batches is wide as well, and the replicas are added in narrow
rows, which have that dtype: so each replica's gradient is rounded, and each partial sum.

Each parameter has a slot in its row, with the parameter's shape and order of memory: a view of it can be the
parameter's ``.grad``. A parameter without a gradient has zeros in its slot, and a mask tells which had one.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from popdist.errors import CollectiveError, GradientError
from popdist.gradients.notes import fill_slots, give_slots
from popdist.host_memory.addition import HALVES, Op

Rows: TypeAlias = list[Tensor]
"""What a micro batch, a replica or several of them bring: one flat tensor for each device and dtype."""

_DOUBLE = frozenset({torch.float64, torch.complex128})


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are added."""
    return torch.float64 if dtype in _DOUBLE else torch.float32


def check_gradient_dtype(dtype: object) -> torch.dtype | None:
    """``dtype``, if gradients can be rounded to it; None for those that are not rounded.

    Raises:
        GradientError: If they cannot.
    """
    if dtype is not None and dtype not in HALVES:
        raise GradientError(
            f"gradient_dtype={dtype!r}: gradients can be rounded to torch.bfloat16 or torch.float16, or not at "
            "all (None), when they are added in float32"
        )
    return dtype if isinstance(dtype, torch.dtype) else None


def sum_of(dtype: torch.dtype) -> Op:
    """How rows of ``dtype`` are added over the replicas: narrow ones are rounded at each addition."""
    return "rounded sum" if dtype in HALVES else "sum"


def num_reals(tensor: Tensor) -> int:
    """How many real numbers ``tensor`` has; a complex number is two."""
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


SMALL: Final = 1 << 14
"""Gradients of fewer numbers are copied together, which takes less time than to have each in the cache."""

ALIGNMENT: Final = 16
"""In numbers: slots begin at its multiples, so at lines of cache, and complex ones at even places."""


@dataclass(slots=True, kw_only=True)
class RowKind:
    """Parameters whose gradients lie in one row.

    Attributes:
        device: Where the parameters are.
        dtype: In which their gradients are added.
        members: For each its position among all parameters, the parameter, and where its slot begins.
        size: Numbers in the row.
    """

    device: torch.device
    dtype: torch.dtype
    members: list[tuple[int, Parameter, int]] = field(default_factory=list)
    size: int = 0

    def append(self, index: int, parameter: Parameter) -> None:
        """Give ``parameter`` a slot at the end."""
        self.members.append((index, parameter, self.size))
        self.size += -(-num_reals(parameter) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientRows:
    """Room for one gradient of all parameters.

    Attributes:
        rows: Flat tensors, one for each kind.
        slots: For each parameter, by its identity and in the order of the model, its part of the rows; none in
            narrow rows.
        in_order: The same slots.
    """

    rows: Rows
    slots: dict[int, Tensor]
    in_order: list[Tensor]

    def clear(self) -> None:
        """Fill them with zeros."""
        for row in self.rows:
            row.zero_()

    def copy(self, other: "GradientRows") -> None:
        """Fill them with what ``other`` holds."""
        for row, values in zip(self.rows, other.rows, strict=True):
            row.copy_(values)

    def take(self, parameter: Tensor, *, even_small: bool = True) -> None:
        """Move the gradient of ``parameter`` into its slot, if it can stay there, while it is still in the cache.

        What has another dtype or a graph stays where it is, as may what is small: :meth:`FlatGradients.fill`
        copies it later.
        """
        slot = self.slots.get(id(parameter))
        if slot is None or (slot.numel() < SMALL and not even_small):
            return
        gradient = parameter.grad
        if gradient is None or gradient.dtype != slot.dtype or gradient.requires_grad:
            return
        if gradient.layout == torch.strided and gradient.data_ptr() != slot.data_ptr():
            parameter.grad = slot.copy_(gradient).detach()


class FlatGradients:
    """The gradients of one model's trained parameters, moved from ``.grad`` to rows and back.

    Args:
        named_parameters: The model's, in the same order on all instances; frozen ones are left out.

    Attributes:
        names: Of the parameters.
        kinds: One for each row.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self.names: list[str] = []
        self._orders: list[str] = []
        self._parameters: list[Parameter] = []
        kinds: dict[tuple[torch.device, torch.dtype], RowKind] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                new = RowKind(device=parameter.device, dtype=wide_dtype(parameter.dtype))
                kinds.setdefault((new.device, new.dtype), new).append(len(self.names), parameter)
                self.names.append(name)
                self._parameters.append(parameter)
                self._orders.append(name if parameter.is_contiguous() else f"{name} {parameter.stride()}")
        self.kinds = list(kinds.values())
        self._all = (1 << len(self.names)) - 1
        self._are_narrow = any(wide_dtype(it.dtype) != it.dtype for it in self._parameters)

    def __str__(self) -> str:
        """What must be the same on all instances, in words."""
        return self._text

    @cached_property
    def _text(self) -> str:
        rows = (
            f"{sum(num_reals(parameter) for _, parameter, _ in kind.members)} "
            f"{str(kind.dtype).removeprefix('torch.')} on {kind.device.type}"
            for kind in self.kinds
        )
        digest = hashlib.blake2b("\n".join(self._orders).encode(), digest_size=4).hexdigest()
        return f"{len(self.names)} parameters, names {digest}: {', '.join(rows)}"

    def used(self) -> int:
        """Which parameters have a gradient now: bit i stands for ``names[i]``."""
        return sum(1 << i for kind in self.kinds for i, parameter, _ in kind.members if parameter.grad is not None)

    def not_finite(self) -> int | None:
        """The first parameter whose gradient holds NaN or infinity; None when there is none."""
        found = [
            i
            for kind in self.kinds
            for i, parameter, _ in kind.members
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        return min(found, default=None)

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        for parameter in self._parameters:
            parameter.grad = None

    def make_rows(self, rows: Rows | None = None) -> GradientRows:
        """Room in ``rows``, which have the kinds' sizes and dtypes; None for new ones, all zero."""
        rows = rows or [torch.zeros(kind.size, dtype=kind.dtype, device=kind.device) for kind in self.kinds]
        found = {
            index: _slot(row, start, parameter)
            for kind, row in zip(self.kinds, rows, strict=True)
            for index, parameter, start in kind.members
        }
        in_order = [found[index] for index in range(len(found))]
        slots = {id(parameter): slot for parameter, slot in zip(self._parameters, in_order, strict=True)}
        return GradientRows(rows=rows, slots=slots, in_order=in_order)

    def make_narrow(self, dtype: torch.dtype, rows: Rows | None = None) -> GradientRows:
        """Rows of ``dtype`` for the sum over replicas: ``rows``, or new ones for None."""
        rows = rows or [torch.zeros(kind.size, dtype=dtype, device=kind.device) for kind in self.kinds]
        return GradientRows(rows=rows, slots={}, in_order=[])

    def fill(self, into: GradientRows, times: float = 1.0, *, are_taken: bool = False) -> int:
        """Copy every gradient into its slot, if it is not there yet, and zeros where there is none; then multiply.

        Args:
            into: With slots.
            times: What all are multiplied by.
            are_taken: Whether to set every ``.grad`` to None.

        Returns:
            Which parameters had a gradient, as :meth:`used`.

        Raises:
            CollectiveError: If a gradient is sparse.
        """
        used, left = fill_slots(Tensor, self._parameters, into.in_order, are_taken)
        increment_version(into.rows)
        if left:
            self._copy(left, into.in_order)
            if are_taken:
                self.clear()
        scale_rows(into.rows, times=times)
        return used

    @torch.no_grad()
    def _copy(self, positions: Iterable[int], into: Sequence[Tensor]) -> None:
        """Copy the gradients at some positions to the slots ``into``, or zeros where there is none."""
        slots, gradients = list[Tensor](), list[Tensor]()
        for position in positions:
            slot, gradient = into[position], self._parameters[position].grad
            if gradient is None:
                slot.zero_()
            elif gradient.layout != torch.strided:
                raise CollectiveError(
                    f"the gradient of {self.names[position]} is sparse, and replicas add dense ones: make it "
                    "with sparse=False"
                )
            elif gradient.data_ptr() != slot.data_ptr():
                slots.append(slot)
                gradients.append(gradient)
        if slots:
            torch._foreach_copy_(slots, gradients)

    def give(self, rows: GradientRows, used: int) -> None:
        """Set the ``.grad`` of each parameter in ``used`` to its part of ``rows``, and all others to None.

        The gradients share memory with ``rows``, unless they are of another dtype.
        """
        slots, parameters = rows.in_order, self._parameters
        if used != self._all:
            self.clear()
            given = [i for i in range(len(parameters)) if used >> i & 1]
            slots, parameters = [slots[i] for i in given], [parameters[i] for i in given]
        if self._are_narrow:
            slots = [slot.to(it.dtype) for slot, it in zip(slots, parameters, strict=True)]
        give_slots(parameters, slots)


def _slot(row: Tensor, start: int, parameter: Parameter) -> Tensor:
    """The numbers of ``row`` from ``start`` in the shape and order of memory of ``parameter``."""
    flat = row[start : start + num_reals(parameter)]
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    dense = torch.empty_like(parameter, device="meta", requires_grad=False)
    return flat.as_strided(dense.shape, dense.stride())
