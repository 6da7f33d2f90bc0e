"""poptorch.optim: what the optimizers are, and that a device's steps are those of torch.

Holds poptorch.optim.optimizers, poptorch.optim.variable_attributes, poptorch.optim.optimizer_values and
poptorch.optim.device_parts.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import popdist
import poptorch
from poptorch import optim
from poptorch.optim.arithmetic import TensorFlowRMSprop
from poptorch.optim.device_optimizer import DeviceOptimizer, accept_optimizer

Make = Callable[[Any], torch.optim.Optimizer]


class Pair:
    """A module, its copy on a device, and the optimizer of both."""

    def __init__(
        self, make: Make, options: poptorch.Options | None = None, module: nn.Module | None = None
    ) -> None:
        torch.manual_seed(0)
        self.host = module or nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.device = copy.deepcopy(self.host)
        self.options = options or poptorch.Options()
        self.optimizer = make(self.host.parameters())
        accept_optimizer(self.optimizer, self.options)
        self.stepper = self.compile()

    def compile(self) -> DeviceOptimizer:
        """Put the optimizer on the device."""
        device_of = dict(zip(self.host.parameters(), self.device.parameters(), strict=True))
        names = {parameter: name for name, parameter in self.host.named_parameters()}
        return DeviceOptimizer(self.optimizer, device_of, names, self.options)

    def run(self, num_steps: int = 1, *, seed: int = 1, size: float = 1.0) -> None:
        """Make steps with random gradients."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            for it in self.device.parameters():
                gradient = torch.randn(it.shape, generator=generator) * size * self.stepper.loss_scaling
                it.grad = gradient.to(it.dtype)
            self.stepper.step()


def plain(
    make: Make, num_steps: int, *, seed: int = 1, size: float = 1.0, max_norm: float | None = None
) -> list[Any]:
    """What a plain loop makes of the same parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = make(module.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for it in module.parameters():
            it.grad = torch.randn(it.shape, generator=generator) * size
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return [it.detach() for it in module.parameters()]


def same(pair: Pair, expected: list[Any]) -> bool:
    """Whether the device's parameters have these bits."""
    return all(torch.equal(a, b) for a, b in zip(pair.device.parameters(), expected, strict=True))


