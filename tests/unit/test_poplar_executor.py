"""What programs ask of an executor, and how modules are wrapped."""

import copy
import io
import pickle
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import poptorch
from tests.unit.poptorch_models import Affine, Net, random_batch


def test_default_outputs_are_the_last_ones_and_all() -> None:
    """Only the executor's own options say so; the user's keep the default, and are not frozen by it."""
    model, options = Affine(), poptorch.Options().deviceIterations(3)
    training = poptorch.trainingModel(model, options)
    inference = poptorch.inferenceModel(model, options)

    assert training(*random_batch(6))[0].shape == (2, 1)
    assert inference(*random_batch(6))[0].shape == (6, 1)
    assert training.options.output_mode is poptorch.OutputMode.Final
    assert inference.options.output_mode is poptorch.OutputMode.All
    assert training.options.isFrozen()
    assert options.defaultOutputMode()
    assert not options.isFrozen()


def test_a_module_is_wrapped_once_and_freed_by_destroy() -> None:
    """A second training model is refused, until the first one is gone; its executor may be passed itself."""
    model = Affine()
    first = poptorch.trainingModel(model)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model)
    poptorch.inferenceModel(model)
    model.destroy()  # type: ignore[operator] # which it gains

    assert not hasattr(model, "destroy")
    assert not first.isCompiled()
    assert poptorch.trainingModel(first).model is model
    assert isinstance(model, Affine)


def test_modes_are_those_at_wrapping() -> None:
    """Whatever becomes of them on the user's module, which keeps its own."""
    model = Net()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    model.eval()
    inference = poptorch.inferenceModel(model)
    model.train()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    assert not torch.equal(training(x, y)[0], training(x, y)[0])
    assert torch.equal(inference(x), inference(x))
    assert model.training
    assert model.drop.training


def test_what_the_executor_lacks_is_the_modules() -> None:
    """Attributes, and the text."""
    model = Affine()
    training = poptorch.trainingModel(model)

    assert training.fc is model.fc
    assert "Linear(in_features=2" in repr(training)
    with pytest.raises(AttributeError, match="nothing"):
        _ = training.nothing


def test_inference_refuses_what_is_for_training() -> None:
    """An optimizer, and gradient accumulation, which the message names."""
    model, options = Affine(), poptorch.Options()
    with pytest.raises(AssertionError, match="optimizer"):
        poptorch.inferenceModel(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AssertionError, match="does not train"):
        poptorch.inferenceModel(model).setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    options.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match=r"Training.gradientAccumulation.*deviceIterations"):
        poptorch.inferenceModel(model, options)


def test_copies_and_pickles_are_plain() -> None:
    """They hold the module's own class, parameters and tensors, with the trained weights."""
    model = Net()
    training = poptorch.trainingModel(model)
    training(torch.randn(4, 4), torch.randint(0, 3, (4,)))
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream)
    for found in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - its own
        assert type(found) is Net
        poptorch.trainingModel(found).destroy()
        assert type(found.first.weight) is nn.Parameter
        assert type(found.norm.running_mean) is Tensor
        assert torch.equal(found.first.weight, model.first.weight)
        assert torch.equal(state["norm.running_mean"], found.norm.running_mean)
    assert {type(value) for value in model.state_dict().values()} == {Tensor}


def test_weights_are_there_after_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """Host copies may be asked for, which is logged; before there is a compiled model that is an error."""
    model = Affine()
    weight, before = model.fc.weight, model.fc.weight.detach().clone()
    training = poptorch.trainingModel(model)
    for copied in (training.copyWeightsToDevice, training.copyWeightsToHost):
        with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
            copied()
    training(*random_batch(4))
    assert not torch.equal(weight, before)
    with caplog.at_level("DEBUG", "poptorch::python"):
        training.copyWeightsToHost()
    assert "copyWeightsToHost()" in caplog.messages

    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        model.fc.weight.zero_()
    training.copyWeightsToDevice()
    training(*random_batch(4))
    assert model.fc.weight is weight
    assert not weight.any()


def test_inference_has_what_training_has_made() -> None:
    """Also where it wraps a part of what is trained; and what the program writes."""
    part = nn.Linear(2, 1)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.mse_loss(self.part(x), y)

    whole = Whole()
    training = poptorch.trainingModel(whole, optimizer=torch.optim.SGD(whole.parameters(), lr=0.1))
    inference = poptorch.inferenceModel(part)
    x, y = random_batch(4)
    before = inference(x)
    training(x, y)
    after = inference(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, part(x))

    with torch.no_grad():
        part.weight.zero_()
    inference.copyWeightsToDevice()
    assert torch.equal(inference(x), part(x))


def test_state_dicts_are_loaded_and_uploaded() -> None:
    """state_dict() of an executor is that of the module, and loading one reaches the device."""
    model, other = Affine(), Affine()
    inference = poptorch.inferenceModel(model)
    inference(*random_batch(2))
    inference.load_state_dict(other.state_dict())

    assert torch.equal(inference(*random_batch(2))[0], other(*random_batch(2))[0])
    assert inference.state_dict().keys() == other.state_dict().keys()


