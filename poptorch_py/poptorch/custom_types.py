"""Nested values as a list of tensors and back: tuples, lists, dicts, and types that a program registers."""

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from poptorch.errors import Error


class ICustomArgParser:
    """Says which tensors an object of a program's own type holds. Subclass it, and register an instance."""

    def yieldTensors(self, struct: Any) -> Iterator[Tensor]:
        """The tensors in ``struct``, always in the same order."""
        raise NotImplementedError

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Tensor]) -> Any:
        """An object like ``original_structure``, which may be read and is not changed, with these tensors."""
        raise NotImplementedError


PARSERS: Final[dict[type, ICustomArgParser]] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser) -> None:
    """Let arguments, results and samples be objects of ``arg_data_type`` and its subclasses."""
    if not isinstance(arg_data_type, type):
        raise Error(f"registerCustomArgParser takes a type, as MyBatch, and was given {arg_data_type!r}")
    if not isinstance(arg_parser, ICustomArgParser):
        raise Error(f"{arg_parser!r} is no poptorch.ICustomArgParser")
    PARSERS[arg_data_type] = arg_parser


def picklable_parsers() -> dict[type, ICustomArgParser]:
    """The registered parsers that can be sent to another process; classes within functions cannot."""
    return {kind: parser for kind, parser in PARSERS.items() if _can_be_pickled((kind, parser))}


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


class Structure(NamedTuple):
    """A value without its tensors."""

    kind: type | None  # ``Tensor``; the type of a container, or of a registered object; ``None`` for a constant
    value: Any = None  # what was read: the container, the object or the constant; None for a tensor
    names: tuple[Any, ...] = ()  # the keys of a dict
    parts: tuple["Structure", ...] = ()  # what a container holds


_TENSOR: Final = Structure(Tensor)


def flatten(
    # a tensor, tuple, list, dict, registered object or constant
    value: Any,
    tensors: list[Any],  # gets the tensors
    *,
    like: Structure | None = None,  # a structure whose dicts give the order of the same keys
    is_leaf: Callable[[object], bool] | None = None,  # what else counts as a tensor
) -> Structure:
    """The structure of ``value``, whose tensors are added to ``tensors``."""
    if isinstance(value, Tensor) or (is_leaf is not None and is_leaf(value)):
        tensors.append(value)
        return _TENSOR
    kind = type(value)
    parser = parser_of(kind) if PARSERS else None
    if parser is not None:
        held = list(parser.yieldTensors(value))
        if not all(isinstance(tensor, Tensor) for tensor in held):
            raise Error(f"yieldTensors of {type(parser).__name__} must give tensors only")
        tensors += held
        return Structure(kind, value, (), (_TENSOR,) * len(held))
    is_dict = isinstance(value, dict)
    if not is_dict and not isinstance(value, tuple | list):
        _check_constant(value)
        return Structure(None, value)
    names = tuple(value) if is_dict else ()
    known: tuple[Structure | None, ...] = (None,) * len(value)
    if like is not None and like.kind is kind and len(like.parts) == len(value) and {*like.names} == {*names}:
        names, known = like.names, like.parts
    held = [value[name] for name in names] if is_dict else value
    parts = [flatten(part, tensors, like=one, is_leaf=is_leaf) for part, one in zip(held, known, strict=True)]
    return Structure(kind, value, names, tuple(parts))


def unflatten(structure: Structure, tensors: Iterator[Tensor]) -> Any:
    """A value of this structure with other tensors, as many as were read."""
    kind = structure.kind
    if kind is Tensor:
        return next(tensors)
    if kind is None:
        return structure.value
    if PARSERS and structure.parts and (parser := parser_of(kind)) is not None:
        return parser.reconstruct(structure.value, iter([next(tensors) for _ in structure.parts]))
    parts = [next(tensors) if part is _TENSOR else unflatten(part, tensors) for part in structure.parts]
    if kind is tuple or kind is list:
        return kind(parts)
    if kind is dict:
        return dict(zip(structure.names, parts, strict=True))
    if issubclass(kind, dict):
        made = copy.copy(structure.value)
        made.update(zip(structure.names, parts, strict=True))
        return made
    make: Callable[[Iterable[Any]], Any] = getattr(kind, "_make", kind)
    return make(parts)


def flattened(value: Any) -> tuple[Structure, list[Tensor]]:
    """The structure of ``value``, and its tensors."""
    tensors: list[Tensor] = []
    return flatten(value, tensors), tensors


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in ``value``."""
    return flattened(value)[1]


def parser_of(kind: type) -> ICustomArgParser | None:
    """The parser that is registered for ``kind`` or the nearest of its base classes, or None."""
    return next((PARSERS[base] for base in kind.__mro__ if base in PARSERS), None)


def _check_constant(value: Any) -> None:
    """Refuse a constant that holds tensors or samples: it would be passed whole to each micro batch."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, np.ndarray):
        raise Error("numpy arrays are neither arguments nor results of models: give tensors")
    held = getattr(value, "__dict__", None) or {}
    if not isinstance(value, torch.nn.Module | type) and any(isinstance(part, Tensor) for part in held.values()):
        raise Error(
            f"an object of {type(value).__name__} holds tensors: say which with "
            f"poptorch.registerCustomArgParser({type(value).__name__}, parser)"
        )
