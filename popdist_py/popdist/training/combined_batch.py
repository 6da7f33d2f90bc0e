"""A combined batch and its micro batches: any nest of tensors, cut along dim 0.

A nest is what a loader yields: tensors in tuples, named tuples, lists, mappings and dataclasses, as deep as you
like. A row of strings, which torch's default collate leaves a list, is cut like a tensor. Anything else (a number,
None, an object) goes to every micro batch as it is.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import torch

from popdist.dealing import part
from popdist.errors import BatchError

Nest = Any

_NO_DIM: Final = -1
"""Stands for the size of a tensor without dim 0."""


def count_samples(batch: Nest) -> int:
    """Size of dim 0 of every tensor in ``batch``; 0 is legal.

    Raises:
        BatchError: If there is no tensor, one has no dim 0, or two differ in it; the message names the places.
    """
    sizes: set[int] = set()
    _add_sizes(batch, sizes)
    if len(sizes) != 1 or _NO_DIM in sizes:
        raise _no_size(batch)
    return sizes.pop()


def micro_batch_rows(num_samples: int, num_replicas: int, accumulation: int) -> list[list[range]]:
    """Which samples of a combined batch belong to each local replica's micro batches.

    The batch is dealt to the replicas and each replica's part to its ``accumulation`` micro batches, first parts
    larger by one. With fewer samples than parts, the last ones are empty: a legal, smaller step.

    Raises:
        BatchError: If ``accumulation`` is below 1.
    """
    if accumulation < 1:
        raise BatchError(f"accumulation={accumulation} must be at least 1")
    replicas = [part(range(num_samples), replica, num_replicas) for replica in range(num_replicas)]
    return [[part(rows, index, accumulation) for index in range(accumulation)] for rows in replicas]


def take(batch: Nest, rows: range) -> Nest:
    """The nest of samples ``rows`` of ``batch``: of the same types, its tensors views of the batch's."""

    def cut(nest: Nest) -> Nest:
        if isinstance(nest, torch.Tensor) or _is_row_of_strings(nest):
            return nest[rows.start : rows.stop]
        return _map(nest, cut)

    return cut(batch)


def to_device(nest: Nest, device: torch.device) -> Nest:
    """``nest`` with its tensors on ``device``, and whatever else says ``to``; as it is when it is there already.

    Tensors in pinned memory are copied while the program goes on.
    """
    if isinstance(nest, torch.Tensor):
        return nest if nest.device == device else nest.to(device, non_blocking=True)
    if type(nest) in (tuple, list):
        return type(nest)([to_device(child, device) for child in nest])
    if device.type != "cpu" and callable(to := getattr(nest, "to", None)):
        return to(device)
    return _map(nest, lambda child: to_device(child, device))


def _is_row_of_strings(nest: Nest) -> bool:
    if not isinstance(nest, list | tuple) or not nest or isinstance(nest[0], torch.Tensor):
        return False
    return all(isinstance(item, str | bytes) for item in nest)


def _map(nest: Nest, function: Callable[[Nest], Nest]) -> Nest:
    """A nest like ``nest`` with ``function`` of each child; a leaf as it is."""
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(function, nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map(function, nest))
    if isinstance(nest, MutableMapping):
        mapped = copy.copy(nest)
        for key, value in nest.items():
            mapped[key] = function(value)
        return mapped
    if is_dataclass(nest) and not isinstance(nest, type):
        children = {field.name: function(getattr(nest, field.name)) for field in fields(nest) if field.init}
        return replace(nest, **children)
    return nest


def _add_sizes(nest: Nest, sizes: set[int]) -> None:
    """The sizes of dim 0 of all that is cut; without their places, which only a wrong one is asked for."""
    if isinstance(nest, torch.Tensor):
        sizes.add(nest.shape[0] if nest.dim() else _NO_DIM)
    elif _is_row_of_strings(nest):
        sizes.add(len(nest))
    else:
        children = nest if type(nest) in (tuple, list) else [child for _, child in _children(nest)]
        for child in children:
            _add_sizes(child, sizes)


def _no_size(batch: Nest) -> BatchError:
    """Why there is no one size of dim 0 in ``batch``."""
    rows = list(_rows(batch, "batch"))
    if not rows:
        return BatchError(
            f"the batch is a {type(batch).__name__} without a tensor in it, so there is nothing to split: pass "
            "tensors, or tuples, lists, dicts or dataclasses of tensors"
        )
    first_place, num_samples = rows[0]
    place, size = next((place, size) for place, size in rows if size != num_samples)
    return BatchError(
        f"{place} holds {size} samples and {first_place} {num_samples}: all tensors of a batch are split "
        "together along dim 0, so they must agree in its size"
    )


def _rows(nest: Nest, place: str) -> Iterator[tuple[str, int]]:
    """Place and size of everything in ``nest`` that is cut."""
    if isinstance(nest, torch.Tensor):
        if nest.dim() == 0:
            raise BatchError(
                f"{place} is a tensor of shape (), which has no dim 0 to split: keep one value for each sample, "
                "or pass it as a Python number"
            )
        yield place, nest.shape[0]
    elif _is_row_of_strings(nest):
        yield place, len(nest)
    else:
        for name, child in _children(nest):
            yield from _rows(child, place + name)


def _children(nest: Nest) -> Iterator[tuple[str, Nest]]:
    """Each child of ``nest`` and how Python reaches it, such as ``[1]``, ``['mask']`` or ``.mask``."""
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(nest._fields, nest, strict=True))
    elif isinstance(nest, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(nest))
    elif isinstance(nest, MutableMapping):
        yield from ((f"[{key!r}]", value) for key, value in nest.items())
    elif is_dataclass(nest) and not isinstance(nest, type):
        yield from ((f".{field.name}", getattr(nest, field.name)) for field in fields(nest) if field.init)
