"""What programs compare results of models with."""

from typing import Any

import torch

from poptorch.custom_types import tensors_of


def allclose(
    actual: Any,  # noqa: ANN401 - nested tensors
    expected: Any,  # noqa: ANN401 - as above
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Whether two nested values have as many tensors, and ``torch.allclose`` holds for each pair of these."""
    found, wanted = tensors_of(actual), tensors_of(expected)
    return len(found) == len(wanted) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol, atol, equal_nan)
        for one, other in zip(found, wanted, strict=True)
    )
