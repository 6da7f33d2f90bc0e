"""The laws of the optimizer of a model in phases, the same for any number of instances; each runs all of them."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import popdist
from popdist.optim import LAMB, LARS, LowPrecision
from popdist.parallel import PhasedOptimizer, phased, recompute
from tests.contract.collective_laws import refused
from tests.contract.phased_laws import assert_equal
from tests.contract.training_laws import share
from tests.unit.test_phased_optimizer import check_state

NUM_STEPS = 10
SIZE = 8


class Layer(nn.Module):
    """Adds to what comes in; of two vectors it uses one in the first step, and the other one later."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(SIZE, 65), nn.Linear(65, SIZE)
        self.late, self.early = (nn.Parameter(torch.zeros(SIZE, dtype=torch.float32)) for _ in range(2))
        self.is_early = False

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        x = x + (self.early if self.is_early else self.late)
        result: Tensor = x + self.narrow(self.wide(x).tanh())
        return result


class Tower(nn.Module):
    """Layers between two projections; a number stays in memory, a layer is skipped at times."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.last = nn.Linear(SIZE, 4)
        self.factor = nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
        self.is_skipping = False
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        x = self.frozen(self.first(x))
        for index, layer in enumerate(self.layers):
            if index != 2 or not self.is_skipping:
                x = layer(x)
        result: Tensor = self.last(x) * self.factor
        return result


def batch_of(step: int, accumulation: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This instance's samples of a step."""
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 6 * popdist.num_replicas() * accumulation, 4, generator=numbers, dtype=torch.float32)
    return share((x.to(dtype), y.to(dtype)))


def make(kind: type[Optimizer], folder: Path, dtype: torch.dtype, *, in_backward: bool, **settings: Any) -> Any:
    """A model in memory and one in phases, each with its optimizer of two groups."""
    tower = Tower(dtype)
    plain = popdist.ReplicatedModel(recompute(copy.deepcopy(tower)))
    in_phases = phased(tower, phases=3, store=folder)
    optimizer = PhasedOptimizer(in_phases, kind, groups_of(in_phases), step_in_backward=in_backward, **settings)
    return (plain, kind(groups_of(plain), **settings)), (in_phases, optimizer)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The matrices that are trained, and the vectors with a learning rate of their own."""
    trained = [it for it in model.parameters() if it.requires_grad]
    matrices, vectors = [it for it in trained if it.dim() > 1], [it for it in trained if it.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "lr": 0.003}]


def train(model: Any, optimizer: Any, batch: Any, accumulation: int, after: Callable[..., object]) -> None:
    """One step."""
    for x, y in model.micro_batches(batch, accumulation):
        mse_loss(model(x), y).backward()
    after(model, optimizer)


def check_equal(pairs: Any) -> None:
    """Weights and states have the same bits."""
    (plain, optimizer), (in_phases, phased_optimizer) = pairs
    assert_equal(in_phases.state_dict(), plain.module.state_dict())
    check_state(phased_optimizer.state_dict(), optimizer.state_dict())


def check_bits(  # noqa: PLR0913 - a case
    folder: Path,
    kind: type[Optimizer],
    make_schedule: Callable[[Any], Any],
    after: Callable[..., object],
    *,
    accumulation: int = 1,
    in_backward: bool = True,
    num_steps: int = NUM_STEPS,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> None:
    """Train in memory and in phases, and compare; in the middle the state is loaded anew."""
    pairs = make(kind, folder, dtype, in_backward=in_backward, **settings)
    schedules = [make_schedule(optimizer) for _, optimizer in pairs]
    for step in range(num_steps):
        for (model, optimizer), schedule in zip(pairs, schedules, strict=True):
            model.module.is_skipping = step == 1
            for layer in model.module.layers:
                layer.is_early = step == 0
            train(model, optimizer, batch_of(step, accumulation, dtype), accumulation, after)
            schedule.step()
        if step == num_steps // 2:
            (_, optimizer), (_, phased_optimizer) = pairs
            check_equal(pairs)
            popdist.barrier()  # all have read what is now written
            phased_optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
            phased_optimizer.load_state_dict(optimizer.state_dict())
            popdist.barrier()
    check_equal(pairs)


def step_only(_model: object, optimizer: Optimizer) -> None:
    """The loop of most programs."""
    optimizer.step()
    optimizer.zero_grad()


def clip_with(clip: Callable[..., object], model: nn.Module, optimizer: Optimizer) -> None:
    """A step with clipped gradients, which are read once more."""
    clip([it for it in model.parameters() if it.requires_grad], 0.1)
    total = sum(float(it.grad.abs().sum()) for it in model.parameters() if it.grad is not None)
    assert total > 0
    optimizer.step()


def decay(optimizer: Optimizer) -> LambdaLR:
    """A learning rate that falls."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    """A learning rate, and a momentum, that rise and fall."""
    return OneCycleLR(optimizer, 0.1, total_steps=NUM_STEPS + 1)


def law_updates_in_the_backward_pass_have_the_bits_of_those_in_memory(folder: Path) -> None:
    """Over ten steps with a schedule, with one micro batch of each replica and with several."""
    check = partial(check_bits, after=step_only)
    check(folder / "sgd", SGD, one_cycle, lr=0.1, momentum=0.9)
    check(folder / "adamw", AdamW, one_cycle, lr=0.01, accumulation=2)
    check(folder / "lamb", LAMB, decay, lr=0.01)
    check(folder / "lars", LARS, decay, lr=0.1)
    low: dict[str, Any] = {"optimizer_class": AdamW, "lr": 0.01, "seed": 5}
    check(folder / "low", LowPrecision, decay, dtype=torch.bfloat16, **low)


def law_a_pass_after_the_backward_pass_has_the_bits_of_a_step_in_memory(folder: Path) -> None:
    """With gradients clipped by torch and by popdist."""
    check = partial(check_bits, in_backward=False, num_steps=5)
    by_torch = partial(clip_with, torch.nn.utils.clip_grad_norm_)
    check(folder / "adamw", AdamW, decay, by_torch, lr=0.01)
    check(folder / "lamb", LAMB, decay, partial(clip_with, popdist.clip_grad_norm_), lr=0.01, accumulation=2)


def law_a_grad_scaler_divides_and_skips_steps(folder: Path) -> None:
    """As in memory; a loop may follow a step that was skipped."""
    pairs = make(AdamW, folder, torch.float32, in_backward=False, lr=0.01)
    scalers = [GradScaler("cpu", init_scale=2.0**127, growth_interval=3) for _ in pairs]
    for step in range(6):
        for (model, optimizer), scaler in zip(pairs, scalers, strict=True):
            for x, y in model.micro_batches(batch_of(step, 1, torch.float32)):
                scaler.scale(mse_loss(model(x), y) * 10).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**127
    assert pairs[0][1].state_dict()["state"], "no step was made"
    check_equal(pairs)


class Failing(SGD):
    """Fails in the second layer that it updates, if it is to fail."""

    is_failing = False
    num_updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters, or fail."""
        super().step(closure)
        type(self).num_updates += self.is_failing
        if self.num_updates > 1:
            raise ArithmeticError("no step")