TORCH_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({}, {}),
    "SGD, momentum": ({"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}, {}),
    "SGD, combined": ({"momentum": 0.9, "dampening": 0.2}, {"use_combined_accum": True, "velocity_scaling": 8.0}),
    "SGD, nesterov": ({"momentum": 0.9, "nesterov": True, "maximize": True}, {}),
    "Adam": ({"betas": (0.8, 0.9), "weight_decay": 0.1}, {}),
    "Adam, amsgrad": ({"amsgrad": True}, {}),
    "AdamW": ({"eps": 1e-6, "weight_decay": 0.1}, {}),
    "RMSprop": ({"alpha": 0.9}, {}),
    "RMSprop, all": ({"momentum": 0.9, "centered": True, "weight_decay": 0.1}, {}),
}
"""Arguments of torch's class, and further ones of poptorch's."""


@pytest.mark.parametrize("name", TORCH_PAIRS)
@pytest.mark.parametrize("scaling", [None, 128.0])
def test_a_device_steps_as_torch_does(name: str, scaling: float | None) -> None:
    """Bit for bit, also with a loss scaling that is a power of two."""
    kind, (settings, own) = name.partition(",")[0], TORCH_PAIRS[name]
    pair = Pair(lambda it: getattr(optim, kind)(it, lr=0.01, **settings, **own, loss_scaling=scaling))
    pair.run(100)

    assert same(pair, plain(lambda it: getattr(torch.optim, kind)(it, lr=0.01, **settings), 100))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimizers_of_torch_are_taken(kind: str) -> None:
    """With the same bits."""
    make = lambda it: getattr(torch.optim, kind)(it, lr=0.01)  # noqa: E731
    pair = Pair(make)
    pair.run(10)

    assert same(pair, plain(make, 10))


def test_an_optimizer_that_poptorch_has_not_is_an_error() -> None:
    """It names those that there are."""
    with pytest.raises(poptorch.Error, match=r"cannot train with a Adagrad: take poptorch\.optim\.SGD"):
        Pair(lambda it: torch.optim.Adagrad(it, lr=0.1))


def test_tensorflows_rmsprop_against_its_equations() -> None:
    """In float64."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = TensorFlowRMSprop([weight], lr=0.1, alpha=0.9, eps=1e-3, momentum=0.8, centered=True)
    expected, square, mean, moving = weight.detach().clone(), *torch.zeros(3, 3, dtype=torch.float64)
    for step in range(20):
        gradient = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64) * (step + 1)
        weight.grad = gradient.clone()
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        mean = 0.9 * mean + 0.1 * gradient
        moving = 0.8 * moving + 0.1 * gradient / (square - mean**2 + 1e-3).sqrt()
        expected = expected - moving

    assert torch.allclose(weight.detach(), expected, rtol=1e-12)


def test_lamb_is_popdists() -> None:
    """With its bits, and a limit to the norm of the weights."""
    pair = Pair(lambda it: optim.LAMB(it, lr=0.01, weight_decay=0.1, max_weight_norm=1.0))
    pair.run(10)
    make = lambda it: popdist.optim.LAMB(it, lr=0.01, weight_decay=0.1, eps=1e-8, max_weight_norm=1.0)  # noqa: E731

    assert same(pair, plain(make, 10))


def test_max_grad_norm_is_torchs_clipping() -> None:
    """Over all parameters, after the loss scaling is divided out."""
    pair = Pair(lambda it: optim.SGD(it, lr=0.1, loss_scaling=4.0, max_grad_norm=0.5))
    pair.run(10)

    assert same(pair, plain(lambda it: torch.optim.SGD(it, lr=0.1), 10, max_norm=0.5))


def test_the_state_has_poptorchs_names() -> None:
    """None until there is a device; then text to tensor, before the first step too."""
    host = optim.Adam([nn.Parameter(torch.ones(2))])
    pair = Pair(lambda it: optim.Adam(it, lr=0.1, weight_decay=0.2, loss_scaling=2.0))
    state = pair.optimizer.state_dict()

    assert (host.state_dict()["ipu_state"], host.state_dict()["ipu_param"]) == (None, None)
    assert {"Accl1___0.weight", "Accl2___2.bias", "Step___0.weight"} <= set(state["ipu_state"])
    assert state["ipu_param"]["learningRate___specific___0.weight"] == pytest.approx(0.1)
    assert state["ipu_param"]["weightDecay___specific___2.bias"] == pytest.approx(0.2)
    assert state["ipu_param"]["lossScaling_FLOAT"] == 2.0


def test_a_training_goes_on_from_a_state() -> None:
    """As if it had not been interrupted."""
    make = lambda it: optim.SGD(it, lr=0.1, momentum=0.9, dampening=0.5)  # noqa: E731
    first, whole = Pair(make), Pair(make)
    whole.run(3)
    first.run(3)
    state = first.optimizer.state_dict()
    second = Pair(make, module=first.device)
    second.optimizer.load_state_dict(state)
    second.run(3, seed=2)
    whole.run(3, seed=2)

    assert same(second, [it.detach() for it in whole.device.parameters()])


def test_a_changed_rate_acts_after_set_optimizer_only() -> None:
    """The device keeps the values that it was told."""
    pair = Pair(lambda it: optim.SGD(it, lr=0.1))
    pair.optimizer.param_groups[0]["lr"] = 100.0
    pair.run(2)
    expected = plain(lambda it: torch.optim.SGD(it, lr=0.1), 2)
    assert same(pair, expected)

    pair.optimizer.param_groups[0]["lr"] = 0.0
    pair.stepper.update(pair.optimizer)
    pair.run(5)

    assert same(pair, expected)


def test_every_class_has_both_bases() -> None:
    """PopTorch's first, and torch's."""
    for name, copied in itertools.product(("SGD", "Adam", "AdamW", "RMSprop", "LAMB"), (False, True)):
        made = getattr(optim, name)([nn.Parameter(torch.ones(2))], lr=0.5, loss_scaling=3.0, accum_type=torch.half)
        made = copy.copy(made) if copied else made
        bases = type(made).__bases__

        assert bases == (optim.Optimizer, getattr(torch.optim, name, torch.optim.Optimizer))
        assert (made.loss_scaling, made.accum_type, made.max_grad_norm) == (3.0, torch.half, float("inf"))


HALF: dict[str, Any] = {
    "first_order_momentum_accum_type": torch.half,
    "second_order_momentum_accum_type": torch.float32,
}
HALF_MAKES: dict[str, Make] = {
    "SGD": lambda it: optim.SGD(it, lr=0.01, momentum=0.9, velocity_accum_type=torch.half, loss_scaling=8.0),
    "Adam": lambda it: optim.Adam(it, lr=0.01, **HALF),
    "AdamW": lambda it: optim.AdamW(it, lr=0.01, bias_correction=False, max_grad_norm=1.0, **HALF),
    "RMSprop": lambda it: optim.RMSprop(it, lr=0.01, momentum=0.5, centered=True, use_tf_variant=True, **HALF),
    "LAMB": lambda it: optim.LAMB(it, lr=0.01, loss_scaling=4.0, **HALF),
}


@pytest.mark.parametrize("kind", HALF_MAKES)
@pytest.mark.parametrize("weights", [torch.float32, torch.half, torch.bfloat16])
def test_the_state_has_the_dtypes_asked_for(kind: str, weights: torch.dtype) -> None:
    """Before the first step, after it, and once loaded; the weights stay near those of float32."""
    pair = Pair(HALF_MAKES[kind], module=nn.Linear(40, 30).to(weights))
    names = {"SGD": {"Accl1": torch.half}, "RMSprop": {"Accl1": torch.half, "Accl3": torch.half}}
    expected = names.get(kind, {"Accl1": torch.half, "Accl2": torch.float32})
    for num_steps in (0, 3):
        pair.run(num_steps)
        state = pair.optimizer.state_dict()["ipu_state"]
        assert {name: state[f"{name}___weight"].dtype for name in expected} == expected
    exact = Pair(HALF_MAKES[kind], module=copy.deepcopy(pair.host).float())
    exact.run(3)

    assert [it.dtype for it in pair.device.parameters()] == [weights] * 2
    for ours, its in zip(pair.device.parameters(), exact.device.parameters(), strict=True):
        assert torch.allclose(ours.float(), its, atol=0.02)


@pytest.mark.parametrize("kind", HALF_MAKES)
def test_rounding_by_chance_moves_the_weights_in_the_mean(kind: str) -> None:
    """By updates that are too small for half precision, and the same in every run."""
    options = poptorch.Options().randomSeed(7)
    options.Precision.enableStochasticRounding(enabled=True)

    def trained(*, by_chance: bool) -> torch.Tensor:
        module = nn.Linear(64, 64).bfloat16()
        nn.init.ones_(module.weight)
        pair = Pair(HALF_MAKES[kind], options if by_chance else None, module)
        pair.optimizer.param_groups[0]["lr"] = 1e-5
        pair.stepper.update(pair.optimizer)
        for _ in range(20):
            for it in pair.device.parameters():
                it.grad = torch.ones_like(it)
            pair.stepper.step()
        return next(pair.device.parameters()).detach()

    moved = trained(by_chance=True)

    assert torch.equal(trained(by_chance=False), torch.ones(64, 64).bfloat16())
    assert not torch.equal(moved, torch.ones(64, 64).bfloat16())
    assert torch.equal(moved, trained(by_chance=True))
