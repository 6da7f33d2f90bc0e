"""Batches, split into the micro batches of this instance's replicas; each micro batch is weighted by its samples.

A nest is the value that a loader yields: tensors in tuples, lists, mappings, dataclasses and classes of torch's
pytree. Tensors and lists of strings in a nest are cut along dim 0; every micro batch gets all other values
unchanged. A batch of popdist's own loader already has micro batches, and a function of the program can cut any
other batch.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from popdist.data.batch import Batch
from popdist.errors import MOST_PARTS, BatchError, as_float, whole_number
from popdist.ground.layout import micro_batch_rows
from popdist.ground.torch_private import open_nest

Nest = Any

_ALIGNMENT_BYTES: Final = 64
"""Number of bytes; tensors of torch's CPU allocator begin at its multiples, and GPU tensors at multiples too."""

_LOADER: Final = "data_loader(dataset, micro_batch_size, accumulation={})"

_CPU: Final = torch.device("cpu")
"""The CPU, because comparing devices is faster than comparing device types as text."""


def count_samples(batch: Nest) -> int:
    """Return the size of dim 0, which must be equal for every tensor in ``batch``; 0 is allowed."""
    if type(batch) in (tuple, list) and (size := _size_of_tensors(batch)) is not None:
        return size
    sizes = list(_sizes(batch, "batch"))
    if not sizes:
        raise BatchError(
            f"the batch is a {type(batch).__name__} without a tensor in it, so there is nothing to split: pass "
            "tensors, or tuples, lists, dicts or dataclasses of tensors"
        )
    first_place, num_samples = sizes[0]
    for place, size in sizes:
        if size != num_samples:
            raise BatchError(
                f"{place} holds {size} samples and {first_place} {num_samples}: all tensors of a batch are split "
                "together along dim 0, so they must agree in its size"
            )
    return num_samples


def _size_of_tensors(tensors: Sequence[Any]) -> int | None:
    """Return the size of dim 0 if ``tensors`` are plain tensors of equal size, the usual case; otherwise None."""
    found = None
    for tensor in tensors:
        if type(tensor) is not Tensor or not (shape := tensor.shape) or found not in (None, shape[0]):
            return None
        found = shape[0]
    return found


def slice_batch(batch: Nest, samples: range) -> Nest:
    """Return the samples of ``batch`` at the positions ``samples``, in the same containers; tensors are views."""

    def cut(nest: Nest) -> Nest:
        if isinstance(nest, torch.Tensor) or is_list_of_strings(nest):
            return nest[samples.start : samples.stop]
        return map_nest(nest, cut)

    return cut(batch)


def to_device(nest: Nest, device: torch.device) -> Nest:
    """Return the nested containers ``nest`` with all tensors, and objects that have ``to``, on ``device``."""
    if isinstance(nest, torch.Tensor):
        return _aligned(nest if nest.device == device else nest.to(device, non_blocking=device.type != "cpu"))
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
    return map_nest(nest, lambda child: to_device(child, device))


def _aligned(tensor: Tensor) -> Tensor:
    """Return ``tensor``; if its address is no multiple of 64, a copy with the same strides at such an address."""
    # the address of an operand changes the bits of products, and the address of a part of a batch depends on the
    # number of instances
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not is_plain or tensor.data_ptr() % _ALIGNMENT_BYTES == 0:
        return tensor
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def is_list_of_strings(nest: Nest) -> bool:
    """Whether ``nest`` is a list of strings, which is cut like a tensor, string by string."""
    if not isinstance(nest, list | tuple) or not nest or isinstance(nest[0], torch.Tensor):
        return False
    return all(isinstance(item, str | bytes) for item in nest)


def map_nest(nest: Nest, function: Callable[[Nest], Nest]) -> Nest:
    """Return a container like ``nest`` with ``function`` applied to each child; a leaf stays unchanged."""
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        kind: Any = type(nest)
        return kind._make(map(function, nest))  # a subclass such as PackedSequence may have another constructor
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
    if (opened := open_nest(nest)) is not None:
        parts, close = opened
        return close([function(part) for part in parts])
    return nest


