"""Which optimizers treat each element by itself, also after many steps and with gradients of any size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import popdist
from popdist.optim.elementwise import check_elementwise, check_in_training

KNOWN = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Small(torch.optim.Optimizer):
    """A step down the gradient, times a factor that a subclass works out."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        del closure
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = self.factor(parameter, parameter.grad, self.state[parameter])
                    parameter.sub_(group["lr"] * factor * parameter.grad)

    def factor(self, _parameter: Tensor, _gradient: Tensor, _state: dict[str, Any]) -> Any:
        """What the gradient is multiplied by."""
        return 1.0


class ClipsAfterASpike(Small):
    """As StableAdamW clips: by the mean square of the gradient over its running one, above 1."""

    def factor(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Any:
        """At most 1."""
        seen = state.setdefault("seen", torch.full_like(parameter, 4.0))
        seen.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        return 1 / max(1.0, float((gradient.square() / seen).mean().sqrt()) / 4)


class ClipsTheNorm(Small):
    """By a norm that common gradients do not have."""

    def factor(self, _parameter: Tensor, gradient: Tensor, _state: dict[str, Any]) -> Any:
        """At most 1."""
        return min(1.0, 1000 / max(float(gradient.norm()), 1e-12))


class GrowsTiny(Small):
    """Another one for gradients that vanish."""

    def factor(self, _parameter: Tensor, gradient: Tensor, _state: dict[str, Any]) -> Any:
        """At least 1."""
        return max(1.0, 1e-3 / max(float(gradient.norm()), 1e-12))


class ScalesAfterWarmUp(Small):
    """As LARS does, when some steps are over."""

    warm_up = 10

    def factor(self, parameter: Tensor, gradient: Tensor, _state: dict[str, Any]) -> Any:
        """1 for some steps."""
        is_warm = self.num_steps > self.warm_up
        return parameter.norm() / (gradient.norm() + 1e-12) if is_warm else 1.0


class ScalesLate(ScalesAfterWarmUp):
    """Later than the proof before training looks."""

    warm_up = 50


class EstimatesOneStepSize(Small):
    """As Prodigy does, from an inner product with the way from the start."""

    def factor(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Any:
        """Grows from a tiny one."""
        start = state.setdefault("start", parameter.clone())
        state["size"] = max(state.get("size", 1e-6), float((gradient * (start - parameter)).sum()))
        return state["size"]


class FactorsLargeMatrices(Small):
    """As Adafactor does, of both sides at least 128."""

    def factor(self, _parameter: Tensor, gradient: Tensor, _state: dict[str, Any]) -> Any:
        """By the rows."""
        is_large = gradient.dim() > 1 and min(gradient.shape) >= 128
        return gradient.square().mean(1, keepdim=True) if is_large else 1.0


def check(kind: type[torch.optim.Optimizer]) -> frozenset[str]:
    """The proof before training."""
    return check_elementwise(kind, {}, {"lr": 0.01}, torch.device("cpu"))


@pytest.mark.parametrize("name", KNOWN)
def test_torchs_own_may_be_sharded(name: str) -> None:
    """All of those that treat each element by itself; the proof knows what they keep for each."""
    assert check(getattr(torch.optim, name)) is not None


def test_one_of_the_programs_own_may_be() -> None:
    """It is looked at in training, too."""
    check(Small)
    parameter = nn.Parameter(torch.randn(300))
    optimizer = Small([parameter])
    parameter.grad, before = torch.randn(300), parameter.detach().clone()
    check_in_training(optimizer)
    assert torch.equal(parameter, before)
    assert optimizer.num_steps == 0


@pytest.mark.parametrize(
    "kind",
    [ClipsAfterASpike, ClipsTheNorm, GrowsTiny, ScalesAfterWarmUp, EstimatesOneStepSize, FactorsLargeMatrices],
)
def test_what_looks_at_the_whole_is_refused(kind: type[Small]) -> None:
    """Also where it does so for some gradients, some shapes, or after some steps alone."""
    with pytest.raises(popdist.OptimizerError, match=f"cannot shard {kind.__name__}: it updates a part"):
        check(kind)


@pytest.mark.parametrize("name", ["StableAdamW", "Prodigy", "Lars", "DAdaptAdam"])
def test_known_ones_are_refused_by_name(name: str) -> None:
    """With the reason."""
    with pytest.raises(popdist.OptimizerError, match=f"cannot shard {name}: it (clips|estimates|scales)"):
        check(type(name, (Small,), {}))


def test_one_that_changes_its_ways_is_found_in_training() -> None:
    """By its own state, on the elements that it is about to update."""
    check(ScalesLate)
    parameter = nn.Parameter(torch.randn(300))
    optimizer = ScalesLate([parameter])
    for step in range(60):
        parameter.grad = torch.randn(300)
        if step < ScalesLate.warm_up:
            check_in_training(optimizer)
            optimizer.step()
        else:
            with pytest.raises(popdist.OptimizerError, match="ScalesLate: it updates a part"):
                check_in_training(optimizer)
