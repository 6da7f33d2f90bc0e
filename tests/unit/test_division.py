"""Dividing a sum of gradients: whatever way is taken, the bits are those of torch."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from popdist.host_memory.row_reduction import divide

DIVISORS = st.floats(min_value=2.0**-140, max_value=2.0**120) | st.integers(-140, 120).map(lambda it: 2.0**it)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=40), divisor=DIVISORS)
@example(numbers=[0.0, -0.0, 1e-45, -3e38, float("inf"), float("nan")], divisor=0.5)
@example(numbers=[1e-45, 3e-45, 1e-38, 0.1], divisor=2.0)
def test_a_division_has_the_bits_of_torch(dtype: torch.dtype, numbers: list[float], divisor: float) -> None:
    """Numbers of every size, by powers of two and by others."""
    row = torch.tensor(numbers, dtype=dtype)
    expected = row.clone().div_(divisor)

    with np.errstate(all="ignore"):
        divide(row.numpy(), divisor)

    is_number = ~expected.isnan()
    assert torch.equal(row.isnan(), expected.isnan())
    assert row[is_number].numpy().tobytes() == expected[is_number].numpy().tobytes()
