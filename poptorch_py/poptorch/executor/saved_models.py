"""Models in files: tensors and texts, read without running anything, and the program's objects, pickled."""

import io
import os
import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from poptorch.custom_types import Structure, flattened, unflatten
from poptorch.errors import Error

_FORMAT: Final = "poptorch model 1"
_NAME: Final = "model.poptorch"  # of a file in a folder
_TENSORS: Final = (Tensor, nn.Parameter)
_PLAIN: Final = frozenset({Tensor, tuple, list, dict, type(None), bool, int, float, str})


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The content of a file."""

    is_training: bool  # whether it was a training model
    # parameters and buffers by name; empty for those of the module that reads the file
    weights: dict[str, Tensor] = field(default_factory=dict)
    # what each replica of this process has in place of the module's buffers, by name
    replica_buffers: list[dict[str, Tensor]] = field(default_factory=list)
    # the optimizer's tensors on the device, by name
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)
    # of the replicas of this process, as bytes; None where it was not asked for
    random_state: Tensor | None = None
    # arguments of a call, by position and by name, with zeros for tensors; None where they hold types that only
    # pickle can read, or the model is not compiled
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    # of `pickled`: the module, the options, the optimizer; None where they were not asked for
    objects: tuple[Tensor, ...] | None = None


def example_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A call's arguments with zeros for tensors; None where only pickle could read them."""
    structure, tensors = flattened((args, kwargs))
    if not _is_plain(structure):
        return None
    zeros = (tensor.new_zeros(()).expand(tensor.shape) for tensor in tensors)  # of which a file holds one element
    example: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(structure, zeros)
    return example


def _is_plain(structure: Structure) -> bool:
    """Whether it is read without running anything."""
    kind = type(structure.value) if structure.kind is None else structure.kind
    return kind in _PLAIN and all(map(_is_plain, structure.parts))


def pickled(*objects: object) -> tuple[Tensor, ...]:
    """Objects for a file: their pickle as bytes, and the tensors that it names, which lie in the file once."""
    stream = io.BytesIO()
    pickler = _ModelPickler(stream)
    try:
        pickler.dump(objects)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:  # the last is torch.jit's
        raise Error(f"the model cannot be pickled: {error}. Say export_model=False to leave it out") from error
    tensors = (tensor.detach() for _, tensor in pickler.known.values())
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8), *tensors


def unpickled(saved: SavedModel, path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """The objects of a file that is trusted: reading them runs what it says."""
    if saved.objects is None:
        raise Error(f"{path} holds no module: it was written with export_model=False. Use loadExecutable()")
    data, *tensors = saved.objects
    objects: tuple[Any, ...] = _ModelUnpickler(io.BytesIO(data.numpy().tobytes()), tensors).load()
    return objects


class _ModelPickler(pickle.Pickler):
    """Names tensors and parameters by their number, and whether they are parameters and have gradients."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.known: dict[int, tuple[int, Tensor]] = {}  # by its id each tensor and its number

    def persistent_id(self, value: Any) -> tuple[int, bool, bool] | None:
        if type(value) not in _TENSORS:
            return None
        number, _ = self.known.setdefault(id(value), (len(self.known), value))
        return number, isinstance(value, nn.Parameter), value.requires_grad


class _ModelUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, name: tuple[int, bool, bool]) -> Tensor:
        number, is_parameter, has_gradient = name
        if number not in self._made:
            tensor = self._tensors[number]
            self._made[number] = (
                nn.Parameter(tensor, has_gradient) if is_parameter else tensor.requires_grad_(has_gradient)
            )
        return self._made[number]


def write(saved: SavedModel, path: str | os.PathLike[str]) -> Path:
    """Write a file; one that was there stays whole until the new one is."""
    target = Path(path)
    if target.is_dir():
        target /= _NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {part.name: getattr(saved, part.name) for part in fields(saved)}
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save({"format": _FORMAT, **content}, unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def read(path: str | os.PathLike[str]) -> SavedModel:
    """Read what `write` wrote, without running anything."""
    source = Path(path)
    if source.is_dir():
        source /= _NAME
    if not source.is_file():
        raise Error(f"there is no saved model {source}")
    try:
        content = torch.load(source, weights_only=True, map_location="cpu") if is_zipfile(source) else None
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise Error(f"{source} is no model that poptorch saved, or is damaged") from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise Error(f"{source} is no model that this poptorch saved: {_FORMAT!r} is expected")
    return SavedModel(**content)
