"""Batches, split into the micro batches of this instance's replicas.

A nest is what a loader yields: tensors in tuples, named tuples, lists, mappings and dataclasses, as deep as you
like. It is cut along dim 0. A row of strings, which torch's default collate leaves a list, is cut like a tensor;
anything else in it (a number, None, an object) goes to every micro batch as it is. A batch of popdist's own loader
brings its micro batches with it, and any other batch is cut by a function of the program's own.

A micro batch weighs the samples that it holds, unless the program says what it weighs: the tokens of a sequence
model, for example.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from popdist.errors import MOST_PARTS, BatchError, as_float, whole_number
from popdist.layout import micro_batch_rows
from popdist.weights import bytes_of

Nest = Any

_MOST_TENSORS: Final = 4
_MOST_NUMBERS: Final = 4096
"""Of a batch: enough to tell it from others."""

_ALIGNMENT_BYTES: Final = 64
"""Where torch's allocator for the CPU has tensors begin; those for GPUs take multiples of it."""

_CPU: Final = torch.device("cpu")
"""To compare a device with it takes a third of the time of its type as text."""

_NO_DIM: Final = -1
"""Stands for the size of a tensor without dim 0."""


def count_samples(batch: Nest) -> int:
    """Size of dim 0 of every tensor in ``batch``; 0 is legal.

    Raises:
        BatchError: If there is no tensor, one has no dim 0, or two differ in it; the message names the places.
    """
    if type(batch) in (tuple, list) and (size := _size_of_row(batch)) is not None:
        return size
    sizes: set[int] = set()
    _add_sizes(batch, sizes)
    if len(sizes) != 1 or _NO_DIM in sizes:
        raise _no_size(batch)
    return sizes.pop()


def _size_of_row(tensors: Sequence[Any]) -> int | None:
    """Size of dim 0 of each of ``tensors``, as most loaders give them; None if it is anything else."""
    found = None
    for tensor in tensors:
        if type(tensor) is not Tensor or not (shape := tensor.shape) or found not in (None, shape[0]):
            return None
        found = shape[0]
    return found


def digest_of(batch: Nest) -> int:
    """A number that tells this batch from others by its first tensors; 0 for none and for a batch of one number.

    It looks at the beginnings of a few tensors in the memory of the CPU.
    """
    digest, has_content = hashlib.blake2b(digest_size=7), False
    for tensor in islice(_cpu_tensors(batch), _MOST_TENSORS):
        head = tensor.detach().reshape(-1)[:_MOST_NUMBERS]
        has_content |= bool((head != head[0]).any())
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(head))
    return int.from_bytes(digest.digest(), "little") if has_content else 0


def _cpu_tensors(nest: Nest) -> Iterator[Tensor]:
    if isinstance(nest, torch.Tensor):
        if nest.is_cpu and nest.layout == torch.strided and nest.numel():
            yield nest
    elif not _is_row_of_strings(nest):
        for _, child in _children(nest):
            yield from _cpu_tensors(child)


def take(batch: Nest, rows: range) -> Nest:
    """Samples ``rows`` of ``batch``: a nest of the same types, whose tensors are views of the batch's."""

    def cut(nest: Nest) -> Nest:
        if isinstance(nest, torch.Tensor) or _is_row_of_strings(nest):
            return nest[rows.start : rows.stop]
        return _map(nest, cut)

    return cut(batch)


def to_device(nest: Nest, device: torch.device) -> Nest:
    """``nest`` with its tensors, and whatever else has a method ``to``, on ``device``.

    Tensors in pinned memory are copied while the program goes on. A tensor that begins elsewhere in memory than
    torch's own ones do is copied: the bits of products depend on where their operands begin, and where a part of a
    batch begins depends on the split.
    """
    if isinstance(nest, torch.Tensor):
        return _aligned(nest if nest.device == device else nest.to(device, non_blocking=True))
    if type(nest) in (tuple, list):
        if device == _CPU:
            for child in nest:
                if type(child) is not Tensor or not child.is_cpu or child.layout is not torch.strided:
                    break
                if child.data_ptr() % _ALIGNMENT_BYTES:
                    break
            else:
                return nest
        return type(nest)([to_device(child, device) for child in nest])
    if device.type != "cpu" and callable(to := getattr(nest, "to", None)):
        return to(device)
    return _map(nest, lambda child: to_device(child, device))


def _is_aligned(tensor: Tensor) -> bool:
    """Whether ``tensor`` begins where torch's allocators have tensors begin; those of other kinds count, too."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return True
    return tensor.data_ptr() % _ALIGNMENT_BYTES == 0


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of it with the same strides that begins at an even place."""
    if _is_aligned(tensor):
        return tensor
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


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
    """Add the sizes of dim 0 of all that is cut. Their places are only looked for when one is wrong."""
    if isinstance(nest, torch.Tensor):
        shape = nest.shape
        sizes.add(shape[0] if shape else _NO_DIM)
    elif _is_row_of_strings(nest):
        sizes.add(len(nest))
    else:
        children = nest if type(nest) in (tuple, list) else [child for _, child in _children(nest)]
        for child in children:
            _add_sizes(child, sizes)


