"""The loss is found wherever it is.

Holds poptorch.losses.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import poptorch
from tests.unit.poptorch_models import Affine, Forward, random_batch

WRONG: Any = "max"


LOSSES: list[tuple[Callable[..., Any], str | None]] = [
    (lambda m, x: functional.l1_loss(m.weight, x), None),
    (lambda m, x: {"a": [x, (poptorch.identity_loss(m.weight * x, "sum"),)]}, None),
    (lambda m, x: poptorch.identity_loss((m.weight * x) ** 2, 2), None),
    (lambda m, x: (functional.mse_loss(m.weight, x) * 2,), None),
    (lambda m, x: poptorch.identity_loss(functional.l1_loss(m.weight, x) + (m.weight**2).sum(), "none"), None),
    (lambda m, x: m.weight * x, "Couldn't find a loss"),
    (
        lambda m, x: (functional.l1_loss(m.weight, x), functional.mse_loss(m.weight, x)),
        "Multiple independent losses",
    ),
    (lambda m, x: functional.l1_loss(m.weight, x).backward(), r"backward\(\) cannot be called explicitly"),
    (lambda m, x: poptorch.identity_loss(m.weight * x, WRONG), "Unsupported reduction 'max'"),
]


@pytest.mark.parametrize(("forward", "words"), LOSSES)
def test_the_final_loss_is_found_wherever_it_is(forward: Callable[..., Any], words: str | None) -> None:
    """And trained by; none, several, and a backward pass of the program's own are refused."""
    model = Forward(forward)
    training = poptorch.trainingModel(model)
    if words is not None:
        with pytest.raises(poptorch.Error, match=words):
            training(torch.full((2,), 3.0))
        return
    first = training(torch.full((2,), 3.0))
    second = training(torch.full((2,), 3.0))
    assert str(first) != str(second)
    assert not torch.equal(model.weight, torch.ones(2))


def test_only_the_loss_is_differentiated() -> None:
    """A result beside it leaves no gradient, and identity_loss works outside of models, too."""
    model = Forward(lambda m, x: (poptorch.identity_loss(m.y.sum() + x.sum(), "none"), m.weight.sum()))
    poptorch.trainingModel(model)(torch.ones(2))

    assert torch.equal(model.weight, torch.ones(2))
    assert poptorch.identity_loss(torch.ones(4), 1).item() == 1
    assert poptorch.identity_loss(torch.ones(4), 0).item() == 4


def test_results_know_that_there_is_no_backward() -> None:
    """Whoever saves or copies them has plain tensors."""
    model = Affine()
    _, loss = poptorch.trainingModel(model)(*random_batch(2))
    stream = io.BytesIO()
    torch.save(loss, stream)
    stream.seek(0)

    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        loss.backward()
    assert torch.equal(torch.load(stream, weights_only=True), loss)
    assert torch.equal(copy.deepcopy(loss), loss)
    assert not loss.requires_grad