def _sizes(nest: Nest, place: str) -> Iterator[tuple[str, int]]:
    """Yield, for every tensor or list of strings in ``nest``, its path such as ``batch[0]``, and its length."""
    if isinstance(nest, torch.Tensor):
        if nest.dim() == 0:
            raise BatchError(
                f"{place} is a tensor of shape (), which has no dim 0 to split: keep one value for each sample, "
                "or pass it as a Python number"
            )
        yield place, nest.shape[0]
    elif is_list_of_strings(nest):
        yield place, len(nest)
    else:
        for name, child in children_of(nest):
            yield from _sizes(child, place + name)


def children_of(nest: Nest) -> Iterator[tuple[str, Nest]]:
    """Yield the path (such as ``[1]`` or ``.mask``) and the value of each item of the container ``nest``."""
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(nest._fields, nest, strict=True))
    elif isinstance(nest, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(nest))
    elif isinstance(nest, MutableMapping):
        yield from ((f"[{key!r}]", value) for key, value in nest.items())
    elif is_dataclass(nest) and not isinstance(nest, type):
        yield from ((f".{field.name}", getattr(nest, field.name)) for field in fields(nest) if field.init)
    elif (opened := open_nest(nest)) is not None:
        yield from ((f"<{index}>", value) for index, value in enumerate(opened[0]))


