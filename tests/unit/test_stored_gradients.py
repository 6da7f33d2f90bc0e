"""What stands in place of ``.grad``: gradients that were used, and gradients that lie in a store."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import popdist
from popdist.gradients.stored_gradients import StoredGradient, stored_gradient, updated_gradient


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


def store(model: nn.Module, *, size: float = 1.0) -> list[Tensor]:
    """Give each parameter a stored gradient and return what is stored."""
    values = torch.Generator().manual_seed(0)
    stored = [torch.randn(it.shape, generator=values, dtype=torch.float32) * size for it in model.parameters()]
    for (name, parameter), content in zip(model.named_parameters(), stored, strict=True):
        parameter.grad = stored_gradient(name, content, partial(torch.Tensor.view_as, content, content))
    return stored


def copies_of(model: nn.Module, stored: list[Tensor]) -> nn.Module:
    """The same model with the gradients in memory."""
    twin = copy.deepcopy(model)
    for parameter, content in zip(twin.parameters(), stored, strict=True):
        parameter.grad = content.clone()
    return twin


class Model(nn.Linear):
    """A layer and a number."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float32))


@pytest.fixture(name="model")
def make_model() -> Model:
    """A model."""
    return Model()


def check_equal(model: nn.Module, twin: nn.Module, stored: list[Tensor]) -> None:
    """The gradients read, and what an optimizer makes of the stored elements, have the bits of those in memory."""
    for parameter, other, content in zip(model.parameters(), twin.parameters(), stored, strict=True):
        assert isinstance(parameter.grad, StoredGradient)
        assert other.grad is not None
        assert torch.equal(parameter.grad + 0, other.grad)
        assert torch.equal(parameter.grad.apply_changes(content.clone()), other.grad)


def test_torch_clips_and_unscales_a_stored_gradient(model: Model) -> None:
    """The same norms and gradients as in memory, and the store is not written."""
    stored = store(model, size=100.0)
    before, twin = copy.deepcopy(stored), copies_of(model, stored)
    scalers = [GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for scaler, it in zip(scalers, (model, twin), strict=True):
        optimizer = torch.optim.SGD(it.parameters())
        scaler.scale(torch.ones((), dtype=torch.float32))
        scaler.unscale_(optimizer)
    norms = [torch.nn.utils.clip_grad_norm_(it.parameters(), 10.0) for it in (model, twin)]
    assert torch.equal(*norms)
    norms = [popdist.clip_grad_norm_(it.parameters(), 1.0) for it in (model, twin)]
    assert torch.equal(*norms)
    for it in (model, twin):
        torch.nn.utils.clip_grad_value_(it.parameters(), 0.3, foreach=False)
    check_equal(model, twin, stored)
    assert all(map(torch.equal, stored, before))


def test_a_scaler_finds_infinity_in_a_stored_gradient(model: Model) -> None:
    """Then it skips the step."""
    store(model)[1][2] = torch.inf
    optimizer = torch.optim.SGD(model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones((), dtype=torch.float32))
    scaler.unscale_(optimizer)
    weights = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, weights)
    assert scaler.get_scale() == 4.0


def test_a_stored_gradient_is_read_as_any_other(model: Model) -> None:
    """By operations, by numpy and by copies, each time as it was changed last."""
    stored = store(model)
    gradient = model.weight.grad
    assert gradient is not None
    gradient.data.mul_(2)
    gradient.detach().add_(1)
    torch._foreach_mul_([gradient], 3.0)
    expected = (stored[0] * 2 + 1) * 3
    assert torch.equal(torch._foreach_norm([gradient, expected])[0], expected.norm())
    assert type(gradient * 1) is Tensor
    assert torch.equal(gradient * 1, expected)
    assert torch.equal(torch.stack([gradient, gradient])[1], expected)
    assert torch.equal(torch.from_numpy(gradient.numpy()), expected)
    assert torch.equal(copy.deepcopy(gradient), expected)
    assert torch.equal(pickle.loads(pickle.dumps(gradient)), expected)  # noqa: S301 - our own
    assert gradient.tolist() == expected.tolist()
    assert "weight" in repr(gradient)
    gradient.zero_()
    assert not (gradient[0] * 1).any()


def test_a_change_that_would_be_lost_is_refused(model: Model) -> None:
    """One that is not by numbers, or of a view: the gradient can be replaced."""
    stored = store(model)
    gradient = model.weight.grad
    assert gradient is not None
    for change in (
        lambda: gradient.add_(torch.ones(3, 5, dtype=torch.float32)),
        gradient.normal_,
        lambda: gradient[0].mul_(2),
        lambda: gradient.view(-1).zero_(),
        lambda: torch.add(stored[0], 1, out=gradient),
        lambda: torch._foreach_mul_([gradient], [2.0]),
    ):
        with pytest.raises(popdist.OptimizerError, match=r"in place, .*parameter.grad = tensor"):
            change()
    assert torch.equal(gradient.view(-1)[3:] * 1, stored[0].view(-1)[3:])
    model.weight.grad = gradient + torch.ones(3, 5, dtype=torch.float32)
    assert type(model.weight.grad) is Tensor


def test_a_used_gradient_says_so_whatever_reads_it(model: Model) -> None:
    """Clipping and scalers too; setting to zero or None is quiet."""
    optimizer = torch.optim.SGD(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = updated_gradient(name, parameter)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), dtype=torch.float32))
    gradient = model.weight.grad
    assert gradient is not None
    assert gradient.shape == (3, 5)
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=False),
        lambda: popdist.clip_grad_norm_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: gradient + 1,
        lambda: gradient.mul_(2),
        lambda: gradient.view(-1),
        gradient.numpy,
        lambda: copy.deepcopy(gradient),
    ):
        with pytest.raises(
            popdist.OptimizerError, match=r"the gradient of \w+ was read, .*step_in_backward=False"
        ):
            read()
    assert "weight" in repr(gradient)
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    assert model.weight.grad is None
