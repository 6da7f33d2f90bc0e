"""Points chosen from clouds of them: farthest point sampling, and nearest neighbours.

Qi, Yi, Su and Guibas, "PointNet++: Deep Hierarchical Feature Learning on Point Sets in a Metric Space", 2017.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from poptorch.errors import Error


def fps(src: Tensor, ptr: Tensor | Sequence[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Points of each cloud, each the farthest from those chosen before it.

    Args:
        src: Points, of shape (points, dimensions).
        ptr: Where each cloud begins in ``src``, and at last the number of points: 0, 10, 15 for two clouds.
        ratio: How many of a cloud's points, above 0 and up to 1; rounded up.
        random_start: Whether the first one is chosen at random; else it is the first of the cloud.

    Returns:
        Their indices in ``src`` (int64), in the order of choice, cloud after cloud.

    Raises:
        Error: If ``ptr`` does not divide ``src`` into clouds, or ``ratio`` is none.
    """
    bounds = [int(bound) for bound in ptr]
    if src.dim() != 2 or bounds[:1] != [0] or bounds[-1] != len(src) or sorted(bounds) != bounds:  # noqa: PLR2004
        raise Error(f"poptorch.fps: {bounds} does not divide points of shape {list(src.shape)} into clouds")
    if not 0 < ratio <= 1:
        raise Error(f"poptorch.fps: ratio must be above 0 and up to 1, and is {ratio}")
    chosen: list[Tensor] = []
    for first, end in pairwise(bounds):
        points = src[first:end].detach()
        if first == end:
            continue
        now = (
            torch.randint(end - first, (), device=src.device)
            if random_start
            else torch.tensor(0, device=src.device)
        )
        distances = torch.full((end - first,), math.inf, dtype=src.dtype, device=src.device)
        for _ in range(math.ceil(ratio * (end - first))):
            chosen.append(now + first)
            distances = torch.minimum(distances, (points - points[now]).square().sum(1))
            distances[now] = -1  # not again, also where all that are left coincide with it
            now = distances.argmax()
    return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=src.device)


def nearest(x: Tensor, y: Tensor, batch_x: Tensor | None = None, batch_y: Tensor | None = None) -> Tensor:
    """For each point of ``x``, the index of the nearest one of ``y`` in the same cloud.

    Args:
        x: Points, of shape (points, dimensions).
        y: Points to choose from, of the same dimensions.
        batch_x: The cloud of each point of ``x``; None for one cloud.
        batch_y: The cloud of each point of ``y``.

    Returns:
        Indices (int64), of shape (points of x,). The first one of several that are equally near.

    Raises:
        Error: If the points have different dimensions, or a cloud of ``x`` has none in ``y``.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:  # noqa: PLR2004 - points and dimensions
        raise Error(f"poptorch.nearest: points of shape {list(x.shape)} and {list(y.shape)} do not match")
    if (batch_x is None) != (batch_y is None):
        raise Error("poptorch.nearest: batch_x and batch_y are given together")
    distances = torch.cdist(x.detach().float(), y.detach().float(), compute_mode="donot_use_mm_for_euclid_dist")
    if batch_x is not None and batch_y is not None:
        distances = distances.masked_fill(batch_x[:, None] != batch_y[None, :], math.inf)
    if len(x) and (not len(y) or bool(distances.amin(1).isinf().any())):
        raise Error("poptorch.nearest: a point of x has no point of y in its cloud")
    return distances.argmin(1)