def leaves_of(nest: Nest, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path (such as ``[1].mask``) and the value of each leaf in the nested containers ``nest``."""
    children = [] if isinstance(nest, Tensor) else [*children_of(nest)]
    if not children:
        yield place, nest
    for name, child in children:
        yield from leaves_of(child, place + name)


Split = Callable[[Nest], Sequence[Nest]]
"""A function from a batch to this instance's micro batches, replica by replica; a None has no samples."""

Splitting: TypeAlias = tuple[int, list[Nest], Sequence[float]]
"""Number of micro batches per local replica, their contents (None without samples), and their weights."""


def split_batch(
    batch: Nest,
    num_replicas: int,
    accumulation: int,
    *,
    split: Split | None = None,
    weights: Sequence[float] | None = None,
) -> Splitting:
    """Split ``batch`` into micro batches, and return each one's weight: the factor of its gradient in the mean,
    which is its number of samples unless ``weights`` is given.
    """
    is_whole = num_replicas == 1 and type(accumulation) is int and accumulation == 1
    if is_whole and split is None and weights is None and type(batch) in (tuple, list):
        size = _size_of_tensors(batch)
        if size:
            return 1, [batch], [size]  # the same result as the general code below, with fewer calls
    accumulation = whole_number("accumulation", accumulation, BatchError, maximum=MOST_PARTS)
    sizes: list[int]
    if split is not None:
        contents = _apply(split, batch)
        _expect(len(contents), "split gave {} micro batches", num_replicas, accumulation)
        sizes = [_size(content, is_weighed=weights is not None) for content in contents]
    elif dealt := batches_of_loaders(batch):
        sizes = [micro.num_samples for micro in dealt[0].micro_batches]
        contents = [micro.content for micro in batch.micro_batches] if dealt[0] is batch else _paired(dealt)
        accumulation = accumulation_of(batch, num_replicas, accumulation)
        advice = f". A loader's batch brings its own: leave accumulation out here, and write {_LOADER}"
        _expect(len(contents), "the batch has {} micro batches", num_replicas, accumulation, advice)
    else:
        contents, sizes = _cut(batch, num_replicas, accumulation)
    if not all(sizes):
        contents = [content if size else None for content, size in zip(contents, sizes, strict=True)]
    if weights is None:
        return accumulation, contents, sizes
    if not isinstance(weights, Iterable):
        raise BatchError(f"weights={weights!r} must be a list of numbers, one for each micro batch")
    weights = list(map(check_weight, weights))
    _expect(len(weights), "there are {} weights", num_replicas, accumulation)
    for index, (content, weight) in enumerate(zip(contents, weights, strict=True)):
        if content is None and weight:
            raise BatchError(f"micro batch {index} weighs {weight}, but it has no samples")
    return accumulation, contents, weights


def batches_of_loaders(batch: Nest) -> tuple[Any, ...]:
    """Return the batches in ``batch`` (one, a tuple or a list); () unless popdist's loaders have made them all."""
    batches = tuple(batch) if type(batch) in (tuple, list) else (batch,)
    return batches if all(hasattr(it, "micro_batches") for it in batches) else ()


def accumulation_of(batch: Nest, num_replicas: int, accumulation: int) -> int:
    """Return each replica's number of micro batches: ``accumulation``, or if 1, the number in a loader's batch."""
    dealt = batches_of_loaders(batch)
    return max(1, len(dealt[0].micro_batches) // num_replicas) if dealt and accumulation == 1 else accumulation


def _paired(batches: Sequence[Batch]) -> list[Nest]:
    """Return, for each micro batch, the tuple of its contents in ``batches``, the batches of several loaders."""
    numbers = [len(batch.micro_batches) for batch in batches]
    if len(set(numbers)) > 1:
        raise BatchError(
            f"the batches of one loop have {' and '.join(map(str, numbers))} micro batches: make their loaders "
            "with the same accumulation"
        )
    contents = []
    for index, micros in enumerate(zip(*(batch.micro_batches for batch in batches), strict=True)):
        missing = [number for number, micro in enumerate(micros) if not micro.num_samples]
        if missing and micros[0].num_samples:
            raise BatchError(
                f"batch {missing[0]} of this loop has no samples for micro batch {index}, and batch 0 has: make "
                "the loaders with drop_last=True, whose steps are all full, and end the epoch with the shorter one"
            )
        contents.append(tuple(micro.content for micro in micros))
    return contents


def check_weight(weight: float) -> float:
    """Check that ``weight`` is finite and not negative; return it as a float."""
    if not 0 <= as_float(weight) < math.inf:
        raise BatchError(f"weight {weight!r} is not possible: a micro batch weighs a finite number from 0 up")
    return float(weight)


def _apply(split: Split, batch: Nest) -> list[Nest]:
    """Call the program's own function ``split`` on ``batch``; return the micro batches."""
    if not callable(split):
        raise BatchError(f"split={split!r} must be a function that gives the micro batches of a batch")
    contents = split(batch)
    if not isinstance(contents, Iterable):
        raise BatchError(
            f"split gave a {type(contents).__name__}, and not this instance's micro batches as a list"
        )
    return list(contents)


def _cut(batch: Nest, num_replicas: int, accumulation: int) -> tuple[list[Nest], list[int]]:
    """Cut a batch of tensors into micro batches; return the micro batches and the number of samples of each."""
    num_samples = count_samples(batch)
    if num_replicas == accumulation == 1:
        return [batch], [num_samples]
    parts = micro_batch_rows(num_samples, num_replicas, accumulation)
    return [slice_batch(batch, it) for it in parts], [len(it) for it in parts]


def _size(content: Nest, *, is_weighed: bool) -> int:
    """Return the number of samples in a micro batch; 0 for None, and 1 for all else if weights were given."""
    if content is None:
        return 0
    return 1 if is_weighed else count_samples(content)


def _expect(number: int, what: str, num_replicas: int, accumulation: int, advice: str = "") -> None:
    if number != num_replicas * accumulation:
        raise BatchError(
            f"{what.format(number)}, and this step needs {num_replicas * accumulation}: "
            f"{num_replicas} local replicas x accumulation {accumulation}{advice.format(accumulation)}"
        )
