"""A factor of the loss scaling that follows the size of the gradients, for ``setAutomaticLossScaling(True)``."""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_LARGE: Final = 65504.0 / 8  # from here on a gradient is near the largest number of half precision

_TOLERATED_SHARE: Final = 1e-7
_LARGEST_SCALING: Final = 2.0**15
_SMALLEST_SCALING: Final = 2.0**-24


class AutomaticScaling:
    """The factor by which the loss scaling of the program's optimizer is multiplied.

    Attributes:
        factor: A power of two; 1 at first.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def follow(self, gradients: Sequence[Tensor], scaling: float) -> bool:
        """Halve the factor if ``gradients`` of the loss are large, otherwise double the factor, within the limits.

        ``scaling`` is the loss scaling without the factor. Return whether all gradients are finite, so that the
        optimizer can make a step.
        """
        num_elements = sum(it.numel() for it in gradients)
        num_large = num_elements - sum(int(torch.count_nonzero(it.abs() <= _LARGE)) for it in gradients)
        if num_large > num_elements * _TOLERATED_SHARE:
            if scaling * self.factor / 2 >= _SMALLEST_SCALING:
                self.factor /= 2
        elif scaling * self.factor * 2 <= _LARGEST_SCALING:
            self.factor *= 2
        return all(math.isfinite(float(torch.linalg.vector_norm(it, math.inf))) for it in gradients if it.numel())
