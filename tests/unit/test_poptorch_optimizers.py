"""poptorch.optim: what the optimizers are, and that a model's steps are those of torch.

Holds poptorch.optim.optimizers, poptorch.optim.optimizer_kinds, poptorch.optim.variants,
poptorch.optim.optimizer_values, poptorch.optim.group_stepper, poptorch.optim.automatic_scaling,
poptorch.optim.model_optimizer, popdist.optim and popdist.optim.trust_ratio.
"""

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import popdist
import poptorch
from poptorch import optim
from poptorch.optim.model_optimizer import ModelOptimizer, accept_optimizer
from poptorch.optim.variants import TensorFlowRMSprop

Make = Callable[[Any], torch.optim.Optimizer]


class Pair:
    """A module, and the optimizer of a model that trains it."""

    def __init__(
        self, make: Make, options: poptorch.Options | None = None, module: nn.Module | None = None
    ) -> None:
        torch.manual_seed(0)
        self.module = module or nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.options = options or poptorch.Options()
        self.optimizer = make(self.module.parameters())
        accept_optimizer(self.optimizer)
        self.stepper = self.compile()

    def compile(self) -> ModelOptimizer:
        """Make ready for steps."""
        return ModelOptimizer(self.optimizer, dict(self.module.named_parameters()), self.options)

    def run(self, num_steps: int = 1, *, seed: int = 1, size: float = 1.0) -> None:
        """Make steps with random gradients."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            for it in self.module.parameters():
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
    return all(torch.equal(a, b) for a, b in zip(pair.module.parameters(), expected, strict=True))


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


def test_a_schedule_knows_that_the_device_has_stepped(recwarn: pytest.WarningsRecorder) -> None:
    """Torch's schedulers warn of an optimizer that was never stepped."""
    pair = Pair(partial(optim.SGD, lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(pair.optimizer, 1)
    pair.run()
    schedule.step()
    schedule.step()
    pair.stepper.update(pair.optimizer)

    assert not recwarn.list
    assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


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


def test_lamb_without_a_norm_is_adamw() -> None:
    """With 0 as the largest norm of the weights, in float32 and in half precision, its updates are not scaled."""
    for module in (None, nn.Linear(5, 4).bfloat16()):
        moments = {} if module is None else HALF
        lamb = Pair(partial(optim.LAMB, max_weight_norm=0.0, weight_decay=0.1, **moments), module=module)
        adamw = Pair(partial(optim.AdamW, weight_decay=0.1, **moments), module=copy.deepcopy(lamb.module))
        lamb.run(20)
        adamw.run(20)
        for ours, other in zip(lamb.module.parameters(), adamw.module.parameters(), strict=True):
            assert torch.allclose(ours.float(), other.float(), atol=1e-6 if module is None else 0.02)


def test_schedulers_work_on_the_device(recwarn: pytest.WarningsRecorder) -> None:
    """They see that steps were made, and copies and pickles of an optimizer have its settings and its state."""
    pair = Pair(partial(optim.Adam, lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(pair.optimizer, 1, gamma=0.5)
    pair.run()
    scheduler.step()
    pair.stepper.update(pair.optimizer)
    pair.optimizer.state_dict()
    for copied in (copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))):  # noqa: S301
        assert copied.param_groups[0]["lr"] == 0.5
        assert copied.state_dict()["ipu_state"]["Step___0.weight"] == 1

    assert [str(warning.message) for warning in recwarn] == []


def test_max_grad_norm_is_torchs_clipping() -> None:
    """Over all parameters, after the loss scaling is divided out."""
    pair = Pair(lambda it: optim.SGD(it, lr=0.1, loss_scaling=4.0, max_grad_norm=0.5))
    pair.run(10)

    assert same(pair, plain(lambda it: torch.optim.SGD(it, lr=0.1), 10, max_norm=0.5))


def test_the_state_has_poptorchs_names() -> None:
    """None until there is a device; then text to tensor, before the first step too."""
    host: Any = optim.Adam([nn.Parameter(torch.ones(2))])
    pair = Pair(lambda it: optim.Adam(it, lr=0.1, weight_decay=0.2, loss_scaling=2.0))
    theirs: Any = pair.optimizer
    state = theirs.state_dict()

    assert (host.state_dict()["ipu_state"], host.state_dict()["ipu_param"]) == (None, None)
    assert {"Accl1___0.weight", "Accl2___2.bias", "Step___0.weight"} <= set(state["ipu_state"])
    assert state["ipu_param"]["learningRate___specific___0.weight"] == pytest.approx(0.1)
    assert state["ipu_param"]["weightDecay___specific___2.bias"] == pytest.approx(0.2)
    assert state["ipu_param"]["lossScaling_FLOAT"] == 2.0
    assert [it.has_state() for it in (host, theirs)] == [False, True]
    alone = theirs.get_state_dict()
    assert alone.keys() == {"ipu_state", "ipu_param"}
    host.set_state_dict(alone)
    assert host.has_state()
    assert host.get_state_dict()["ipu_state"].keys() == state["ipu_state"].keys()


def test_a_training_goes_on_from_a_state() -> None:
    """As if it had not been interrupted."""
    make = lambda it: optim.SGD(it, lr=0.1, momentum=0.9, dampening=0.5)  # noqa: E731
    first, whole = Pair(make), Pair(make)
    whole.run(3)
    first.run(3)
    state = first.optimizer.state_dict()
    second = Pair(make, module=first.module)
    second.optimizer.load_state_dict(state)
    second.run(3, seed=2)
    whole.run(3, seed=2)

    assert same(second, [it.detach() for it in whole.module.parameters()])


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
    positions = 0.5, (0.8, 0.9), 1e-6, 0.1, False, True, False
    adamw = optim.AdamW([nn.Parameter(torch.ones(2))], *positions)
    assert (adamw.defaults["maximize"], adamw.defaults["foreach"]) == (True, False)


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
    exact = Pair(HALF_MAKES[kind], module=copy.deepcopy(pair.module).float())
    names = {"SGD": {"Accl1": torch.half}, "RMSprop": {"Accl1": torch.half, "Accl3": torch.half}}
    expected = names.get(kind, {"Accl1": torch.half, "Accl2": torch.float32})
    for num_steps in (0, 3):
        pair.run(num_steps)
        state = pair.optimizer.state_dict()["ipu_state"]
        assert {name: state[f"{name}___weight"].dtype for name in expected} == expected
    exact.run(3)

    assert [it.dtype for it in pair.module.parameters()] == [weights] * 2
    for ours, its in zip(pair.module.parameters(), exact.module.parameters(), strict=True):
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
            for it in pair.module.parameters():
                it.grad = torch.ones_like(it)
            pair.stepper.step()
        return next(pair.module.parameters()).detach()

    moved = trained(by_chance=True)

    assert torch.equal(trained(by_chance=False), torch.ones(64, 64).bfloat16())
    assert not torch.equal(moved, torch.ones(64, 64).bfloat16())
    assert torch.equal(moved, trained(by_chance=True))


LOGGER = "poptorch::python"


def test_values_are_logged_when_they_are_new(caplog: pytest.LogCaptureFixture) -> None:
    """Once ``setOptimizer`` was called."""
    pair = Pair(lambda it: optim.SGD(it, lr=0.01, momentum=0.5))
    with caplog.at_level("DEBUG", LOGGER):
        pair.stepper.update(pair.optimizer)
        assert caplog.messages == []
        pair.optimizer.param_groups[0]["lr"] = 0.25
        pair.stepper.update(pair.optimizer)

    (message,) = caplog.messages
    assert "learningRate=0.25" in message


@pytest.mark.parametrize("is_relaxed", [False, True])
def test_attributes_added_later_are_warned_of_once(caplog: pytest.LogCaptureFixture, is_relaxed: bool) -> None:  # noqa: FBT001 - a parameter
    """Those of the optimizer and those of groups; not the ones that were there, and none if checks are relaxed."""
    options = poptorch.Options().relaxOptimizerAttributesChecks(is_relaxed)

    pair = Pair(lambda it: _with_attribute(optim.SGD(it, lr=0.1), "early"), options)
    pair.stepper.update(pair.optimizer)
    _with_attribute(pair.optimizer, "late")
    pair.optimizer.__dict__["step"] = pair.optimizer.step  # as torch's schedulers do
    pair.stepper.update(pair.optimizer)
    pair.stepper.update(pair.optimizer)
    found = [record.message for record in caplog.records if record.levelname == "WARNING"]

    assert (
        found == []
        if is_relaxed
        else [
            "Ignoring unexpected optimizer attribute in SGD optimizer: ['late']",
            "Ignoring unexpected group 0 attribute in SGD optimizer: ['late']",
        ]
    )


def _with_attribute(optimizer: torch.optim.Optimizer, name: str) -> torch.optim.Optimizer:
    optimizer.__dict__[name] = optimizer.param_groups[0][name] = 1
    return optimizer


def test_a_derived_class_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its own code does not run on a device."""

    class Mine(torch.optim.Adam):
        def step(self, closure: object = None) -> Any:
            raise AssertionError(closure)

    pair = Pair(lambda it: Mine(it, lr=0.01))
    pair.run(2)

    assert "Poptorch does not run Python optimizer code directly" in caplog.text
    assert same(pair, plain(lambda it: torch.optim.Adam(it, lr=0.01), 2))


def test_constant_attributes_keep_their_values() -> None:
    """Those that the constructor was not given; for torch's those that equal the default. The rate is variable."""
    made = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.5, loss_scaling=2.0)
    attributes = made.variable_attrs
    assert attributes._variable_attributes == ["lr", "momentum", "loss_scaling"]
    assert attributes.isConstant("weight_decay")
    attributes.markAsConstant("momentum")
    attributes.markAsVariable("weight_decay")
    assert attributes.isConstant("momentum")
    assert not copy.copy(made).variable_attrs.isConstant("weight_decay")
    assert set(attributes._variable_attributes) <= set(attributes._allowed_attributes)
    with pytest.raises(AssertionError, match="'speed' is no attribute"):
        attributes.markAsVariable("speed")

    pair = Pair(lambda it: torch.optim.SGD(it, lr=0.1, momentum=0.5))
    pair.stepper.update(torch.optim.SGD(pair.module.parameters(), lr=0.2, momentum=0.7))
    with pytest.raises(poptorch.Error, match=r"dampening is constant, 0, and setOptimizer was given 0\.5"):
        pair.stepper.update(torch.optim.SGD(pair.module.parameters(), lr=0.2, momentum=0.7, dampening=0.5))


def test_a_kind_has_its_arguments_in_one_table() -> None:
    """The constructor's signature is the table's, and what LAMB is given is variable as of the others."""
    lamb = optim.LAMB([nn.Parameter(torch.ones(2))], 0.1, weight_decay=0.2)
    first = [*inspect.signature(optim.SGD).parameters][:3]
    assert first == ["params", "lr", "momentum"]
    assert inspect.signature(optim.RMSprop).parameters["use_tf_variant"].default is None
    assert [lamb.variable_attrs.isConstant(name) for name in ("lr", "weight_decay", "eps")] == [False, False, True]
    with pytest.raises(TypeError, match="'lr'"):
        optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="'speed'"):
        optim.Adam([nn.Parameter(torch.ones(2))], speed=1)