def test_devices_are_attached_and_detached() -> None:
    """Once each; detaching gives the host the weights, attaching takes them, and so does a call."""
    model = Affine()
    training = poptorch.trainingModel(model)
    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        training.attachToDevice()
    training.compile(*random_batch(2))
    assert training.isCompiled()
    assert training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()
    training(*random_batch(2))
    training.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        training.detachFromDevice()
    with torch.no_grad():
        model.fc.weight.zero_()
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    training(*random_batch(2))
    assert training.isAttachedToDevice()
    assert not model.fc.weight.any()


def test_an_offline_device_compiles_only() -> None:
    """A call is refused, and so is attaching."""
    model = poptorch.inferenceModel(Affine(), poptorch.Options().useOfflineIpuTarget())
    model.compile(*random_batch(2))
    assert model.isCompiled()
    assert not model.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        model(*random_batch(2))


def test_arguments_are_fixed_until_destroy() -> None:
    """As the first call has them."""
    model = poptorch.inferenceModel(Affine())
    model(*random_batch(2))
    with pytest.raises(poptorch.Error, match=r"expected torch.Size\(\[2, 2\]\) but got torch.Size\(\[3, 2\]\)"):
        model(*random_batch(3))
    model.destroy()
    assert model(*random_batch(3))[0].shape == (3, 1)


def test_hooks_are_called_around_compiling() -> None:
    """Each time, until they are removed; what can be anchored has names then."""
    model, seen = poptorch.inferenceModel(Affine()), list[str]()
    handle = model.registerPreCompileHook(lambda: seen.append(f"before {model.isCompiled()}"))
    model.registerPostCompileHook(lambda: seen.append(f"after {model.isCompiled()}"))
    with pytest.raises(RuntimeError, match="a hook is a function"):
        model.registerPreCompileHook(None)  # type: ignore[arg-type]
    model.compile(*random_batch(2))
    model(*random_batch(2))
    model.destroy()
    handle.remove()
    model(*random_batch(2))

    assert seen == ["before False", "after True", "after True"]
    assert {"fc.weight", "Gradient___fc.bias", "UpdatedVar___fc.bias"} <= {*model.getTensorNames()}
    assert not model.copyWeightsToHostIfNeeded()


def test_hooks_of_all_models_are_called_before_their_own() -> None:
    """Those of the functions of the module, for each model, until they are removed."""
    seen = list[str]()
    handles = [
        poptorch.registerPreCompileHook(lambda: seen.append("before all")),
        poptorch.registerPostCompileHook(lambda: seen.append("after all")),
    ]
    for name in "ab":
        model = poptorch.inferenceModel(Affine())
        model.registerPreCompileHook(partial(seen.append, f"before {name}"))
        model(*random_batch(2))
    for handle in handles:
        handle.remove()
    poptorch.inferenceModel(Affine())(*random_batch(2))

    assert seen == ["before all", "before a", "after all", "before all", "before b", "after all"]
    with pytest.raises(RuntimeError, match="a hook is a function"):
        poptorch.registerPostCompileHook("hook")  # type: ignore[arg-type]


def test_times_and_counters() -> None:
    """What was measured of the last call, and why there are no cycles."""
    model = poptorch.inferenceModel(Affine(), poptorch.Options().deviceIterations(3))
    with pytest.raises(poptorch.Error, match="Please compile the model before"):
        model.compilationTime()
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        model.cycleCount()
    model(*random_batch(3))
    shortest, longest, mean = model.getLatency()
    assert 0 < shortest <= mean <= longest
    assert model.getComputeLatency() == (shortest, longest, mean)
    assert model.getHostIpuLatency() == model.getIpuHostLatency() == (0, 0, 0)
    assert isinstance(model.compilationTime(), timedelta)
    counters = model.getPerfCounters()
    assert [*counters] == ["input", "input_complete", "output", "output_complete"]
    assert [[len(times) for times in part] for part in counters.values()] == [[3, 3]] * 4

    counting = poptorch.inferenceModel(Affine(), poptorch.Options().logCycleCount(log_cycle_count=True))
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        counting.cycleCount()
    with pytest.raises(poptorch.Error, match="only supported on actual IPU hardware"):
        counting(*random_batch(2))
    quiet = poptorch.inferenceModel(Affine(), poptorch.Options().showCompilationProgressBar(show=False))
    quiet(*random_batch(2))
    with pytest.raises(poptorch.Error, match="Please set showCompilationProgressBar"):
        quiet.compilationTime()


def test_random_states_are_read_and_set() -> None:
    """Of one replica, the program's; of several, their own."""
    for replicas in (1, 2):
        model = Net()
        options = poptorch.Options().replicationFactor(replicas).broadcastBuffers(broadcast_buffers=False)
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
        batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
        training.compile(*batch)
        state = training.rng_state
        first = training(*batch)[0]
        assert not torch.equal(first, training(*batch)[0])
        training.rng_state = state
        assert torch.equal(first, training(*batch)[0])


def test_set_optimizer_changes_the_next_call() -> None:
    """What the program changes in its optimizer has no effect before."""
    model = Affine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    before = model.fc.weight.detach().clone()
    training(*random_batch(2))
    optimizer.param_groups[0]["lr"] = 0.1
    training(*random_batch(2))
    assert torch.equal(model.fc.weight, before)
    training.setOptimizer(optimizer)
    training(*random_batch(2))
    assert not torch.equal(model.fc.weight, before)
