"""Results and anchored tensors of a call; test_poptorch_calls.py has more of the results.

Holds poptorch.executor.outputs.
"""

import pytest
import torch

import poptorch
from tests.unit.poptorch_models import Affine, Forward, random_batch


def test_results_do_not_change_with_the_model() -> None:
    """A parameter, a buffer and an input that forward returns are copied."""
    model = Forward(lambda m, x: (poptorch.identity_loss(m.weight * x, "sum"), m.weight, m.y, x))
    x = torch.ones(2)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    _, weight, _, same = training(x)
    training(x)
    x.zero_()

    assert weight.tolist() == [1, 1]
    assert same.tolist() == [1, 1]


def test_anchored_tensors_are_kept() -> None:
    """A gradient and the updated weight of each step; an unknown one is refused, with what there is."""
    model = Affine()
    options = poptorch.Options().deviceIterations(2)
    options.anchorTensor("grad", "Gradient___model.fc.bias").anchorTensor("new", "UpdatedVar___fc.bias")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.fc.bias.detach().clone()
    training(*random_batch(4))
    gradients, updated = training.getAnchoredTensor("grad"), training.getAnchoredTensor("new")

    assert gradients.shape == updated.shape == (2, 1)
    assert torch.equal(updated[0], before - gradients[0])
    with pytest.raises(poptorch.Error, match="'other' is not the name"):
        training.getAnchoredTensor("other")
    with pytest.raises(poptorch.Error, match=r"no tensor relu.*fc.weight, fc.bias"):
        poptorch.inferenceModel(model, poptorch.Options().anchorTensor("a", "relu"))(*random_batch(2))
