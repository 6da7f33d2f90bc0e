"""The optimizer of a model in phases, against the optimizer in memory, with gradients that are given.

Holds popdist.optim.one_by_one, too.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import popdist
from popdist.optim import LAMB, LARS, LowPrecision
from popdist.parallel import PhasedModel, PhasedOptimizer, phased
from tests.torch_names import HAS_MUON

NUM_STEPS = 10

MakeModel = Callable[[nn.Module], PhasedModel]


@pytest.fixture(autouse=True, scope="module")
def _job_of_one() -> Iterator[None]:
    popdist.init()
    yield
    popdist.finalize()


@pytest.fixture
def in_phases(disk_folder: Path) -> Iterator[MakeModel]:
    """Makes models in phases, with stores of their own, of modules in memory."""
    models = list[PhasedModel]()

    def make(net: nn.Module) -> PhasedModel:
        models.append(phased(copy.deepcopy(net), phases=2, store=disk_folder / f"{len(models)}"))
        return models[-1]

    yield make
    for model in models:
        model.close()


class Given(nn.Module):
    """The weights of a module, with gradients that are given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_parameter(name, parameter)
        self.gradients: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        for name, parameter in self.named_parameters():
            if name in self.gradients:
                x = x + (parameter * self.gradients[name]).sum()
        return x


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices, vectors, numbers, and weights in another order of memory."""
    torch.manual_seed(0)
    modules = nn.Linear(33, 65), nn.LayerNorm(65), nn.Conv2d(3, 5, 3), nn.Linear(1, 1)
    net: Any = nn.Sequential(*map(Given, modules))
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


def backward(model: Any, gradients: Mapping[str, Tensor]) -> None:
    """The backward pass of a step with these gradients, in phases or in memory."""
    for place, part in enumerate(model.children() if isinstance(model, nn.Sequential) else model.module):
        names = {name: name.removeprefix(f"{place}.") for name in gradients}
        part.gradients = {short: gradients[name] for name, short in names.items() if short != name}
    x = torch.zeros(1, dtype=torch.float32)
    if isinstance(model, nn.Sequential):
        model.zero_grad()
        model(x).backward()
        return
    for (content,) in model.micro_batches((x,)):
        model(content).backward()


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    matrices = [it for it in net.parameters() if it.dim() > 1]
    return [{"params": matrices}, {"params": [it for it in net.parameters() if it.dim() <= 1], "lr": 0.003}]


class Counting(Optimizer):
    """The program's own: counts its steps in an attribute and a group, keeps numbers, and replaces its state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "num": 0})
        self.num = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
def test_the_bits_are_those_of_the_optimizer_in_memory(
    in_phases: MakeModel, name: str, *, step_in_backward: bool
) -> None:
    """Of weights and states, over ten steps with a schedule, with states exchanged in the middle."""
    kind, settings = CASES[name]
    net = make_net(torch.bfloat16 if kind is LowPrecision else torch.float32)
    model = in_phases(net)
    ours: Any = PhasedOptimizer(
        model, kind, groups_of(model.module), step_in_backward=step_in_backward, **settings
    )
    plain: Any = kind(groups_of(net), **settings)
    schedules = [schedule(it) for it in (ours, plain)]
    for step in range(NUM_STEPS):
        gradients = draw_gradients(net, step)
        for it in (model, net):
            backward(it, gradients)
        if not step_in_backward:
            norms = [torch.nn.utils.clip_grad_norm_(it.parameters(), 1.0) for it in (model, net)]
            assert torch.equal(*norms)
        ours.step()
        plain.step()
        for one in schedules[: 2 * (step < NUM_STEPS - 1)]:
            one.step()
        ours.zero_grad()
        if step == NUM_STEPS // 2:
            saved = copy.deepcopy(ours.state_dict())
            ours.load_state_dict(ours.state_dict())  # whose tensors are in the store already
            ours.load_state_dict(plain.state_dict())
            plain.load_state_dict(saved)
    check_weights(model, net)
    check_state(ours.state_dict(), plain.state_dict())


def check_weights(model: nn.Module, net: nn.Module) -> None:
    """The weights have the same bits."""
    found = model.state_dict()
    assert [name for name, it in net.state_dict().items() if not torch.equal(found[name], it)] == []