def test_dtypes_and_velocity_scaling_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    """PopTorch has half and float; a velocity is scaled with combined accumulators only."""
    weights = [nn.Parameter(torch.ones(2))]
    with pytest.raises(AssertionError, match="accum_type must be"):
        optim.Adam(weights, accum_type=torch.int8)
    with pytest.raises(AssertionError, match="velocity_accum_type must be"):
        optim.SGD(weights, lr=0.1, velocity_accum_type=torch.bfloat16)
    apart = optim.SGD(weights, lr=0.1, loss_scaling=4.0, velocity_scaling=8.0)
    combined = optim.SGD(weights, lr=0.1, velocity_scaling=8.0, use_combined_accum=True)

    assert "velocity_scaling" in caplog.text
    assert (apart.velocity_scaling, combined.velocity_scaling) == (4.0, 8.0)
    assert "velocity_scaling" not in apart.param_groups[0]
    assert combined.param_groups[0]["velocity_scaling"] == 8.0


def test_sgds_values_are_scaled() -> None:
    """lr(1 - dampening)/loss scaling, and 1 - lr(1 - dampening)·weight decay."""
    pair = Pair(lambda it: optim.SGD(it, lr=0.5, dampening=0.2, weight_decay=0.1, loss_scaling=4.0))
    values = pair.optimizer.state_dict()["ipu_param"]

    assert values["scaledLearningRate0___specific___0.weight"] == pytest.approx(0.1)
    assert values["weightDecayScaleFactor0___specific___0.weight"] == pytest.approx(0.96)


