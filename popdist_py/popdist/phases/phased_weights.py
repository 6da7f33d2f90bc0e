"""Make the weights of a model a few layers at a time, so that the whole model is never in memory.

The weights come from a model in memory, from safetensors files, or from the modules of a model on the meta device.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from popdist.errors import WeightsError, name_first
from popdist.ground.torch_private import num_writes

Initialize: TypeAlias = Callable[[nn.Module], object]
"""A function that sets the weights of one module, if it knows the kind of this module."""

_SHOWN: Final = 5
"""The largest number of names in an error message."""

_INDEX: Final = "model.safetensors.index.json"


def unit_weights(
    model: nn.Module,
    units: Iterable[nn.Module],
    *,
    initialize: Initialize | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Make the weights of ``units``, modules of ``model``, one module at a time, and yield dicts of them by name.

    Each dict has the tensors of a unit, or of a part of a unit, by the names of ``model.named_parameters()``;
    all dicts together have each parameter of the units once. The model keeps the tensors until the caller gives
    the parameters other data. Tensors outside the units stay in the model. Parameters on the meta device become
    other objects, tied as before. Raises WeightsError with the names of tensors that nothing sets.

    The modules are visited as by ``model.apply``, children first. A model in memory draws the same random numbers,
    unless its constructors draw in another order. A tied parameter has the values of its first module.
    """
    files = None if weights is None else _Files(Path(weights), model)
    return _Maker(model, initialize, files).made(units)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers of ``model`` to ``device``; a buffer that several modules share stays one buffer."""
    moved = {buffer: buffer.to(device) for buffer in model.buffers()}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, moved[buffer])


class _Maker:
    """A maker of the parameters and buffers of a model, which makes the tensors of some modules at a time."""

    def __init__(self, model: nn.Module, initialize: Initialize | None, files: "_Files | None") -> None:
        self._model = model
        self._initialize = initialize
        self._files = files
        self._names: dict[tuple[nn.Module, str], str] = {}
        self._holders: dict[str, list[tuple[nn.Module, str]]] = {}
        names = _names_of(model)
        for module in model.modules():
            for key, tensor in _tensors_of(module):
                self._names[module, key] = names[tensor]
                self._holders.setdefault(names[tensor], []).append((module, key))
        self._made: set[str] = set()

    def made(self, units: Iterable[nn.Module]) -> Iterator[dict[str, Tensor]]:
        """Make all tensors of the model; after each module in ``units``, yield a dict of its parameters."""
        numbers = {part: number for number, unit in enumerate(units) for part in unit.modules()}
        order: list[nn.Module] = []
        self._model.apply(order.append)
        for number, modules in groupby(dict.fromkeys(order), numbers.get):
            names = self._make([*modules], is_unit=number is not None)
            if number is not None and names:
                yield {name: self._now(name).detach() for name in names}

    def _make(self, modules: list[nn.Module], *, is_unit: bool) -> list[str]:
        """Make the tensors of ``modules`` that are not made yet; return the names of those that are parameters."""
        names = dict.fromkeys(self._names[module, key] for module in modules for key, _ in _tensors_of(module))
        new = [name for name in names if name not in self._made]
        self._made.update(new)
        blank: dict[str, tuple[Tensor, int]] = {}
        for name in new:
            if self._files is not None and name in self._files:
                self._set(name, self._files.read(name, self._now(name)))
            elif self._now(name).is_meta:
                self._set(name, _blank(self._now(name)))
                blank[name] = (self._now(name), num_writes(self._now(name)))
        if blank:
            with torch.no_grad(), self._others_replaced(modules, blank):
                self._call(modules, blank, is_unit=is_unit)
        self._refuse_unset(modules, blank)
        return [name for name in new if isinstance(self._now(name), nn.Parameter)]

    def _call(self, modules: list[nn.Module], blank: Mapping[str, tuple[Tensor, int]], *, is_unit: bool) -> None:
        """Have modules set the tensors ``blank``, by ``initialize``, if given, or their ``reset_parameters()``."""
        for module in modules:
            has_blank = any(self._names.get((module, key)) in blank for key, _ in _tensors_of(module))
            if self._initialize is not None and (is_unit or has_blank):
                self._initialize(module)
            elif self._initialize is None and has_blank and callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()  # type: ignore[operator]  # as was asked

    @contextmanager
    def _others_replaced(
        self, modules: list[nn.Module], blank: Mapping[str, tuple[Tensor, int]]
    ) -> Iterator[None]:
        """A context in which blank tensors replace the tensors that were made before, so that a module's
        ``reset_parameters()`` writes only blank tensors.

        A module sets all of its tensors, and draws random numbers for each.
        """
        others = [
            (module, key, tensor)
            for module in modules
            for key, tensor in _tensors_of(module)
            if self._names[module, key] not in blank
        ]
        for module, key, tensor in others:
            setattr(module, key, _like(tensor, _blank(tensor)))
        yield
        for module, key, tensor in others:
            setattr(module, key, tensor)

    def _refuse_unset(self, modules: list[nn.Module], blank: Mapping[str, tuple[Tensor, int]]) -> None:
        """Raise WeightsError if a tensor in ``blank`` was not written, or a module has a meta tensor left."""
        left = [name for name, before in blank.items() if not _is_written(self._now(name), *before)]
        left += [
            f"{key} (an attribute of {type(module).__name__})"
            for module in modules
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_meta
        ]
        if left:
            raise WeightsError(
                f"{type(self._model).__name__} is on the meta device, and nothing has set "
                f"{name_first(left, _SHOWN)}: a module sets its own in reset_parameters(); for those without it "
                "give initialize=function(module), or make them on the CPU"
            )

    def _now(self, name: str) -> Tensor:
        """Return the model's present tensor with the name ``name``; `_set` may have replaced an earlier tensor."""
        module, key = self._holders[name][0]
        tensor: Tensor = getattr(module, key)
        return tensor

    def _set(self, name: str, data: Tensor) -> None:
        """Replace the tensor ``name`` by ``data`` in all modules; a parameter in memory stays the same object."""
        tensor = self._now(name)
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            tensor.data = data.to(tensor.device)
            return
        replacement = _like(tensor, data)
        for module, key in self._holders[name]:
            setattr(module, key, replacement)


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that ``module`` holds itself, not in its children, by name."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


