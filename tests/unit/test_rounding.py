"""Rounding by chance is unbiased, keeps what is exact, and has the same bits in C and by torch."""

import math

import pytest
import torch
from torch import Tensor

from popdist.optim import rounding
from popdist.optim.rounding import HALVES, Place, philox, round_by_chance

NUM_ROUNDINGS = 1_000_000

SPECIAL = torch.tensor(
    [
        *(0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65505.0, 65519.0, 65520.0, -65536.0, 1e-8, -3e-8),
        *(
            2**-14,
            2**-14 * (1 - 2**-20),
            2**-24,
            1e-38,
            1e-40,
            -1e-45,
            3.3895314e38,
            3.39e38,
            3.4e38,
            -3.4e38,
            1.1,
        ),
    ]
)


def rounded(
    values: Tensor,
    dtype: torch.dtype,
    *,
    place: Place = Place(3, 0),  # noqa: B008 - a value
    name: str = "weights",
    seed: int = 0,
    step: int = 0,
) -> Tensor:
    """Rounded by chance."""
    held = torch.empty(len(values), dtype=dtype)
    round_by_chance(values, held, name, place, seed=seed, step=step)
    return held


@pytest.fixture(params=["C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the extension, where it is, and without it."""
    if request.param == "torch":
        monkeypatch.setattr(rounding, "find_extension", lambda: None)
    return str(request.param)


def test_the_generator_is_philox() -> None:
    """The known answers of its authors' library, Random123."""
    for word, seed, answer in [
        (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFF, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ]:
        row = torch.tensor([word])
        found = philox((row, row, row, row), seed)
        assert " ".join(f"{int(it):08x}" for it in found) == answer


@pytest.mark.parametrize("dtype", HALVES)
def test_c_and_torch_have_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any float32, wherever it lies in its parameter, in rows of any length."""
    values = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (30_000,), generator=values).to(torch.int32).view(torch.float32)
    every = torch.cat([SPECIAL, any_bits, torch.randn(3000, generator=values) * torch.logspace(-9, 5, 3000)])
    cases = [(every, 0, -5, 0), (every, 128 * 2**26, 2**64 - 1, 2**32 + 1), (every[:1], 256, 1, 9)]
    found = [rounded(it, dtype, place=Place(3, first), seed=seed, step=step) for it, first, seed, step in cases]
    monkeypatch.setattr(rounding, "find_extension", lambda: None)
    for (it, first, seed, step), held in zip(cases, found, strict=True):
        other = rounded(it, dtype, place=Place(3, first), seed=seed, step=step)
        assert torch.equal(held.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "number", [1.0003, -0.1, 123.456, 65503.0, 3e-6, 1e-7, -2e-8, 1e-9, 6.1e-5], ids=lambda it: f"{it:g}"
)
def test_the_mean_of_many_roundings_is_the_number(dtype: torch.dtype, number: float) -> None:
    """Within five times what chance allows, also below the smallest normal number and below the smallest one."""
    values = torch.full((NUM_ROUNDINGS,), number)
    held = rounded(values, dtype).double()
    assert len(held.unique()) == 2
    error = held.mean() - values[0].double()
    assert abs(error) < 5 * held.std() / math.sqrt(NUM_ROUNDINGS)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_exact_stays_and_what_is_beyond_is_torchs(dtype: torch.dtype, way: str) -> None:
    """Every finite number of half precision; what is larger; infinities; NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    found = rounded(every.float(), dtype)
    is_number = ~every.isnan()
    assert torch.equal(found[is_number].view(torch.int16), every[is_number].view(torch.int16))
    assert found.isnan().equal(every.isnan())
    largest = torch.finfo(dtype).max
    beyond = torch.linspace(1, 1.005, 500, dtype=torch.float64).mul(largest).float()
    beyond = torch.cat([beyond, -beyond])
    assert torch.equal(rounded(beyond, dtype), beyond.to(dtype)), way


def test_bits_belong_to_seed_step_and_element() -> None:
    """Not to how a parameter is cut; another seed, step, position or tensor has others."""
    values = torch.full((1024,), 1.001)
    whole = rounded(values, torch.bfloat16)
    parts = [rounded(values[:384], torch.bfloat16), rounded(values[384:], torch.bfloat16, place=Place(3, 384))]
    assert torch.equal(whole, torch.cat(parts))
    others = [
        rounded(values, torch.bfloat16, seed=1),
        rounded(values, torch.bfloat16, step=1),
        rounded(values, torch.bfloat16, place=Place(4, 0)),
        rounded(values, torch.bfloat16, name="exp_avg"),
    ]
    assert not any(torch.equal(whole, other) for other in others)


def test_a_part_is_rounded_as_in_the_whole(way: str) -> None:
    """Rows of any length, cut at any multiple of 128."""
    for length in (1, 7, 128, 129, 300, 1000):
        for dtype in HALVES:
            values = torch.randn(length, generator=torch.Generator().manual_seed(0))
            whole = rounded(values, dtype)
            for cut in range(128, length, 128):
                last = rounded(values[cut:], dtype, place=Place(3, cut))
                assert torch.equal(whole, torch.cat([rounded(values[:cut], dtype), last])), way