def test_only_states_of_poptorch_are_loaded() -> None:
    """Names may be missing; they are there after the next step. The rate follows, and the values survive."""
    make = lambda it: optim.Adam(it, lr=0.1, loss_scaling=2.0)  # noqa: E731
    pair = Pair(make)
    pair.run()
    state = pair.optimizer.state_dict()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded"):
        pair.optimizer.load_state_dict(torch.optim.Adam(pair.module.parameters()).state_dict())

    other = optim.Adam(pair.module.parameters(), lr=0.5, loss_scaling=2.0)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.state_dict()["ipu_param"].keys() == state["ipu_param"].keys()
    del state["ipu_state"]["Accl1___0.weight"]
    other.load_state_dict(state)
    pair.stepper.release()
    pair.optimizer = other
    pair.stepper = pair.compile()
    found = other.state_dict()

    assert torch.equal(found["ipu_state"]["Accl2___0.weight"], state["ipu_state"]["Accl2___0.weight"])
    assert not found["ipu_state"]["Accl1___0.weight"].any()


def test_a_new_optimizer_takes_over_the_state() -> None:
    """``setOptimizer`` with another object of the class: the velocity stays, the rate is new."""
    make = partial(optim.SGD, momentum=0.9)
    pair = Pair(partial(make, lr=0.1))
    pair.run(2)
    before = pair.optimizer.state_dict()["ipu_state"]
    other = make(pair.module.parameters(), lr=0.0)
    pair.stepper.update(other)
    weights = [it.detach().clone() for it in pair.module.parameters()]
    pair.run(1)

    assert same(pair, weights)
    assert other.state_dict()["ipu_state"].keys() == before.keys()
    with pytest.raises(poptorch.Error, match="compiled with SGD and 1 groups"):
        pair.stepper.update(optim.Adam(pair.module.parameters()))


