"""The optimizer of a model in phases, over a stand-in of the model that holds one parameter at a time.

Holds popdist.optim.one_by_one, too.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import popdist
from popdist.gradients.stored_gradients import stored_gradient, updated_gradient
from popdist.optim import LAMB, LARS, LowPrecision
from popdist.parallel import PhasedOptimizer
from popdist.parallel.phase_layout import Form

NUM_STEPS = 10


class InPhases(nn.Module):
    """Holds the weights, gradients and state of a model aside, as a PhasedModel does in its store."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.forms = {parameter: Form.of(parameter) for parameter in self.parameters()}
        self.weights = {parameter: parameter.detach().clone() for parameter in self.parameters()}
        self.gradients: dict[Parameter, Tensor] = {}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.optimizer: Any = None
        self.store = self
        for parameter in self.forms:
            self.put_away(parameter)

    def put_away(self, parameter: Parameter) -> None:
        """Leave no weights."""
        parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)

    def form_of(self, parameter: Tensor) -> Form:
        """Of its weights."""
        return self.forms[parameter]  # type: ignore[index]

    def attach_optimizer(self, optimizer: PhasedOptimizer) -> None:
        """Make room for the state."""
        self.optimizer = optimizer
        self.state = {
            parameter: {
                name: form.view(torch.zeros(form.num_bytes, dtype=torch.uint8))
                for name, form in optimizer.forms_of(parameter).items()
            }
            for parameter in self.forms
        }

    def stored_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the store has."""
        return self.state[parameter]

    def write_state(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write to the store."""
        for name, tensor in tensors.items():
            self.state[parameter][name].copy_(tensor)

    def place_of(self, tensor: Tensor) -> tuple[str, int] | None:
        """Where a tensor of the store lies."""
        places = {it.data_ptr() for state in self.state.values() for it in state.values()}
        return ("state", tensor.data_ptr()) if tensor.data_ptr() in places else None

    @contextmanager
    def loaded(self, parameter: Parameter) -> Iterator[dict[str, Tensor]]:
        """The weights and state of ``parameter`` in memory, the state only if it was written before."""
        slot = {
            name: tensor.clone() if self.optimizer.has_state(parameter) else torch.full_like(tensor, 77)
            for name, tensor in self.state[parameter].items()
        }
        parameter.data = self.weights[parameter].clone()
        yield slot
        self.weights[parameter].copy_(parameter.detach())
        if self.optimizer.has_state(parameter):
            self.write_state(parameter, slot)
        self.put_away(parameter)

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """End the backward pass of a step with these gradients."""
        parameters = dict(self.module.named_parameters())
        if self.optimizer.step_in_backward:
            self.optimizer.begin_update()
        for name, gradient in reversed([*gradients.items()]):
            parameter, content = parameters[name], gradient.clone()
            if self.optimizer.step_in_backward:
                with self.loaded(parameter) as state:
                    self.optimizer.update(parameter, content, state)
                parameter.grad = updated_gradient(name, parameter)
            else:
                self.gradients[parameter] = content
                parameter.grad = stored_gradient(name, content, partial(lambda it: it, content))
        if self.optimizer.step_in_backward:
            self.optimizer.end_update()

    def finish_step(self, update: Callable[[Parameter, Tensor, dict[str, Tensor]], None] | None = None) -> None:
        """Have all parameters updated."""
        for parameter, gradient in reversed([*self.gradients.items()]):
            assert update is not None
            with self.loaded(parameter) as state:
                update(parameter, gradient.clone(), state)


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices, vectors, numbers, and weights in another order of memory."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.Conv2d(3, 5, 3), nn.Linear(1, 1))
    made: nn.Module = net.to(dtype).to(memory_format=torch.channels_last)
    return made


