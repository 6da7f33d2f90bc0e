"""A loss scaling that follows the gradients: as large as half precision can hold them."""

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

_LARGE: Final = 65504.0 / 8
"""From here on a gradient is near the largest number of half precision."""

_TOLERATED_SHARE: Final = 1e-7
_LARGEST_SCALING: Final = 2.0**15
_SMALLEST_SCALING: Final = 2.0**-24


def next_factor(factor: float, scaling: float, gradients: Iterable[Tensor]) -> float:
    """What the loss scaling is multiplied by in the next step.

    It is halved if of all gradients more than one in ten million is above 8188 or no number, and else doubled,
    within 2**-24 to 2**15.

    Args:
        factor: In this step.
        scaling: The program's loss scaling.
        gradients: Of the scaled loss, in this step.
    """
    found = [(it.numel(), torch.count_nonzero(it.abs() <= _LARGE)) for it in gradients]
    num_elements = sum(number for number, _ in found)
    num_large = num_elements - sum(int(number) for _, number in found)
    if num_large > num_elements * _TOLERATED_SHARE:
        return factor / 2 if scaling * factor / 2 >= _SMALLEST_SCALING else factor
    return factor * 2 if scaling * factor * 2 <= _LARGEST_SCALING else factor


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether no gradient is infinite or no number."""
    return all(math.isfinite(float(torch.linalg.vector_norm(it, math.inf))) for it in gradients if it.numel())
