"""Pieces of tensors: the plan of which instance writes which piece, and the piece that an instance loads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from popdist.checkpoint.encoding import Json
from popdist.errors import CheckpointError
from popdist.ground.local_tensors import TensorForm, is_distributed, local_part, placed_as


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A rectangular piece of a tensor: the offset and the size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the piece that covers a whole tensor of the shape ``shape``."""
        return cls(offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after the last element of the piece, in each dimension."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    @property
    def num_elements(self) -> int:
        """Number of elements in the piece of the tensor."""
        return prod(self.sizes)

    def empty(self, form: TensorForm) -> Tensor:
        """Return an uninitialised CPU tensor with this piece's shape and the dtype of the tensor's ``form``."""
        if self.sizes == form.shape:
            return form.empty()
        return torch.empty(self.sizes, dtype=form.dtype, device="cpu")


def piece_of(tensor: Any) -> TensorPiece:
    """Return the local piece of a DTensor, which may be empty; for any other tensor the whole tensor."""
    if not is_distributed(tensor):
        return TensorPiece.whole(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:  # the DTensor is only on other instances
        return TensorPiece.whole(local_part(tensor).shape)
    (chunk,) = tensor.__create_chunk_list__()
    return TensorPiece(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The piece of a tensor that an instance has; ``total`` is a checksum, to compare the copies of instances."""

    form: TensorForm
    piece: TensorPiece
    total: int | None = None

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Make a ``Held`` from the list that :meth:`to_json` returned."""
        form, offsets, sizes, total = value
        piece = TensorPiece(offsets=tuple(offsets), sizes=tuple(sizes))
        return cls(form=TensorForm.from_json(form), piece=piece, total=total)

    def to_json(self) -> Json:
        """Return the tensor's form (dtype, shape), the piece and the checksum as a list, for :meth:`from_json`."""
        return [self.form.to_json(), self.piece.offsets, self.piece.sizes, self.total]


def held_of(tensors: Mapping[str, Tensor], totals: Mapping[str, int]) -> dict[str, Held]:
    """Return the piece that this instance has of each tensor; leave out DTensors without a local element."""
    held = {
        name: Held(form=TensorForm.of(tensor), piece=piece_of(tensor), total=totals.get(name))
        for name, tensor in tensors.items()
    }
    return {name: it for name, it in held.items() if it.piece.num_elements or not prod(it.form.shape)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The plan of a save: shape and dtype of all tensors, and for each instance the names of tensors to write."""

    forms: dict[str, TensorForm]
    writes: list[list[str]]


def plan_writes(everybody: Iterable[Mapping[str, Held]]) -> WritePlan:
    """Return a plan in which the first instance that has a piece writes the piece. Raise CheckpointError if copies
    of a piece differ, or if the pieces of a tensor are not the whole tensor.
    """
    forms: dict[str, TensorForm] = {}
    first: dict[tuple[str, TensorPiece], tuple[int, int | None]] = {}
    holders: dict[str, int] = {}
    writes: list[list[str]] = []
    for instance, held in enumerate(everybody):
        writes.append([])
        for name, it in held.items():
            form = forms.setdefault(name, it.form)
            holder = holders.setdefault(name, instance)
            if f"{form}" != f"{it.form}":
                raise CheckpointError(
                    f"{name} is {form} on instance {holder} and {it.form} on instance {instance}: the names in "
                    "the parts of a model must be those of the whole model, where each is one parameter"
                )
            writer, total = first.setdefault((name, it.piece), (instance, it.total))
            if total != it.total:
                raise CheckpointError(
                    f"{name} has other values on instance {writer} than on instance {instance}, so they are not "
                    "copies: make it a DTensor if each has a part of it, give it other names if it is another "
                    "parameter, or broadcast it if it should be the same"
                )
            if writer == instance:
                writes[-1].append(name)
    _check_whole(forms, first)
    return WritePlan(forms=forms, writes=writes)


def _check_whole(forms: Mapping[str, TensorForm], pieces: Iterable[tuple[str, TensorPiece]]) -> None:
    found = dict.fromkeys(forms, 0)
    for name, piece in pieces:
        found[name] += piece.num_elements
    for name, form in forms.items():
        if found[name] != prod(form.shape):
            raise CheckpointError(
                f"the instances hold {found[name]} elements of {name}, which is {form}: each element must be on "
                "one of them, and what several hold must be the same piece"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The part of a tensor that this instance loads: the whole tensor, or the piece that the DTensor ``like`` has.

    If ``into`` is given, the part is written to the place of the tensor ``into`` in a store.
    """

    form: TensorForm
    like: Tensor | None = None
    into: Tensor | None = None

    @property
    def piece(self) -> TensorPiece:
        """The piece of the tensor that this instance loads."""
        return TensorPiece.whole(self.form.shape) if self.like is None else piece_of(self.like)

    def placed(self, piece: Tensor) -> Tensor:
        """Return the loaded ``piece`` as a DTensor with the placement of ``like``; itself if ``like`` is None."""
        return piece if self.like is None else placed_as(self.like, piece)
