"""Means are exact: no order of adding, and no magnitude, changes a bit.

Holds popdist.metrics.mean.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import popdist

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


@given(st.lists(NUMBERS, min_size=1), st.integers(1, 2**60) | st.floats(1e-300, 1e300))
def test_a_mean_is_the_exact_quotient_rounded_once(totals: list[float], count: float) -> None:
    """As fractions have it, whatever the magnitudes; infinite where no float is so large."""
    wanted = sum(map(Fraction, totals)) / Fraction(count)
    try:
        rounded = float(wanted)
    except OverflowError:
        rounded = math.inf if wanted > 0 else -math.inf
    assert popdist.weighted_mean(totals, count) == rounded


@pytest.mark.parametrize(
    ("totals", "wanted"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e308, 1e308], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([1e308] * 4, math.inf),
        ([1e308, 1e308, -1e308, -1e308, 1.0], 1.0),
        ([5e-324] * 3, 1.5e-323),
    ],
)
def test_what_is_not_finite_is_as_in_floats(totals: list[float], wanted: float) -> None:
    """NaN and infinity come through; a sum that is too large on the way, and not at its end, is right."""
    assert popdist.weighted_mean(totals, 1) == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    "totals",
    [
        6,
        6.0,
        torch.tensor(6, dtype=torch.int32),
        torch.tensor([[1.5, 2.5], [2.0, 0.0]], dtype=torch.bfloat16, requires_grad=True),
        [1, torch.tensor(2.0), [3.0]],
        (number for number in (1.0, 5.0)),
        np.float32(6),
        np.int64(6),
        np.full(3, 2.0),
        [True] * 6,
        Fraction(6),
    ],
)
def test_totals_are_numbers_tensors_or_lists_of_them(totals: Any) -> None:
    """All elements are added."""
    assert popdist.weighted_mean(totals, [3, 1]) == 1.5


@pytest.mark.parametrize(
    "wrong", ["1", b"1", None, {1: 2}, {1.0}, 1j, [1.0, "a"], torch.ones(1, dtype=torch.cfloat)]
)
def test_what_is_no_number_is_refused_and_not_added(wrong: Any) -> None:
    """Neither as a total nor as a count."""
    mean = popdist.Mean()
    mean.add(3, 2)
    for arguments in [(wrong, 1), (1, wrong)]:
        with pytest.raises(popdist.CollectiveError, match=r"Mean\.add\(.*expected numbers, tensors, or lists"):
            mean.add(*arguments)
        with pytest.raises(popdist.CollectiveError, match=r"weighted_mean\(.*expected numbers, tensors, or lists"):
            popdist.weighted_mean(*arguments)
    assert mean.compute() == 1.5


def test_a_long_list_is_named_by_its_type() -> None:
    """And nothing that was counted has no mean."""
    with pytest.raises(popdist.CollectiveError, match=r"Mean\.add\(a list, -1\): expected a finite count"):
        popdist.Mean().add([1.0] * 100, -1)
    with pytest.raises(popdist.CollectiveError, match=r"Mean\.compute\(\): the counts .* add up to 0"):
        popdist.Mean().compute()
