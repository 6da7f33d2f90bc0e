"""Whose values a model computes with, and what becomes of those of its module."""

import pytest
import torch
from torch import Tensor, nn

import poptorch
from poptorch.executor.module_tensors import ModuleTensors
from tests.unit.poptorch_models import Forward


def _assign(m: Forward, x: Tensor) -> Tensor:
    m.y = m.y + x
    return m.y * m.weight


def _remove(m: Forward, x: Tensor) -> Tensor:
    del m.y
    return x


def _count(m: Forward, x: Tensor) -> Tensor:
    m.y.add_(1)
    return x * m.y


def test_buffers_stay_in_their_places() -> None:
    """A buffer that forward assigns or deletes is named, and the module has its own ones afterwards."""
    for forward, words in (
        (_assign, "Buffer y is reassigned within the model"),
        (_remove, "Buffer y is removed from the model"),
    ):
        model = Forward(forward)
        with pytest.raises(poptorch.Error, match=words):
            poptorch.inferenceModel(model)(torch.ones(2))
        assert torch.equal(model.y, torch.zeros(2))


def test_buffers_persist_over_runs() -> None:
    """They are the module's own."""
    model = Forward(_count)
    inference = poptorch.inferenceModel(model)
    assert [inference(torch.ones(2))[0].item() for _ in range(3)] == [1, 2, 3]
    assert model.y.tolist() == [3, 3]


def test_named_buffers_are_uploaded_alone() -> None:
    """To the replicas that have their own; an unknown one, and none, are refused."""
    model = Forward(lambda m, x: x * m.y)
    options = poptorch.Options().updatableNamedBuffers(["y"]).replicationFactor(2)
    inference = poptorch.inferenceModel(model, options.broadcastBuffers(broadcast_buffers=False))
    inference(torch.ones(4))
    with torch.no_grad():
        model.y.add_(1)
    assert inference(torch.ones(4)).tolist() == [1, 1, 0, 0]
    inference.copyNamedBuffersToDevice()
    assert inference(torch.ones(4)).tolist() == [1, 1, 1, 1]

    without = poptorch.inferenceModel(model)
    without(torch.ones(2))
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        without.copyNamedBuffersToDevice()
    wrong = poptorch.inferenceModel(model, poptorch.Options().updatableNamedBuffers(["z"]))
    with pytest.raises(poptorch.Error, match="names z"):
        wrong(torch.ones(2))


def test_inference_has_trained_buffers_for_all_replicas() -> None:
    """Those of the training's replica 0, which the module has."""
    model = Forward(lambda m, x: poptorch.identity_loss(m.weight.sum() * x.sum() + m.y.add_(1).sum(), "sum"))
    inner = Forward(lambda m, x: x * m.y)
    inner.y = model.y
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(broadcast_buffers=False)
    inference = poptorch.inferenceModel(inner, options)
    assert inference(torch.ones(4)).tolist() == [0, 0, 0, 0]
    training = poptorch.trainingModel(model, options)
    training(torch.ones(4))
    training(torch.ones(4))

    assert model.y.tolist() == [2, 2]
    assert inference(torch.ones(4)).tolist() == [2, 2, 2, 2]


def test_buffers_that_a_program_puts_there_are_used() -> None:
    """Between two calls; a parameter in the place of a trained one is refused, and the trained one stays."""
    model = Forward(lambda m, x: poptorch.identity_loss(x * m.weight + m.y, "sum"))
    weight = model.weight
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD([weight], lr=0.0))
    assert training(torch.ones(2)).item() == 2
    model.y = torch.ones(2)
    assert training(torch.ones(2)).item() == 4
    model.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(poptorch.Error, match="Parameter weight is reassigned within the model"):
        training(torch.ones(2))
    assert model.weight is weight


def test_converted_buffers_keep_each_replica_s_values() -> None:
    """As double() and half() convert them; values that the program puts there are all replicas'."""
    model = Forward(lambda m, x: m.y.add_(x) * 1)
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(broadcast_buffers=False)
    inference = poptorch.inferenceModel(model, options)
    batch = torch.tensor([1.0, 1, 2, 2])
    assert inference(batch).tolist() == [1, 1, 2, 2]
    model.double()
    assert inference(batch).tolist() == [2, 2, 4, 4]
    model.half()
    found = inference(batch)
    assert (found.dtype, found.tolist()) == (torch.half, [3, 3, 6, 6])
    model.y = torch.zeros(2)
    assert inference(batch).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("is_training", [True, False])
def test_the_hosts_tensors_stay_where_they_are(is_training: bool) -> None:  # noqa: FBT001 - a parameter
    """As with a GPU: while a model runs the same tensors hold copies, of which training and buffers come back."""
    module, other = (Forward(lambda m, x: m.weight * x) for _ in range(2))
    other.weight, other.y = module.weight, module.y
    device = torch.device("cpu")
    first, second = (
        ModuleTensors(one, device, [(one, False)], is_training=trains)
        for one, trains in ((module, is_training), (other, False))
    )
    host = module.weight.data_ptr()
    module.weight.grad = gradient = torch.full((2,), 7.0)
    with first, torch.no_grad():
        assert module.weight.data_ptr() != host
        assert not module.training
        module.weight.add_(1)
        module.y.add_(1)
    assert module.weight.data_ptr() == host
    assert [one.training for one in (module, other)] == [True, True]
    assert module.weight.grad is gradient
    assert module.weight.tolist() == ([2, 2] if is_training else [1, 1])
    assert module.y.tolist() == [1, 1]
    with second:
        assert other.weight.tolist() == [2, 2]  # models share a tensor's copy
    with torch.no_grad():
        module.weight.zero_()
    first.copy_to_device()
    with second:
        assert other.weight.tolist() == [0, 0]


def test_parameters_that_forward_holds_itself_are_the_devices() -> None:
    """In a list, or in a function: they are trained all the same."""
    model = Forward(lambda m, x: poptorch.identity_loss(x * m.held[0] + m.bound(), "sum"))
    model.held = [model.weight]  # type: ignore[assignment] # a list
    weight = model.weight
    model.bound = lambda: weight * 2  # type: ignore[assignment] # a function
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))(torch.ones(2))

    assert model.weight.tolist() == [-2, -2]
