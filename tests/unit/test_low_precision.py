"""Weights and moments in half precision: as the optimizer itself, rounded by chance, in less memory."""

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import popdist
from popdist.optim import LAMB, LowPrecision, low_precision, rounding
from tests.unit.test_elementwise import ScalesLate, Small

SHAPES: list[tuple[int, ...]] = [(300, 7), (), (128,), (5, 1, 3)]


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """The same in each call."""
    values = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=values).to(dtype)) for shape in SHAPES]


def steps(some: list[nn.Parameter], num_steps: int = 3) -> Iterator[int]:
    """Gradients for each step; one parameter has none at first."""
    values = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for number, parameter in enumerate(some):
            gradient = torch.randn(parameter.shape, generator=values).to(parameter.dtype)
            parameter.grad = None if (step, number) == (0, 2) else gradient
        yield step


def trained(
    kind: Any = optim.AdamW,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> dict[str, Tensor]:
    """Weights and state after three steps."""
    some = parameters(dtype)
    optimizer = LowPrecision(some, kind, lr=0.01, **settings)
    for _ in steps(some):
        optimizer.step()
    return tensors_of(optimizer)


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Its weights and its state."""
    found = {}
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        found[f"{number}"] = parameter.detach().clone()
        found |= {f"{number} {name}": it for name, it in optimizer.state[parameter].items()}
    return found


def check_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bits and dtypes."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.RMSprop, optim.NAdam, Small])
def test_in_float32_it_is_the_optimizer_itself(kind: Any) -> None:
    """With weights and moments that need no rounding; one parameter has no gradient in the first step."""
    settings = {"momentum": 0.9} if kind in (optim.SGD, optim.RMSprop) else {}
    some = parameters(torch.float32)
    optimizer = kind(some, lr=0.01, **settings)
    for _ in steps(some):
        optimizer.step()
    found = trained(kind, torch.float32, moments=torch.float32, **settings)
    for name, tensor in tensors_of(optimizer).items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-8), name


def test_what_is_held_is_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and state, and nothing else is kept; single values stay what they are."""
    found = trained()
    assert {name: it.dtype for name, it in found.items() if name.startswith("0")} == {
        "0": torch.bfloat16,
        "0 step": torch.float32,
        "0 exp_avg": torch.bfloat16,
        "0 exp_avg_sq": torch.bfloat16,
    }
    assert found["1"].shape == found["1 exp_avg"].shape == ()
    assert found["0 step"] == 3
    assert found["2 step"] == 2


@pytest.mark.parametrize("kind", [optim.AdamW, Small])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_do_not_depend_on_what_is_taken_at_once(
    kind: Any,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or on the number of threads, or on whether there is C."""
    expected = trained(kind, dtype)
    monkeypatch.setattr(low_precision, "_ELEMENTS_AT_ONCE", 256)
    check_equal(trained(kind, dtype), expected)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 if num_threads > 1 else 2)
    check_equal(trained(kind, dtype), expected)
    torch.set_num_threads(num_threads)
    monkeypatch.setattr(rounding, "find_extension", lambda: None)
    check_equal(trained(kind, dtype), expected)


def test_seeds_and_ways_of_rounding_differ() -> None:
    """Rounding to the nearest is torch's."""
    by_chance, other, nearest = trained(), trained(seed=1), trained(rounding="nearest")
    assert not torch.equal(by_chance["0"], other["0"])
    assert not torch.equal(by_chance["0"], nearest["0"])
    wide = trained(dtype=torch.float32, rounding="nearest")
    assert wide["0"].dtype == torch.float32


def test_small_updates_are_not_lost() -> None:
    """200 updates of a twentieth of the distance to the next number move weights by ten of them."""
    moved = {}
    for how in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.ones(4096, dtype=torch.float16))
        optimizer = LowPrecision([weight], optim.SGD, lr=2.0**-10 / 20, rounding=how)
        for _ in range(200):
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
        moved[how] = float((weight.detach().double() - 1).mean()) * 2**10
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(10, abs=0.2)


def test_states_go_on_to_the_same_bits() -> None:
    """Loaded, copied or pickled: seed, count of steps, moments, and the weights after more steps."""
    some = parameters()
    optimizer = LowPrecision(some, optim.AdamW, lr=0.01, seed=5)
    for _ in steps(some):
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert (state["param_groups"][0]["num_steps"], state["param_groups"][0]["seed"]) == (3, 5)
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]  # noqa: S301 - the subject
    loaded = [nn.Parameter(it.detach().clone()) for it in some]
    twins.append(LowPrecision(loaded, optim.AdamW))
    twins[-1].load_state_dict(state)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in steps(some):
        optimizer.step()
    schedule.step()
    for twin in twins:
        for _ in steps(twin.param_groups[0]["params"]):
            twin.step()
        check_equal(tensors_of(twin), tensors_of(optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_a_scaler_scales_in_float32_and_skips_without_counting() -> None:
    """Gradients of float16 that would vanish without the scale do not."""
    weight = nn.Parameter(torch.ones(256, dtype=torch.float16))
    optimizer = LowPrecision([weight], optim.SGD, lr=2.0**20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight.float() * 2.0**-30).sum()).backward()
        assert weight.grad is not None
        weight.grad.mul_(factor)
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == (factor == math.inf)
    assert optimizer.param_groups[0]["num_steps"] == 2
    assert scaler.get_scale() == 2.0**19
    assert (weight == 1 - 2 * 2.0**-10).all()


def test_closures_give_the_loss() -> None:
    """As for torch's optimizers."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = LowPrecision([weight], optim.SGD, lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (weight == 0.5).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"moments": torch.int8},
            "moments=torch.int8 must be one of torch.float16, torch.bfloat16, torch.float32",
        ),
        ({"rounding": "up"}, "rounding='up' must be 'stochastic' or 'nearest'"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number"),
        ({"moments": torch.float16}, "cannot hold exp_avg_sq of AdamW.*Take moments=torch.bfloat16"),
        ({"weights": torch.float16}, r"shape \(300, 7\) is torch.bfloat16, and .* in torch.float16.*leave out w"),
        (
            {"weights": torch.int16},
            "weights=torch.int16 must be one of torch.float16, torch.bfloat16, torch.float32",
        ),
        ({"weights": 16}, "weights=16 must be one of"),
        ({"weights": "half"}, "weights=half must be one of"),
        ({"optimizer_class": optim.Adafactor}, "LowPrecision cannot hold Adafactor: it keeps means over the rows"),
        ({"optimizer_class": LAMB}, "LowPrecision cannot hold LAMB: it scales each update by the norms"),
        ({"optimizer_class": "AdamW"}, "optimizer_class='AdamW' must be a class of optimizers"),
        ({"optimizer_class": optim.SGD(parameters())}, "optimizer_class=SGD..... must be a class of optimizers"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """With what to do."""
    with pytest.raises(popdist.OptimizerError, match=said):
        LowPrecision(parameters(), **{"optimizer_class": optim.AdamW, **settings})


def test_float16_holds_moments_that_have_a_sign() -> None:
    """Those of SGD."""
    found = trained(optim.SGD, torch.float16, moments=torch.float16, momentum=0.9)
    assert found["0 momentum_buffer"].dtype == torch.float16


def test_doubles_and_whole_numbers_are_refused() -> None:
    """As weights: they would lose what they have."""
    with pytest.raises(popdist.OptimizerError, match=r"is torch\.float64, and LowPrecision was asked for"):
        LowPrecision([nn.Parameter(torch.ones(2, dtype=torch.float64))], optim.SGD)


def test_weights_says_what_all_parameters_must_be() -> None:
    """It converts nothing; without it each is taken as it is, with moments in half precision for all."""
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to(torch.bfloat16)
    LowPrecision(net.parameters(), optim.SGD, weights=torch.bfloat16)
    net[1].float()
    with pytest.raises(popdist.OptimizerError, match=r"shape \(3,\) is torch.float32, and .* in torch.bfloat16"):
        LowPrecision(net.parameters(), optim.SGD, weights=torch.bfloat16)
    groups = [{"params": [*net[0].parameters()], "weights": torch.bfloat16}, {"params": [*net[1].parameters()]}]
    optimizer = LowPrecision(groups, optim.SGD, momentum=0.9, weights=torch.float32)
    with pytest.raises(popdist.OptimizerError, match=r"in torch.float32"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]})
    assert len(optimizer.param_groups) == 2
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [it.dtype for it in net.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert {it["momentum_buffer"].dtype for it in optimizer.state.values()} == {torch.bfloat16}


def test_parameters_may_be_laid_out_anew_and_not_converted() -> None:
    """After the optimizer was made: moments follow the elements; another dtype is refused."""
    found = []
    for is_changed in (False, True):
        weight = nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).bfloat16())
        optimizer = LowPrecision([weight], optim.AdamW, lr=0.01, rounding="nearest", weights=torch.bfloat16)
        for _ in steps([weight], 2):
            optimizer.step()
            if is_changed:
                weight.data = weight.data.to(memory_format=torch.channels_last)
        found.append(weight.detach())
    assert torch.equal(*found)
    weight.data, weight.grad = weight.data.double(), None
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(popdist.OptimizerError, match=r"is torch.float64, and .* in torch.bfloat16"):
        optimizer.step()


def test_states_of_another_precision_are_refused() -> None:
    """Other moments, other weights, and a state in float32."""
    optimizer = LowPrecision(parameters(), optim.AdamW, weights=torch.bfloat16)
    plain = optim.AdamW(parameters(torch.float32))
    with pytest.raises(popdist.OptimizerError, match="not one of LowPrecision, which holds moments in bfloat16"):
        optimizer.load_state_dict(plain.state_dict())
    others = [{"moments": torch.float32}, {"weights": torch.float16, "dtype": torch.float16}]
    for settings in others:
        dtype = settings.pop("dtype", torch.bfloat16)
        other: Any = LowPrecision(parameters(dtype), optim.AdamW, **settings)  # type: ignore[arg-type] # as they are
        with pytest.raises(popdist.OptimizerError, match="state is of another precision"):
            optimizer.load_state_dict(other.state_dict())


def test_states_of_another_optimizer_are_refused() -> None:
    """And nothing is lost; settings that keep more come with the state, as in torch's optimizers."""
    some = parameters()
    optimizers = [LowPrecision(some, optim.AdamW, lr=0.01, amsgrad=amsgrad) for amsgrad in (False, True)]
    other = LowPrecision(some, optim.SGD, momentum=0.9)
    for _ in steps(some):
        for optimizer in (*optimizers, other):
            optimizer.step()
    before = tensors_of(other)
    with pytest.raises(
        popdist.OptimizerError, match="the state has exp_avg and exp_avg_sq, which SGD does not keep"
    ):
        other.load_state_dict(optimizers[0].state_dict())
    check_equal(tensors_of(other), before)
    with pytest.raises(popdist.OptimizerError, match="the state has momentum_buffer, which AdamW does not keep"):
        optimizers[0].load_state_dict(other.state_dict())
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    assert optimizers[0].state[some[0]]["max_exp_avg_sq"].dtype == torch.bfloat16
    optimizers[0].step()


def test_one_that_changes_its_ways_is_found_in_a_checked_step() -> None:
    """With the elements that it is about to update."""
    weight = nn.Parameter(torch.randn(300).to(torch.bfloat16))
    optimizer = LowPrecision([weight], ScalesLate)
    for _ in range(99):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    with pytest.raises(popdist.OptimizerError, match="LowPrecision cannot hold ScalesLate: it updates a part"):
        optimizer.step()


def test_sparse_gradients_and_odd_states_are_refused() -> None:
    """With what to do."""
    table = nn.Embedding(5, 3, sparse=True).to(torch.bfloat16)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(popdist.OptimizerError, match="sparse=False"):
        LowPrecision(table.parameters(), optim.SGD).step()