def _blank(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the dtype, shape and strides of ``tensor``, full of NaN, or of 0 for integers."""
    blank = torch.zeros_like(tensor, device="cpu", requires_grad=False)
    return blank.fill_(torch.nan) if blank.is_floating_point() or blank.is_complex() else blank


def _is_written(tensor: Tensor, blank: Tensor, num_writes_before: int) -> bool:
    """Whether ``tensor`` has got values: it is not the tensor ``blank``, or ``blank`` was written in place."""
    if tensor is not blank or num_writes(tensor) != num_writes_before or not tensor.numel():
        return not tensor.is_meta
    return tensor.is_floating_point() and not bool(tensor.isnan().all())


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return ``data`` as a parameter if ``tensor`` is a parameter, otherwise ``data`` itself."""
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _names_of(model: nn.Module) -> dict[Tensor, str]:
    """Return a dict from each parameter and buffer of ``model`` to its name, or to the first of its names."""
    names: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        for key, tensor in _tensors_of(module):
            names.setdefault(tensor, f"{path}.{key}".removeprefix("."))
    return names


class _Files:
    """A safetensors file, or a folder of such files, with exactly the parameters and buffers of a model."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        try:
            import safetensors
        except ImportError:
            raise WeightsError(
                "weights= needs safetensors, which is not installed: pip install 'poprun[safetensors]'"
            ) from None
        self._library: Any = safetensors
        self._folder = folder
        self._sources: dict[str, tuple[str, Path]] = {}
        try:
            faults = self._compared(model, self._places())
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            self._library.SafetensorError,
        ) as error:
            raise WeightsError(
                f"weights={str(folder)!r} is no safetensors file, nor a folder of some, that can be "
                f"read: {type(error).__name__}: {error}"
            ) from error
        if faults:
            raise WeightsError(
                f"the safetensors files in {folder} are not those of this {type(model).__name__}: they "
                f"{'; they '.join(faults)}"
            )

    def __contains__(self, name: object) -> bool:
        """Whether the files contain the parameter or buffer that has the name ``name`` in the model."""
        return name in self._sources

    def read(self, name: str, like: Tensor) -> Tensor:
        """Read and return the tensor ``name``. Raise WeightsError if ``like`` has another dtype or shape."""
        key, path = self._sources[name]
        try:
            with self._library.safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
        except (OSError, self._library.SafetensorError) as error:
            raise WeightsError(f"{key} of {path} cannot be read: {error}") from error
        if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
            raise WeightsError(
                f"{key} of {path} is {tensor.dtype} of shape {tuple(tensor.shape)}, and the model has "
                f"{like.dtype} of shape {tuple(like.shape)}: convert the file or the model"
            )
        return tensor

    def _places(self) -> dict[str, Path]:
        """Return a dict from the name of each tensor in the files to the path of its file."""
        index = self._folder / _INDEX
        if index.exists():
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {key: self._folder / Path(file).name for key, file in table.items()}
        places: dict[str, Path] = {}
        for path in [self._folder] if self._folder.is_file() else sorted(self._folder.glob("*.safetensors")):
            with self._library.safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        if not places:
            raise FileNotFoundError(f"no *.safetensors in {self._folder}")
        return places

    def _compared(self, model: nn.Module, places: Mapping[str, Path]) -> list[str]:
        """Record the file of each tensor of ``model``; return faults: texts that name missing or extra tensors."""
        names_in_model = _names_of(model)
        state = {key: it for key, it in model.state_dict(keep_vars=True).items() if isinstance(it, Tensor)}
        for key, tensor in state.items():
            if key in places:
                self._sources.setdefault(names_in_model[tensor], (key, places[key]))
        lacking = [key for key, tensor in state.items() if names_in_model[tensor] == key not in self._sources]
        texts = {"lack": lacking, "have besides": sorted(places.keys() - state.keys())}
        return [f"{what} {name_first(names, _SHOWN)}" for what, names in texts.items() if names]