@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "LowPrecision"])
def test_a_grad_scaler_divides_and_skips_steps(in_phases: MakeModel, name: str) -> None:
    """As for the optimizer in memory, whether it leaves the division to the optimizer or not."""
    kind, settings = CASES[name]
    net = make_net(torch.bfloat16 if kind is LowPrecision else torch.float32)
    model = in_phases(net)
    ours = PhasedOptimizer(model, kind, step_in_backward=False, **settings)
    plain: Any = kind(net.parameters(), **settings)
    scalers = [GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(5):
        gradients = draw_gradients(net, step, 64.0)
        if step in (0, 2):
            gradients["0.bias"][3] = torch.inf
        for it, optimizer, scaler in zip((model, net), (ours, plain), scalers, strict=True):
            backward(it, gradients)
            scaler.scale(torch.ones((), dtype=torch.float32))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 16.0
    check_weights(model, net)
    check_state(ours.state_dict(), plain.state_dict())


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
def test_what_cannot_be_stepped_one_by_one_is_refused(
    in_phases: MakeModel,
    kind: Any,
    settings: dict[str, Any],
    message: str,
) -> None:
    """By the optimizer's name, before anything is written."""
    model = in_phases(make_net())
    with pytest.raises(popdist.OptimizerError, match=message):
        PhasedOptimizer(model, kind, **settings)
    assert model.phased_steps.run.optimizer is None


@pytest.mark.skipif(not HAS_MUON, reason=f"torch {torch.__version__} has no Muon")
def test_muon_treats_each_matrix_alone(in_phases: MakeModel) -> None:
    """So it is taken for matrices, and says what it does not take."""
    net = nn.Sequential(Given(nn.Linear(6, 4)))
    model = in_phases(net)
    with pytest.raises(ValueError, match="2D"):
        PhasedOptimizer(model, torch.optim.Muon)
    weights = [[("weight", it.get_parameter("0.weight"))] for it in (model.module, net)]
    ours = PhasedOptimizer(model, torch.optim.Muon, weights[0], lr=0.1)
    plain = torch.optim.Muon(weights[1], lr=0.1)
    for step in range(3):
        for it, optimizer in ((model, ours), (net, plain)):
            backward(it, draw_gradients(net, step + 2))
            optimizer.step()
    check_weights(model, net)
    assert ours.forms_of(model.module.get_parameter("0.bias")) == {}


def test_wrong_use_is_said_and_changes_nothing(in_phases: MakeModel) -> None:
    """Closures, groups that come late, parameters of other models, copies, states of other optimizers."""
    model = in_phases(make_net())
    with pytest.raises(popdist.OptimizerError, match="is none of the model's"):
        PhasedOptimizer(model, SGD, nn.Linear(2, 2).parameters())
    with pytest.raises(popdist.OptimizerError, match=r"from popdist.parallel.phased\(\), not a Linear"):
        PhasedOptimizer(nn.Linear(2, 2), SGD)
    optimizer = PhasedOptimizer(model, ADAMW, lr=0.01)
    backward(model, draw_gradients(model.module, 0))
    before = copy.deepcopy(optimizer.state_dict())
    adagrad = torch.optim.Adagrad(make_net().parameters())
    amsgrad = ADAMW(make_net().parameters(), amsgrad=True)
    for parameter in amsgrad.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    amsgrad.step()
    wider = copy.deepcopy(before)
    wider["state"][0]["exp_avg"] += 1.0
    wider["state"][1]["exp_avg"] = torch.ones(9)
    for wrong, message in (
        (lambda: optimizer.load_state_dict(wider), r"has .*exp_avg \(9,\).* for 0.bias"),
        (lambda: optimizer.step(lambda: 1.0), "without a closure"),
        (
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            "all its groups from the start",
        ),
        (lambda: copy.deepcopy(optimizer), "cannot be copied"),
        (lambda: optimizer.load_state_dict({}), "is no state_dict"),
        (lambda: optimizer.load_state_dict(adagrad.state_dict()), "has step, sum .* has room for step, exp_avg"),
        (lambda: optimizer.load_state_dict(amsgrad.state_dict()), "has .*max_exp_avg_sq .* for 0.weight"),
    ):
        with pytest.raises(popdist.OptimizerError, match=message):
            wrong()
    check_state(optimizer.state_dict(), before)


def test_state_that_comes_late_is_refused(in_phases: MakeModel) -> None:
    """The store has no room for it: as where a schedule sets momentum, and there was none."""
    model = in_phases(make_net())
    optimizer = PhasedOptimizer(model, SGD, lr=0.1)
    OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.raises(popdist.OptimizerError, match=r"SGD has momentum_buffer .* has room for no state"):
        backward(model, draw_gradients(model.module, 0))