def draw_gradients(net: nn.Module, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Those of a step; at times one is missing."""
    numbers = torch.Generator().manual_seed(step)
    drawn = {
        name: (torch.randn(it.shape, generator=numbers, dtype=torch.float32) * scale).to(it)
        for name, it in net.named_parameters()
    }
    return {name: it for name, it in drawn.items() if step != 1 or name != "1.weight"}


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    matrices = [it for it in net.parameters() if it.dim() > 1]
    return [{"params": matrices}, {"params": [it for it in net.parameters() if it.dim() <= 1], "lr": 0.003}]


class Counting(Optimizer):
    """The program's own: counts its steps in an attribute and a group, keeps numbers, and replaces its state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:  # noqa: ANN401 - torch's own
        super().__init__(params, {"lr": lr, "num": 0})
        self.num = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401 - torch's own
        """Update the parameters."""
        del closure
        self.num += 1
        for group in self.param_groups:
            group["num"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["num"] = state.get("num", 0) + 1
                    state["mean"] = state.get("mean", 0.0) * 0.5 + float(parameter.grad.mean())
                    state["none"] = None
                    state["speed"] = state.get("speed", 0) + parameter.grad / (self.num + group["num"])
                    parameter.data = parameter.data - group["lr"] * state["speed"] * (state["num"] + state["mean"])


class ClipsAll(Counting):
    """Mixes parameters, as far as gradients are large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401 - torch's own
        """Clip all gradients together first."""
        torch.nn.utils.clip_grad_norm_([it for group in self.param_groups for it in group["params"]], 1000.0)
        super().step(closure)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD without state": (SGD, {"lr": 0.1}),
    "AdamW": (ADAMW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "fused AdamW": (ADAMW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "LAMB": (LAMB, {"lr": 0.01}),
    "LARS": (LARS, {"lr": 0.01}),
    "LowPrecision": (LowPrecision, {"optimizer_class": ADAMW, "lr": 0.01, "seed": 3}),
    "Counting": (Counting, {"lr": 0.01}),
}


def schedule(optimizer: Optimizer) -> LRScheduler:
    """One that sets momentum, too, where there is some."""
    if optimizer.defaults.get("momentum") or "betas" in optimizer.defaults:
        return OneCycleLR(optimizer, 0.05, total_steps=NUM_STEPS)
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def check_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two states are equal, with the types of their values and the settings."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert list(found["state"][number]) == list(state)
        for name, value in state.items():
            here = found["state"][number][name]
            assert type(here) is type(value)
            same = torch.equal(here, value) if isinstance(value, Tensor) else here == value
            assert same, name


@pytest.mark.parametrize(
    ("name", "step_in_backward"),
    [*((name, True) for name in CASES), ("SGD", False), ("AdamW", False), ("LAMB", False)],
)
def test_the_bits_are_those_of_the_optimizer_in_memory(name: str, *, step_in_backward: bool) -> None:
    """Of weights and states, over ten steps with a schedule, with states exchanged in the middle."""
    kind, settings = CASES[name]
    net = make_net(torch.bfloat16 if kind is LowPrecision else torch.float32)
    model = InPhases(copy.deepcopy(net))
    phased: Any = PhasedOptimizer(
        model, kind, groups_of(model.module), step_in_backward=step_in_backward, **settings
    )
    plain: Any = kind(groups_of(net), **settings)
    schedules = [schedule(it) for it in (phased, plain)]
    parameters = dict(net.named_parameters())
    for step in range(NUM_STEPS):
        gradients = draw_gradients(net, step)
        model.backward(gradients)
        for key, parameter in parameters.items():
            parameter.grad = gradients[key].clone() if key in gradients else None
        if not step_in_backward:
            norms = [torch.nn.utils.clip_grad_norm_(it.parameters(), 1.0) for it in (model, net)]
            assert torch.equal(*norms)
        phased.step()
        plain.step()
        for it in schedules[: 2 * (step < NUM_STEPS - 1)]:
            it.step()
        model.gradients.clear()
        phased.zero_grad()
        if step == NUM_STEPS // 2:
            saved = copy.deepcopy(phased.state_dict())
            phased.load_state_dict(phased.state_dict())  # whose tensors are in the store already
            phased.load_state_dict(plain.state_dict())
            plain.load_state_dict(saved)
    for parameter, weights in zip(net.parameters(), model.weights.values(), strict=True):
        assert torch.equal(weights, parameter)
    check_state(phased.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "LowPrecision"])
def test_a_grad_scaler_divides_and_skips_steps(name: str) -> None:
    """As for the optimizer in memory, whether it leaves the division to the optimizer or not."""
    kind, settings = CASES[name]
    net = make_net(torch.bfloat16 if kind is LowPrecision else torch.float32)
    model = InPhases(copy.deepcopy(net))
    phased = PhasedOptimizer(model, kind, step_in_backward=False, **settings)
    plain: Any = kind(net.parameters(), **settings)
    scalers = [GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(5):
        gradients = draw_gradients(net, step, 64.0)
        if step in (0, 2):
            gradients["0.bias"][3] = torch.inf
        model.backward(gradients)
        for key, parameter in net.named_parameters():
            parameter.grad = gradients[key].clone() if key in gradients else None
        for scaler, optimizer in zip(scalers, (phased, plain), strict=True):
            scaler.scale(torch.ones((), dtype=torch.float32))
            scaler.step(optimizer)
            scaler.update()
        model.gradients.clear()
        phased.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 16.0
    for parameter, weights in zip(net.parameters(), model.weights.values(), strict=True):
        assert torch.equal(weights, parameter)
    check_state(phased.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (torch.optim.LBFGS, {}, "cannot step with LBFGS: it takes inner products over all parameters"),
        (ClipsAll, {}, "cannot step with ClipsAll: it updates several parameters together to other bits"),
        (torch.optim.SparseAdam, {}, "cannot step with SparseAdam: it failed in a step: .* dense gradients"),
        (nn.Linear, {}, "takes a class of optimizers, not <class .*Linear"),
        (LowPrecision, {"optimizer_class": LAMB}, "LowPrecision cannot hold LAMB"),
        (SGD, {"step_in_backward": "no"}, "step_in_backward='no' must be True or False"),
    ],
)
def test_what_cannot_be_stepped_one_by_one_is_refused(kind: Any, settings: dict[str, Any], message: str) -> None:  # noqa: ANN401 - a wrong one, too
    """By the optimizer's name, before anything is written."""
    model = InPhases(make_net())
    with pytest.raises(popdist.OptimizerError, match=message):
        PhasedOptimizer(model, kind, **settings)
    assert model.optimizer is None


def test_muon_treats_each_matrix_alone() -> None:
    """So it is taken for matrices, and says what it does not take."""
    net = nn.Linear(6, 4)
    model = InPhases(copy.deepcopy(net))
    with pytest.raises(ValueError, match="2D"):
        PhasedOptimizer(model, torch.optim.Muon)
    phased = PhasedOptimizer(model, torch.optim.Muon, [("weight", model.module.weight)], lr=0.1)
    plain = torch.optim.Muon([("weight", net.weight)], lr=0.1)
    for step in range(3):
        gradients = draw_gradients(net, step + 2)
        model.backward({"weight": gradients["weight"]})
        net.weight.grad = gradients["weight"].clone()
        phased.step()
        plain.step()
    assert torch.equal(model.weights[model.module.weight], net.weight)  # type: ignore[index]
    assert phased.forms_of(model.module.bias) == {}  # type: ignore[arg-type]


def test_wrong_use_is_said_and_changes_nothing() -> None:
    """Closures, groups that come late, parameters of other models, copies, states of other optimizers."""
    model = InPhases(make_net())
    with pytest.raises(popdist.OptimizerError, match="is none of the model's"):
        PhasedOptimizer(model, SGD, nn.Linear(2, 2).parameters())
    with pytest.raises(popdist.OptimizerError, match=r"from popdist.parallel.phased\(\), not a Linear"):
        PhasedOptimizer(nn.Linear(2, 2), SGD)
    optimizer = PhasedOptimizer(model, ADAMW, lr=0.01)
    model.backward(draw_gradients(model.module, 0))
    before = copy.deepcopy(optimizer.state_dict())
    adagrad = torch.optim.Adagrad([torch.nn.Parameter(it.clone()) for it in model.weights.values()])
    amsgrad = ADAMW(make_net().parameters(), amsgrad=True)
    for parameter in amsgrad.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    amsgrad.step()
    with pytest.raises(popdist.OptimizerError, match="was read"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for wrong, message in (
        (lambda: optimizer.step(lambda: 1.0), "without a closure"),
        (
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            "all its groups from the start",
        ),
        (lambda: copy.deepcopy(optimizer), "cannot be copied"),
        (lambda: optimizer.load_state_dict({}), "is no state_dict"),
        (lambda: optimizer.load_state_dict(adagrad.state_dict()), "has step, sum .* has room for step, exp_avg"),
        (lambda: optimizer.load_state_dict(amsgrad.state_dict()), "has .*max_exp_avg_sq .* for module.0.weight"),
    ):
        with pytest.raises(popdist.OptimizerError, match=message):
            wrong()
    check_state(optimizer.state_dict(), before)


def test_state_that_comes_late_is_refused() -> None:
    """The store has no room for it: as where a schedule sets momentum, and there was none."""
    model = InPhases(make_net())
    optimizer = PhasedOptimizer(model, SGD, lr=0.1)
    OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.raises(popdist.OptimizerError, match=r"SGD has momentum_buffer .* has room for no state"):
        model.backward(draw_gradients(model.module, 0))
