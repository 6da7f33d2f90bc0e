"""Tensors in the store of a model in phases: saved as whole files, and loaded into their places in the store."""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import torch
from torch import Tensor

from popdist.checkpoint.encoding import Json
from popdist.checkpoint.tensor_pieces import TensorPiece, Wanted, piece_of
from popdist.errors import CheckpointError
from popdist.ground.local_tensors import TensorForm, local_part
from popdist.phases.phase_store import PhaseStore
from popdist.phases.store_file import Region, whole_blocks

if TYPE_CHECKING:
    from popdist.phases.store_file import StoreFile

BATCH_BYTES: Final = 16 << 20
"""Number of bytes that are read at once before they are written into a store; a larger tensor is read alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A piece of a tensor in a file copied from a phased model's store: the offset in the file, and strides."""

    file: str
    start: int
    piece: TensorPiece
    stride: tuple[int, ...]

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Make a stored piece from the list that :meth:`to_json` returned."""
        file, start, offsets, sizes, stride = value
        piece = TensorPiece(offsets=tuple(offsets), sizes=tuple(sizes))
        return cls(file=file, start=start, piece=piece, stride=tuple(stride))

    def to_json(self) -> Json:
        """Return the stored piece as a list, for :meth:`from_json`."""
        return [self.file, self.start, self.piece.offsets, self.piece.sizes, self.stride]

    def read(self, directory: Path, dtype: torch.dtype, piece: TensorPiece, tensor: Tensor) -> None:
        """Copy the elements that ``piece`` and this stored piece have in common from the file into ``tensor``,
        which is the memory of ``piece``.
        """
        starts = [*map(max, zip(self.piece.offsets, piece.offsets, strict=True))]
        ends = [*map(min, zip(self.piece.ends, piece.ends, strict=True))]
        if not all(start < end for start, end in zip(starts, ends, strict=True)):
            return
        form = TensorForm(dtype=dtype, shape=self.piece.sizes, stride=self.stride)
        with (directory / self.file).open("rb") as file:
            length, access = whole_blocks(form.num_bytes), mmap.PROT_READ | mmap.PROT_WRITE
            window = mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, access, offset=self.start)
            found = form.view(torch.frombuffer(window, dtype=torch.uint8))
            tensor[_within(piece, starts, ends)] = found[_within(self.piece, starts, ends)]
            del found, window
            os.posix_fadvise(file.fileno(), self.start, length, os.POSIX_FADV_DONTNEED)


def _within(piece: TensorPiece, starts: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of ``piece``'s tensor that select elements ``starts`` to ``ends`` of the whole tensor."""
    bounds = zip(starts, ends, piece.offsets, strict=True)
    return tuple(slice(start - offset, end - offset) for start, end, offset in bounds)


def store_of(thing: object) -> PhaseStore | None:
    """Return the store (file or memory of weights) of a phased model or its optimizer; None for other objects."""
    store = getattr(thing, "store", None)
    return store if isinstance(store, PhaseStore) else None


def stores_of(named: Mapping[str, object]) -> list[PhaseStore]:
    """Return the stores (files or memory of weights) of all phased models in ``named``, sorted by name."""
    found = [store for _, thing in sorted(named.items()) if (store := store_of(thing)) is not None]
    return list(dict.fromkeys(found))


def check_whole(named: Mapping[str, object]) -> None:
    """Raise CheckpointError if a phased model or its optimizer in ``named`` is in the middle of a step: the
    store, the file or memory with the model's weights, then has weights from before and from after the step.
    """
    for name, thing in named.items():
        store = store_of(thing)
        if store is not None and store.is_torn:
            raise CheckpointError(
                f"step {store.step} of {name} is half made: save after optimizer.step(), and if that has failed, "
                "load the last checkpoint"
            )


class StoreCopies:
    """The files of phased models' stores that a checkpoint copies, and the offset of each tensor in a file."""

    def __init__(self, named: Mapping[str, object], tensors: Mapping[str, Tensor], instance: int) -> None:
        stores = stores_of(named)
        self._files: dict[StoreFile, str] = {}
        self.places: dict[str, StoredPiece] = {}
        for name, tensor in tensors.items():
            part = local_part(tensor)
            for place in filter(None, (store.place_of(part) for store in stores)):
                file, start = place
                label = self._files.setdefault(file, f"phases-{instance}-{len(self._files)}")
                piece = TensorPiece(offsets=piece_of(tensor).offsets, sizes=tuple(part.shape))
                self.places[name] = StoredPiece(file=label, start=start, piece=piece, stride=part.stride())

    def write(self, directory: Path) -> Json:
        """Copy the stores' files into ``directory``; return as JSON the files' digests and the tensors' places."""
        digests = {label: file.copy_to(directory / label) for file, label in self._files.items()}
        return [digests, {name: it.to_json() for name, it in self.places.items()}]


def join_copies(written: Iterable[Json]) -> tuple[dict[str, str], dict[str, list[StoredPiece]]]:
    """Join what ``StoreCopies.write`` returned on all instances: the digests of files, the pieces of tensors."""
    digests: dict[str, str] = {}
    stored: dict[str, list[StoredPiece]] = {}
    for digests_of_one, places in written:
        digests |= digests_of_one
        for name, place in places.items():
            stored.setdefault(name, []).append(StoredPiece.from_json(place))
    return digests, stored


def batches(wanted: Mapping[str, Wanted]) -> Iterator[dict[str, Wanted]]:
    """Yield the tensors to load in batches of at most ``BATCH_BYTES``; a larger tensor is a batch of its own."""
    batch: dict[str, Wanted] = {}
    num_bytes = 0
    for name, it in wanted.items():
        size = it.form.num_bytes
        if batch and num_bytes + size > BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
        batch[name] = it
        num_bytes += size
    if batch:
        yield batch


def write_into_stores(
    stores: list[PhaseStore], wanted: Mapping[str, Wanted], tensors: Mapping[str, Tensor]
) -> None:
    """Write ``tensors`` into phased models' stores; only the first of the instances that share a store writes."""
    for name, it in wanted.items():
        part = local_part(it.into)
        for store in stores:
            if store.host_index == 0 and (place := store.place_of(part)) is not None:
                file, start = place
                form = TensorForm.of(part)
                region = Region(start=start, num_bytes=form.num_bytes)
                file.write_tensor(region, form, local_part(tensors[name]))
