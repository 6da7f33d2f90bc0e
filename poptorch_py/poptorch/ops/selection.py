"""Elements chosen from tensors: slices at a place that is known only when the model runs, and points of clouds.

Points as in Qi, Yi, Su and Guibas, "PointNet++: Deep Hierarchical Feature Learning on Point Sets in a Metric
Space", 2017.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import SupportsFloat

import torch
from torch import Tensor

from poptorch.blocks.pipeline_stages import recorded_forward
from poptorch.errors import Error, check_arguments, is_whole


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor | int, size: int, step: int = 1) -> Tensor:
    """A view of elements ``start``, ``start + step`` and so on of dimension ``dim``, up to ``start + size``.

    Args:
        tensor: What is sliced.
        dim: Which dimension; negative ones count from the last.
        start: The first element: a whole number, or a tensor that holds one.
        size: How many elements the slice spans, from 1.
        step: How far they lie apart, from 1. ``size`` is a multiple of it.
    """
    check_arguments("dynamic_slice", "a whole number", step=step)
    first = _first("dynamic_slice", tensor, dim, start, size)
    if step < 1 or (size % step and recorded_forward.get() is None):
        raise Error(f"poptorch.dynamic_slice: step {step} must divide size {size}")
    view = tensor.narrow(dim, first, size)
    return view if step == 1 else view.unfold(dim, 1, step).squeeze(-1)


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor | int, size: int) -> Tensor:  # noqa: A002 - PopTorch's name
    """A copy of ``input`` with ``src`` in place of the ``size`` elements from ``start`` on in dimension ``dim``.

    Args:
        input: What is copied.
        src: Has ``size`` elements in dimension ``dim``, otherwise the shape of ``input``, and its dtype.
        dim: Which dimension; negative ones count from the last.
        start: The first element that is replaced: a whole number, or a tensor that holds one.
        size: How many are replaced, from 1.
    """
    check_arguments("dynamic_update", "a tensor", input=input, src=src)
    first = _first("dynamic_update", input, dim, start, size)
    wanted = list(input.shape)
    wanted[dim] = size
    if list(src.shape) != wanted or src.dtype != input.dtype:
        raise Error(
            f"poptorch.dynamic_update: src must be of shape {wanted} and {input.dtype}, and is of shape "
            f"{list(src.shape)} and {src.dtype}"
        )
    return input.slice_scatter(src, dim, first, first + size)


def _first(name: str, tensor: Tensor, dim: int, start: Tensor | int, size: int) -> int:
    """The whole number in ``start``; while a model is compiled, the nearest from which the elements are there."""
    check_arguments(name, "a tensor", tensor=tensor)
    check_arguments(name, "a whole number", dim=dim, size=size)
    if not isinstance(start, Tensor):
        check_arguments(name, "a whole number", start=start)
    elif start.numel() != 1 or start.is_floating_point() or start.is_complex():
        raise Error(f"poptorch.{name}: start must be one whole number, and is {start}")
    first = int(start)
    if recorded_forward.get() is not None and -tensor.dim() <= dim < tensor.dim():
        first = max(0, min(first, tensor.shape[dim] - size))
    if not -tensor.dim() <= dim < tensor.dim() or size < 1 or not 0 <= first <= tensor.shape[dim] - size:
        raise Error(
            f"poptorch.{name}: {size} elements from {first} on of dimension {dim} do not lie in a tensor of shape "
            f"{list(tensor.shape)}"
        )
    return first


def fps(src: Tensor, ptr: Tensor | Sequence[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Indices (int64) of points, cloud after cloud, each the farthest from those of its cloud before it.

    Args:
        src: Points, of shape (points, dimensions).
        ptr: Where each cloud begins in ``src``, and at last the number of points: 0, 10, 15 for two clouds.
        ratio: How many of a cloud's points, above 0 and up to 1; rounded up.
        random_start: Whether the first one is chosen at random; else it is the first of the cloud.
    """
    check_arguments("fps", "a tensor", src=src)
    given: object = ptr.tolist() if isinstance(ptr, Tensor) else ptr
    if not isinstance(given, list | tuple) or not given or not all(map(is_whole, given)):
        raise Error(f"poptorch.fps: ptr must be whole numbers, as [0, 10, 15], and is {ptr!r}")
    bounds = [int(bound) for bound in given]
    if src.dim() != 2 or bounds[:1] != [0] or bounds[-1] != len(src) or sorted(bounds) != bounds:
        raise Error(f"poptorch.fps: {bounds} does not divide points of shape {list(src.shape)} into clouds")
    part: object = ratio
    if not isinstance(part, SupportsFloat) or not 0 < float(part) <= 1:
        raise Error(f"poptorch.fps: ratio must be above 0 and up to 1, and is {ratio!r}")
    chosen: list[Tensor] = []
    for first, end in pairwise(bounds):
        points = src[first:end].detach()
        if first == end:
            continue
        now = (
            torch.randint(end - first, (), device=src.device)
            if random_start
            else torch.tensor(0, dtype=torch.int64, device=src.device)
        )
        distances = torch.full((end - first,), math.inf, dtype=src.dtype, device=src.device)
        for _ in range(math.ceil(ratio * (end - first))):
            chosen.append(now + first)
            distances = torch.minimum(distances, (points - points[now]).square().sum(1))
            distances[now] = -1  # not again, also where all that are left coincide with it
            now = distances.argmax()
    return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=src.device)


def nearest(x: Tensor, y: Tensor, batch_x: Tensor | None = None, batch_y: Tensor | None = None) -> Tensor:
    """For each point of ``x``, the index (int64) of the nearest one of ``y`` in its cloud, the first of equals.

    Args:
        x: Points, of shape (points, dimensions).
        y: Points to choose from, of the same dimensions.
        batch_x: The cloud of each point of ``x``; None for one cloud.
        batch_y: The cloud of each point of ``y``; each cloud of ``x`` has points there.
    """
    check_arguments("nearest", "a tensor", x=x, y=y)
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise Error(f"poptorch.nearest: points of shape {list(x.shape)} and {list(y.shape)} do not match")
    if (batch_x is None) != (batch_y is None):
        raise Error("poptorch.nearest: batch_x and batch_y are given together")
    for name, clouds, points in (("batch_x", batch_x, x), ("batch_y", batch_y, y)):
        if clouds is None:
            continue
        check_arguments("nearest", "a tensor", **{name: clouds})
        if clouds.shape != points.shape[:1]:
            raise Error(f"poptorch.nearest: {name} must have the cloud of each point, and is of {clouds.shape}")
    distances = torch.cdist(x.detach().float(), y.detach().float(), compute_mode="donot_use_mm_for_euclid_dist")
    if batch_x is not None and batch_y is not None:
        distances = distances.masked_fill(batch_x[:, None] != batch_y[None, :], math.inf)
    if len(x) and (not len(y) or bool(distances.amin(1).isinf().any())):
        raise Error("poptorch.nearest: a point of x has no point of y in its cloud")
    return distances.argmin(1)