def test_the_loss_scaling_follows_the_gradients() -> None:
    """Doubled while they are small, halved near half precision's limit; infinite ones change no weight."""
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(enabled=True)
    pair = Pair(lambda it: optim.SGD(it, lr=0.1, loss_scaling=16.0), options)
    factors = []
    for size in (1.0, 1.0, 1e4):
        factors.append(float(pair.optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]))
        assert pair.stepper.loss_scaling == 16 * factors[-1]
        pair.run(size=size)
    weights = [it.detach().clone() for it in pair.module.parameters()]
    pair.run(size=float("inf"))

    assert factors == [1, 2, 4]
    assert pair.stepper.loss_scaling == 16
    assert same(pair, weights)
    assert pair.optimizer.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 16


def test_ordinary_steps_are_torchs() -> None:
    """An optimizer of poptorch without any model."""
    for kind in ("SGD", "Adam", "AdamW", "RMSprop"):
        ours, theirs = (plain(partial(getattr(it, kind), lr=0.01), 5) for it in (optim, torch.optim))
        assert all(map(torch.equal, ours, theirs))
    for make in (HALF_MAKES["LAMB"], HALF_MAKES["RMSprop"], HALF_MAKES["AdamW"]):
        pair = Pair(make, module=nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
        start = [it.detach().clone() for it in pair.module.parameters()]
        pair.optimizer.zero_grad()
        for it in pair.module.parameters():
            it.grad = torch.ones_like(it)
        assert pair.optimizer.step(lambda: 3.0) == 3.0
        assert not any(map(torch.equal, start, pair.module.parameters()))


def test_adamw_without_bias_correction_against_its_equations() -> None:
    """In float64."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = optim.AdamW([weight], lr=0.1, betas=(0.5, 0.9), weight_decay=0.2, bias_correction=False)
    expected, (mean, square) = weight.detach().clone(), torch.zeros(2, 2, dtype=torch.float64)
    for step in range(10):
        gradient = torch.tensor([1.0, 2.0], dtype=torch.float64) * (step - 3)
        weight.grad = gradient.clone()
        optimizer.step()
        mean, square = 0.5 * mean + 0.5 * gradient, 0.9 * square + 0.1 * gradient**2
        expected = expected - 0.1 * (mean / (square.sqrt() + 1e-8) + 0.2 * expected)

    assert torch.allclose(weight.detach(), expected, rtol=1e-12)


class Rated(nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return poptorch.identity_loss(self.layer(x), reduction="mean")


def test_the_state_stays_when_a_model_is_destroyed() -> None:
    """The next compilation goes on from it; an offline device has none."""
    module, batch = Rated(), torch.ones(1, 3)
    optimizer = optim.Adam(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, optimizer=optimizer)
    model(batch)
    model.destroy()
    model(batch)

    assert optimizer.state_dict()["ipu_state"]["Step___layer.weight"] == 2
    model.destroy()
    offline = optim.Adam(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, poptorch.Options().useOfflineIpuTarget(), offline)
    model.compile(batch)
    assert offline.state_dict()["ipu_state"] is None