def _no_size(batch: Nest) -> BatchError:
    """The error that says why ``batch`` has no one size of dim 0."""
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


Split = Callable[[Nest], Sequence[Nest]]
"""Gives this instance's micro batches of a batch, replica by replica; None for one without samples."""


Splitting: TypeAlias = tuple[int, list[Nest], Sequence[float]]
"""This instance's micro batches of one step, local replica by local replica.

First how many each local replica has; then what the loop gets of each, None where there is nothing to compute;
last what the gradient of each counts in the mean, at least 0.
"""


def split_batch(
    batch: Nest,
    num_replicas: int,
    accumulation: int,
    *,
    split: Split | None = None,
    weights: Sequence[float] | None = None,
) -> Splitting:
    """The micro batches of ``batch``; each weighs its samples, unless ``weights`` says more.

    Args:
        batch: A nest of tensors, an object with an attribute ``micro_batches`` such as the batch of a loader of
            popdist, or anything that ``split`` understands.
        num_replicas: Local replicas.
        accumulation: Micro batches of each; 1 also stands for the number that a loader's batch has.
        split: Gives ``num_replicas x accumulation`` micro batches; ``list`` for a list of them.
        weights: One number for each micro batch, at least 0.

    Raises:
        BatchError: If the batch cannot be split so, a weight is not possible, or the numbers do not fit.
    """
    is_whole = num_replicas == 1 and type(accumulation) is int and accumulation == 1
    if is_whole and split is None and weights is None and type(batch) in (tuple, list):
        size = _size_of_row(batch)
        if size:
            return 1, [batch], [size]  # as below, with fewer calls
    accumulation = whole_number("accumulation", accumulation, BatchError, maximum=MOST_PARTS)
    sizes: list[int]
    if split is not None:
        contents = _apply(split, batch)
        _expect(len(contents), "split gave {} micro batches", num_replicas, accumulation)
        sizes = [_size(content, is_weighed=weights is not None) for content in contents]
    elif hasattr(batch, "micro_batches"):
        contents = [micro.content for micro in batch.micro_batches]
        sizes = [micro.num_samples for micro in batch.micro_batches]
        if accumulation == 1:
            accumulation = max(1, len(contents) // num_replicas)
        _expect(len(contents), "the batch has {} micro batches", num_replicas, accumulation)
    else:
        contents, sizes = _cut(batch, num_replicas, accumulation)
    if not all(sizes):
        contents = [content if size else None for content, size in zip(contents, sizes, strict=True)]
    if weights is None:
        return accumulation, contents, sizes
    weights = _check_weights(weights)
    _expect(len(weights), "there are {} weights", num_replicas, accumulation)
    for index, (content, weight) in enumerate(zip(contents, weights, strict=True)):
        if content is None and weight:
            raise BatchError(f"micro batch {index} weighs {weight}, but it has no samples")
    return accumulation, contents, weights


def _check_weights(weights: object) -> list[float]:
    if not isinstance(weights, Iterable):
        raise BatchError(f"weights={weights!r} must be a list of numbers, one for each micro batch")
    return [check_weight(weight) for weight in weights]


def check_weight(weight: float) -> float:
    """``weight`` as a float.

    Raises:
        BatchError: If it is negative or not finite.
    """
    if not 0 <= as_float(weight) < math.inf:
        raise BatchError(f"weight {weight!r} is not possible: a micro batch weighs a finite number from 0 up")
    return float(weight)


def _apply(split: Split, batch: Nest) -> list[Nest]:
    """What the program's own ``split`` makes of ``batch``."""
    if not callable(split):
        raise BatchError(f"split={split!r} must be a function that gives the micro batches of a batch")
    contents = split(batch)
    if not isinstance(contents, Iterable):
        raise BatchError(
            f"split gave a {type(contents).__name__}, and not this instance's micro batches as a list"
        )
    return list(contents)


def _cut(batch: Nest, num_replicas: int, accumulation: int) -> tuple[list[Nest], list[int]]:
    """The parts of a nest of tensors, and how many samples each has."""
    num_samples = count_samples(batch)
    if num_replicas == accumulation == 1:
        return [batch], [num_samples]
    rows = micro_batch_rows(num_samples, num_replicas, accumulation)
    return [take(batch, row) for row in rows], [len(row) for row in rows]


def _size(content: Nest, *, is_weighed: bool) -> int:
    """The samples of a micro batch of ``split``; where weights are given, it need not be a nest of tensors."""
    if content is None:
        return 0
    return 1 if is_weighed else count_samples(content)


def _expect(number: int, what: str, num_replicas: int, accumulation: int) -> None:
    if number != num_replicas * accumulation:
        raise BatchError(
            f"{what.format(number)}, and this step needs {num_replicas * accumulation}: "
            f"{num_replicas} local replicas x accumulation {accumulation}"
        )
