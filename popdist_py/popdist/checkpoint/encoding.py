"""Conversion of states to JSON and back; tensors are kept apart, and nothing in a checkpoint is code.

A ``state_dict()`` mostly has JSON values and tensors. torch's own states also have a few other types: tuples,
ordered dicts, counters, and keys that are no strings. These types become objects with one member, the name of the
type. Any other type is refused with its place, so that every checkpoint that was written can be read.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from popdist.errors import CheckpointError
from popdist.ground.local_tensors import is_distributed

Json = Any

_MAPPINGS: Final[dict[str, type]] = {"OrderedDict": OrderedDict, "Counter": Counter, "dict": dict}
_ATTRIBUTES: Final = "attributes"
"""The JSON member for the attributes of an OrderedDict, in which torch stores versions of a module's layers."""


def encode(state: object, place: str, tensors: dict[str, Tensor]) -> Json:
    """Return ``state`` as JSON; put its tensors into ``tensors``, under names such as ``{place}.{key}``."""
    if state is None or isinstance(state, bool | int | str):
        return state
    if isinstance(state, float):
        return state if math.isfinite(state) else {"float": str(state)}
    if isinstance(state, Tensor):
        return {"tensor": _store(state, place, tensors)}
    if isinstance(state, list):
        return [encode(item, f"{place}.{index}", tensors) for index, item in enumerate(state)]
    if isinstance(state, tuple):
        return {"tuple": encode(list(state), place, tensors)}
    if isinstance(state, Mapping):
        name = next((name for name, kind in _MAPPINGS.items() if isinstance(state, kind)), "dict")
        encoded = {
            name: [[_key(key, place), encode(value, f"{place}.{key}", tensors)] for key, value in state.items()]
        }
        attributes = vars(state) if type(state) is OrderedDict else {}
        return encoded | {_ATTRIBUTES: encode(attributes, place, tensors)} if attributes else encoded
    raise CheckpointError(
        f"{place} is a {type(state).__name__}, and a checkpoint holds tensors and JSON values (None, bool, int, "
        "float, str, lists, tuples, dicts) only: turn it into these in state_dict(), or do not save it"
    )


def decode(value: Json, tensors: Mapping[str, Any]) -> Any:
    """Return the state whose JSON is ``value``; ``tensors`` are its tensors, or their forms (shape and dtype)."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()))
    if tag == "float":
        return float(content)
    if tag == "tensor":
        return tensors[content]
    if tag == "tuple":
        return tuple(decode(content, tensors))
    state = _MAPPINGS[tag]({key: decode(item, tensors) for key, item in content})
    if _ATTRIBUTES in value:
        vars(state).update(decode(value[_ATTRIBUTES], tensors))
    return state


def tensors_of(value: Json) -> set[str]:
    """Return the names of the tensors that decoding the JSON ``value`` needs."""
    if isinstance(value, dict) and isinstance(value.get("tensor"), str):
        return {value["tensor"]}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(tensors_of, items))


def entries_of(value: Json) -> list[list[Json]] | None:
    """Return the keys and values of a mapping encoded as JSON; None if ``value`` is no encoded mapping."""
    if not isinstance(value, dict):
        return None
    tag, content = next(iter(value.items()))
    return content if tag in _MAPPINGS else None


def with_entries(mapping: Json, entries: list[list[Json]]) -> Json:
    """Return an encoded mapping with the type of ``mapping`` and with these ``entries``."""
    return {**mapping, next(iter(mapping)): entries}


def union(first: Json, other: Json) -> Json:
    """Join two encoded mappings recursively; for a key that both have, keep the value of ``first``."""
    mine, theirs = entries_of(first), entries_of(other)
    if mine is None or theirs is None:
        return first
    both = dict(mine)
    for key, value in theirs:
        both[key] = union(both[key], value) if key in both else value
    joined = with_entries(first, [[key, value] for key, value in both.items()])
    if _ATTRIBUTES in first and _ATTRIBUTES in other:
        joined[_ATTRIBUTES] = union(first[_ATTRIBUTES], other[_ATTRIBUTES])
    return joined


def _key(key: object, place: str) -> object:
    if key is None or isinstance(key, str | int):
        return key
    raise CheckpointError(f"{place} has the key {key!r}, and keys in a checkpoint are str, int or None")


def _store(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"{place} is a tensor that is sparse, quantized or without values: make it dense first"
        )
    while place in tensors:
        place += "'"
    tensors[place] = tensor.detach() if is_distributed(tensor) else tensor.detach().resolve_conj().resolve_neg()
    return place