def law_a_failure_in_an_update_is_known_afterwards(folder: Path) -> None:
    """As weights of two steps are in the store, nothing goes on with them."""
    batch = batch_of(0, 1, torch.float32)
    for in_backward in (True, False):
        place = folder / f"{in_backward}"
        _, (model, optimizer) = make(Failing, place, torch.float32, in_backward=in_backward, lr=0.01)
        train(model, optimizer, batch, 1, step_only)
        Failing.is_failing = True
        try:
            with refused(ArithmeticError, "no step"):
                train(model, optimizer, batch, 1, step_only)
        finally:
            Failing.is_failing, Failing.num_updates = False, 0
        with refused(popdist.MicroBatchError, "without a gradient|was lost"):
            optimizer.step()
        for use in (model.state_dict, partial(train, model, optimizer, batch, 1, step_only)):
            with refused(popdist.StoreError, "step 2 is half made.*checkpoint"):
                use()


def law_wrong_use_is_an_error_on_every_instance(folder: Path) -> None:
    """Steps without a loop, loops without a step, gradients that are read too late, states of others."""
    _, (model, optimizer) = make(AdamW, folder / "backward", torch.float32, in_backward=True, lr=0.01)
    batch = batch_of(0, 1, torch.float32)
    with refused(popdist.MicroBatchError, "optimizer.step\\(\\) without a gradient"):
        optimizer.step()
    train(model, optimizer, batch, 1, lambda *_: None)
    with refused(popdist.OptimizerError, "was read, .*step_in_backward=False"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with refused(popdist.GradientError, "optimizer.step\\(\\) was not called"):
        train(model, optimizer, batch, 1, step_only)
    optimizer.step()
    with refused(popdist.MicroBatchError, "without a gradient"):
        optimizer.step()
    train(model, optimizer, batch, 1, step_only)
    other = Adagrad(Tower(torch.float32).parameters())
    with refused(ValueError, "parameter group"):
        optimizer.load_state_dict(other.state_dict())
    with refused(popdist.OptimizerError, "has a PhasedOptimizer already"):
        PhasedOptimizer(model, SGD, lr=0.1)
    _, (model, optimizer) = make(AdamW, folder / "pass", torch.float32, in_backward=False, lr=0.01)
    with refused(popdist.MicroBatchError, "without a gradient"):
        optimizer.step()
    train(model, optimizer, batch, 1, lambda *_: None)
    with refused(popdist.GradientError, "zero_grad"):
        train(model, optimizer, batch, 1, step_only)
    optimizer.zero_grad()
    train(model, optimizer, batch, 1, step_only)
    if popdist.num_instances() > 1:
        optimizer.param_groups[1]["lr"] = 0.1 * popdist.instance_index()
        with refused(popdist.CollectiveError, "different settings, such as lr"):
            train(model, optimizer, batch, 1, step_only)
