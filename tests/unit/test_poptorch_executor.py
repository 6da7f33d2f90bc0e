"""Models of poptorch: how modules are wrapped, what a call does, and who has which weights when.

Holds poptorch.executor.poplar_executor, poptorch.executor.wrapping, poptorch.executor.compiled_model,
poptorch.executor.runs, poptorch.executor.device_tensors, poptorch.executor.host_tensors,
poptorch.executor.traced_forward, poptorch.executor.saved_models and poptorch.losses.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import popdist
import poptorch


@pytest.fixture(autouse=True)
def _job_of_one() -> Iterator[None]:
    yield
    popdist.finalize()


OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """A small network with statistics and dropout, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:  # noqa: ANN401 - with y, the loss, too
        """Scores."""
        scores = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return scores if y is None else (scores, functional.cross_entropy(scores, y))


class Affine(nn.Module):
    """One product with a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and the error."""
        out = self.fc(x)
        return out, functional.mse_loss(out, y)


class Forward(nn.Module):
    """A weight, a buffer, and a forward of the test's own."""

    y: Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("y", torch.zeros(2))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - whatever the test gives
        """The test's own."""
        return self._forward(self, x)


def _batch(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, generator=made), torch.randn(num, 1, generator=made)


def _train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[tuple[Tensor, ...]], accumulation: int
) -> Tensor:
    losses = []
    for first in range(0, len(micro_batches), accumulation):
        optimizer.zero_grad()
        for part in micro_batches[first : first + accumulation]:
            _, loss = model(*part)
            (loss / accumulation).backward()
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses)


def _states_are_equal(one: nn.Module, other: nn.Module) -> bool:
    states = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in states)


def test_an_unknown_option_of_popart_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is compiled runs on: no such option has an effect."""
    options = poptorch.Options()
    options._Popart.set("noSuchOption", 3)

    poptorch.trainingModel(Affine(), options).compile(*_batch(2))

    assert "[warning] Unknown int option noSuchOption" in capsys.readouterr().err


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda it: torch.optim.SGD(it, lr=0.1, momentum=0.9),
        torch.optim.Adam,
        lambda it: poptorch.optim.AdamW(it, lr=0.01),
    ],
)
def test_training_has_the_bits_of_a_plain_loop(make: OptimizerOf, accumulation: int) -> None:
    """At one replica: dropout, statistics, several device iterations and micro batches in a step."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    x, y = torch.randn(12 * 5, 4), torch.randint(0, 3, (60,))
    torch.manual_seed(1)
    expected = _train_plainly(
        plain, make(plain.parameters()), list(zip(x.split(5), y.split(5), strict=True)), accumulation
    )
    options = poptorch.Options().deviceIterations(6 // accumulation).outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(accumulation)
    training = poptorch.trainingModel(model, options, make(model.parameters()))
    torch.manual_seed(1)

    losses = [training(*call)[1] for call in zip(x.split(30), y.split(30), strict=True)]

    assert torch.equal(torch.cat(losses), expected)
    assert _states_are_equal(model, plain)


@pytest.mark.parametrize("kind", [poptorch.ReductionType.Mean, poptorch.ReductionType.Sum])
def test_replicas_have_the_bits_of_as_many_micro_batches(kind: poptorch.ReductionType) -> None:
    """A step over 4 replicas, 2 x 2, or 4 micro batches of one replica is the same step."""
    found = []
    for replicas, accumulation in ((4, 1), (2, 2), (1, 4)):
        torch.manual_seed(0)
        model = Affine()
        options = poptorch.Options().replicationFactor(replicas).outputMode(poptorch.OutputMode.All)
        options.Training.gradientAccumulation(accumulation)
        options.Training.accumulationAndReplicationReductionType(kind)
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = _batch(8)
        order = torch.arange(4).view(replicas, accumulation).T.reshape(-1)  # so that replicas see the same samples
        parts = [part[order].flatten(0, 1) for part in (x.view(4, 2, 2), y.view(4, 2, 1))]
        losses = [training(*parts)[1][order.argsort()] for _ in range(3)]
        found.append((torch.cat(losses), model.fc.weight.detach().clone()))

    for losses_of_one, weight in found[1:]:
        assert torch.equal(weight, found[0][1])
        assert torch.equal(losses_of_one, found[0][0])


def test_default_outputs_are_the_last_ones_and_all() -> None:
    """Only the executor's own options say so; the user's keep the default, and are not frozen by it."""
    model, options = Affine(), poptorch.Options().deviceIterations(3)
    training = poptorch.trainingModel(model, options)
    inference = poptorch.inferenceModel(model, options)

    assert training(*_batch(6))[0].shape == (2, 1)
    assert inference(*_batch(6))[0].shape == (6, 1)
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

    assert type(model) is Affine
    assert type(model.fc.weight) is nn.Parameter
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


@pytest.mark.parametrize(
    ("look", "count"),
    [
        (lambda m, _: list(m.parameters()), 1),
        (lambda m, _: m.state_dict(), 1),
        (lambda m, _: m(*_batch(2)), 1),
        (lambda _, held: held + 1, 1),
        (lambda _, held: held.detach(), 1),
        (lambda m, _: copy.deepcopy(m), 1),
        (lambda m, _: m.fc, 0),
    ],
)
def test_a_look_at_the_host_copies_the_weights_once(look: Callable[[Any, Tensor], Any], count: int) -> None:
    """However the program came by the parameter; and nothing more until the next step."""
    model = Affine()
    held = model.fc.weight
    training = poptorch.trainingModel(model)
    before = held.detach().clone()
    calls: list[None] = []
    copied = training.copyWeightsToHost
    training.copyWeightsToHost = lambda: calls.append(copied())  # type: ignore[method-assign] # counted
    for number in (1, 2):
        training(*_batch(4))
        look(model, held)
        look(model, held)
        assert len(calls) == count * number
    assert count == 0 or not torch.equal(held, before)


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
        assert type(found.first.weight) is nn.Parameter
        assert type(found.norm.running_mean) is Tensor
        assert torch.equal(found.first.weight, model.first.weight)
        assert torch.equal(state["norm.running_mean"], found.norm.running_mean)
    assert {type(value) for value in model.state_dict().values()} == {Tensor}


def test_host_values_reach_the_device_on_request_only() -> None:
    """copyWeightsToDevice() takes what the host has, stale or not, and drops what was trained."""
    model = Affine()
    training = poptorch.trainingModel(model)
    with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
        training.copyWeightsToDevice()
    with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
        training.copyWeightsToHost()
    before = model.fc.weight.detach().clone()
    training(*_batch(4))
    training.copyWeightsToDevice()
    assert torch.equal(model.fc.weight, before)

    rate_0 = torch.optim.SGD(model.parameters(), lr=0.0)
    training.setOptimizer(rate_0)
    with torch.no_grad():
        model.fc.weight.zero_()
    training(*_batch(4))
    training.copyWeightsToHost()
    assert torch.equal(model.fc.weight, before)


def test_inference_refreshes_itself_after_training_only() -> None:
    """Also where it wraps a part of what is trained; changes of the host it is told of."""
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
    x, y = _batch(4)
    before = inference(x)
    training(x, y)
    after = inference(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, part(x))

    with torch.no_grad():
        part.weight.zero_()
    assert torch.equal(inference(x), after)
    inference.copyWeightsToDevice()
    assert torch.equal(inference(x), part(x))


def test_state_dicts_are_loaded_and_uploaded() -> None:
    """state_dict() of an executor is that of the module, and loading one reaches the device."""
    model, other = Affine(), Affine()
    inference = poptorch.inferenceModel(model)
    inference(*_batch(2))
    inference.load_state_dict(other.state_dict())

    assert torch.equal(inference(*_batch(2))[0], other(*_batch(2))[0])
    assert inference.state_dict().keys() == other.state_dict().keys()


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
    """On the device; the host gets them when it asks."""
    model = Forward(_count)
    inference = poptorch.inferenceModel(model)
    assert [inference(torch.ones(2))[0].item() for _ in range(3)] == [1, 2, 3]
    assert model.y[0] == 0
    inference.copyWeightsToHost()
    assert model.y[0] == 3


def test_replicas_share_buffers_or_have_their_own() -> None:
    """A buffer that changes is refused where they share; else each replica goes on with its own."""
    options = poptorch.Options().replicationFactor(2).deviceIterations(2)
    with pytest.raises(poptorch.Error, match=r"does not support broadcasting buffers.*broadcastBuffers\(False\)"):
        poptorch.inferenceModel(Forward(_count), options)(torch.ones(8))

    def add(m: Forward, x: Tensor) -> Tensor:
        m.y.add_(x)
        return m.y.clone()

    own = poptorch.inferenceModel(Forward(add), options.clone().broadcastBuffers(broadcast_buffers=False))
    assert own(torch.tensor([1.0, 1, 2, 2, 3, 3, 4, 4]))[::2].tolist() == [1, 2, 4, 6]


def test_named_buffers_are_uploaded_alone() -> None:
    """Those that the options name; others, and weights, stay."""
    model = Forward(lambda m, x: x * m.weight + m.y)
    options = poptorch.Options().updatableNamedBuffers(["y"])
    inference = poptorch.inferenceModel(model, options)
    inference(torch.ones(2))
    with torch.no_grad():
        model.y.add_(1)
        model.weight.add_(1)
    inference.copyNamedBuffersToDevice()
    assert inference(torch.ones(2)).tolist() == [2, 2]

    without = poptorch.inferenceModel(model)
    without(torch.ones(2))
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        without.copyNamedBuffersToDevice()
    wrong = poptorch.inferenceModel(model, poptorch.Options().updatableNamedBuffers(["z"]))
    with pytest.raises(poptorch.Error, match="names z"):
        wrong(torch.ones(2))


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
    _, loss = poptorch.trainingModel(model)(*_batch(2))
    stream = io.BytesIO()
    torch.save(loss, stream)
    stream.seek(0)

    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        loss.backward()
    assert torch.equal(torch.load(stream, weights_only=True), loss)
    assert torch.equal(copy.deepcopy(loss), loss)
    assert not loss.requires_grad


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_weights_are_cast_to_what_they_multiply(kind: torch.dtype) -> None:
    """Products and convolutions have the dtype of their input; the weights stay float32, and train so."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 2, 2)
            self.fc = nn.Linear(6, 1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.fc(self.conv(x).flatten(1))
            return out, functional.mse_loss(out, y)

    model = Mixed()
    before = model.fc.weight.detach().clone()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        out, loss = training(torch.ones(2, 1, 4, dtype=kind), torch.zeros(2, 1, dtype=kind))

    assert out.dtype is loss.dtype is kind
    assert model.fc.weight.dtype is torch.float32
    assert not torch.equal(model.fc.weight, before)


def test_devices_are_attached_and_detached() -> None:
    """Once each; detaching gives the host the weights, attaching takes them, and so does a call."""
    model = Affine()
    training = poptorch.trainingModel(model)
    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        training.attachToDevice()
    training.compile(*_batch(2))
    assert training.isCompiled()
    assert training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()
    training(*_batch(2))
    training.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        training.detachFromDevice()
    with torch.no_grad():
        model.fc.weight.zero_()
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    training(*_batch(2))
    assert training.isAttachedToDevice()
    assert not model.fc.weight.any()


def test_an_offline_device_compiles_only() -> None:
    """A call is refused, and so is attaching."""
    model = poptorch.inferenceModel(Affine(), poptorch.Options().useOfflineIpuTarget())
    model.compile(*_batch(2))
    assert model.isCompiled()
    assert not model.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        model(*_batch(2))


def test_arguments_are_fixed_until_destroy() -> None:
    """As the first call has them."""
    model = poptorch.inferenceModel(Affine())
    model(*_batch(2))
    with pytest.raises(poptorch.Error, match=r"expected torch.Size\(\[2, 2\]\) but got torch.Size\(\[3, 2\]\)"):
        model(*_batch(3))
    model.destroy()
    assert model(*_batch(3))[0].shape == (3, 1)


def test_times_and_counters() -> None:
    """What was measured of the last call, and why there are no cycles."""
    model = poptorch.inferenceModel(Affine(), poptorch.Options().deviceIterations(3))
    with pytest.raises(poptorch.Error, match="Please compile the model before"):
        model.compilationTime()
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        model.cycleCount()
    model(*_batch(3))
    shortest, longest, mean = model.getLatency()
    assert 0 < shortest <= mean <= longest
    assert isinstance(model.compilationTime(), timedelta)
    assert [[len(times) for times in part] for part in model.getPerfCounters()] == [[3, 3]] * 4

    counting = poptorch.inferenceModel(Affine(), poptorch.Options().logCycleCount(log_cycle_count=True))
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        counting.cycleCount()
    with pytest.raises(poptorch.Error, match="only supported on actual IPU hardware"):
        counting(*_batch(2))
    quiet = poptorch.inferenceModel(Affine(), poptorch.Options().showCompilationProgressBar(show=False))
    quiet(*_batch(2))
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


def test_anchored_tensors_are_kept() -> None:
    """A gradient and the updated weight of each step; an unknown one is refused, with what there is."""
    model = Affine()
    options = poptorch.Options().deviceIterations(2)
    options.anchorTensor("grad", "Gradient___model.fc.bias").anchorTensor("new", "UpdatedVar___fc.bias")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.fc.bias.detach().clone()
    training(*_batch(4))
    gradients, updated = training.getAnchoredTensor("grad"), training.getAnchoredTensor("new")

    assert gradients.shape == updated.shape == (2, 1)
    assert torch.equal(updated[0], before - gradients[0])
    with pytest.raises(poptorch.Error, match="'other' is not the name"):
        training.getAnchoredTensor("other")
    with pytest.raises(poptorch.Error, match=r"no tensor relu.*fc.weight, fc.bias"):
        poptorch.inferenceModel(model, poptorch.Options().anchorTensor("a", "relu"))(*_batch(2))


def test_files_are_written_when_a_model_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile in a folder of the model's name or kind, and the description, with its folders."""
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / "a" / "b" / "model.proto"))
    model = Affine()
    poptorch.inferenceModel(model, poptorch.Options().enableProfiling(str(tmp_path)))(*_batch(2))
    poptorch.trainingModel(model, poptorch.Options().enableProfiling(str(tmp_path)).modelName("mine"))(*_batch(2))

    assert (tmp_path / "inference" / "profile.pop").is_file()
    assert (tmp_path / "mine" / "profile.pop").is_file()
    assert "fc.weight" in (tmp_path / "a" / "b" / "model.proto").read_text(encoding="utf-8")


def test_forward_knows_that_it_runs() -> None:
    """Only there."""
    seen = []

    def look(_: Forward, x: Tensor) -> Tensor:
        seen.append(poptorch.isRunningOnIpu())
        return x

    poptorch.inferenceModel(Forward(look))(torch.ones(2))

    assert set(seen) == {True}
    assert not poptorch.isRunningOnIpu()


def test_parameters_that_forward_holds_itself_are_the_devices() -> None:
    """In a list, or in a function: they are trained all the same."""
    model = Forward(lambda m, x: poptorch.identity_loss(x * m.held[0] + m.bound(), "sum"))
    model.held = [model.weight]  # type: ignore[assignment] # a list
    weight = model.weight
    model.bound = lambda: weight * 2  # type: ignore[assignment] # a function
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))(torch.ones(2))

    assert model.weight.tolist() == [-2, -2]


def test_recurrent_weights_are_trained() -> None:
    """A recurrent module keeps its parameters in a list of its own, too."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return poptorch.identity_loss(self.lstm(x)[0] ** 2, "mean")

    model = Recurrent()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 2, 2)
    for _ in range(3):
        optimizer.zero_grad()
        plain(x).backward()
        optimizer.step()
        training(x)

    assert _states_are_equal(model, plain)


def test_losses_can_be_scaled() -> None:
    """The weights are those without, as far as a power of two changes nothing."""
    found = []
    for scaling in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Affine()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=scaling)
        poptorch.trainingModel(model, optimizer=optimizer)(*_batch(4))
        found.append(model.fc.weight.detach().clone())

    assert torch.equal(*found)


def test_options_of_another_number_of_processes_are_refused() -> None:
    """Training is a matter of all instances of the job."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="process 0 of 2, and this job has 1 instances"):
        poptorch.trainingModel(Affine(), options)(*_batch(2))


def test_set_optimizer_changes_the_next_call() -> None:
    """What the program changes in its optimizer has no effect before."""
    model = Affine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    before = model.fc.weight.detach().clone()
    training(*_batch(2))
    optimizer.param_groups[0]["lr"] = 0.1
    training(*_batch(2))
    assert torch.equal(model.fc.weight, before)
    training.setOptimizer(optimizer)
    training(*_batch(2))
    assert not torch.equal(model.fc.weight, before)


def test_the_loss_scaling_can_follow_the_gradients() -> None:
    """An anchor tells what it was in a step, and the weights move."""
    model = Affine()
    options = poptorch.Options().anchorTensor("scale", "finalLossScale")
    options.Training.setAutomaticLossScaling(enabled=True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=4.0)
    training = poptorch.trainingModel(model, options, optimizer)
    before = model.fc.weight.detach().clone()
    scales = []
    for _ in range(3):
        training(*_batch(2))
        scales.append(training.getAnchoredTensor("scale").item())

    assert scales[0] == 4
    assert scales[1:] == [8, 16]
    assert not torch.equal(model.fc.weight, before)


def test_the_stages_of_a_pipeline_are_counted() -> None:
    """At the first call; a model that was refused can be called again, and one that is sharded has no limit."""
    for make, words in (
        (poptorch.trainingModel, "must be greater than or equal to the number of pipeline stages"),
        (poptorch.inferenceModel, "deviceIterations must be greater"),
    ):
        model = Affine()
        poptorch.BeginBlock(model.fc, ipu_id=1)
        executor: Any = make(model)
        with pytest.raises(poptorch.Error, match=words):
            executor(*_batch(2))
        assert not executor.isCompiled()
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    sharded = Affine()
    poptorch.BeginBlock(sharded.fc, ipu_id=1)
    assert poptorch.trainingModel(sharded, options)(*_batch(2))[0].shape == (2, 1)


def test_training_needs_no_gradients_of_the_programs() -> None:
    """A call under no_grad trains; a program's own backward pass on the host stays its own."""
    model = Affine()
    training = poptorch.trainingModel(model)
    before = model.fc.weight.detach().clone()
    with torch.no_grad():
        training(*_batch(2))
    assert not torch.equal(model.fc.weight, before)
    model(*_batch(2))[1].backward()
    gradient = model.fc.weight.grad
    training(*_batch(2))
    assert gradient is not None
    assert model.fc.weight.grad is gradient


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


def test_frozen_parameters_stay() -> None:
    """And those that the optimizer does not hold."""
    model = Net()
    model.first.requires_grad_(requires_grad=False)
    before = copy.deepcopy(model)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.last.parameters(), lr=0.1))
    for _ in range(2):
        training(torch.randn(8, 4), torch.randint(0, 3, (8,)))

    assert torch.equal(model.first.weight, before.first.weight)
    assert torch.equal(model.norm.weight, before.norm.weight)
    assert not torch.equal(model.last.weight, before.last.weight)


def test_tied_parameters_stay_tied() -> None:
    """One copy on the device for both places."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return poptorch.identity_loss(self.two(self.one(x)), "mean")

    model = Tied()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(2, 2)).backward()
        optimizer.step()
        training(torch.ones(2, 2))

    assert model.two.weight is model.one.weight
    assert _states_are_equal(model, plain)


class Encoder(nn.Module):
    """Recurrent, with statistics and dropout, a weight and a buffer of its own."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.drop = nn.LSTM(4, 8), nn.BatchNorm1d(8), nn.Dropout()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Its last state."""
        return self.drop(self.norm(self.lstm(x)[0][-1])) * self.weight * self.scale  # type: ignore[no-any-return]


class Encoded(nn.Module):
    """An encoder, and its loss where there are labels."""

    def __init__(self, encoder: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.encoder, self.last = encoder(Encoder()), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:  # noqa: ANN401 - with y, the loss, too
        """Scores."""
        scores = self.last(self.encoder(x.transpose(0, 1)))
        return scores if y is None else (scores, functional.cross_entropy(scores, y))


class Scored(nn.Module):
    """The mean as the loss."""

    def forward(self, x: Tensor) -> Tensor:
        """It."""
        return poptorch.identity_loss(x, "mean")


deprecated = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")


def _train_encoded(encoder: Callable[[nn.Module], Any]) -> list[Tensor]:
    """Losses, results of the trained part on the host and of an inference model, and all weights."""
    torch.manual_seed(0)
    model = Encoded(encoder)
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(broadcast_buffers=False)
    options.Training.gradientAccumulation(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, options, optimizer)
    batches = [(torch.randn(16, 5, 4), torch.randint(0, 3, (16,))) for _ in range(4)]
    found = [training(*batch)[1] for batch in batches]
    model.eval()
    with torch.no_grad():
        found.append(model.encoder(batches[0][0].transpose(0, 1)))
    found.append(poptorch.inferenceModel(model)(batches[0][0]))
    assert torch.equal(found[-1], model(batches[0][0]))
    training(*batches[0])
    assert torch.equal(copy.deepcopy(model.encoder).weight, model.encoder.weight)
    found += [value.clone() for value in model.state_dict().values()]
    model.destroy()  # type: ignore[operator] # which it has gained
    assert not any("Watched" in type(part).__name__ for part in (*model.modules(), *model.parameters()))
    return found


@deprecated
def test_a_scripted_part_trains_to_the_same_bits() -> None:
    """As the module that torch.jit made it of; the host's copy of it is brought up to date as any other."""
    plain, scripted = _train_encoded(lambda it: it), _train_encoded(torch.jit.script)

    assert all(torch.equal(mine, its) for mine, its in zip(scripted, plain, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_torch_compiled_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss within it is found, and its first forward is looked at before it is compiled."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch.compile shows progress; this is a thread of it
    found = []
    for compiled in (lambda it: it, lambda it: torch.compile(it, backend="aot_eager")):
        torch.manual_seed(0)
        model: Any = compiled(Affine())
        training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [training(*_batch(4, seed))[1] for seed in range(3)]
        found.append([*losses, poptorch.inferenceModel(model)(*_batch(4))[0], model.fc.weight.detach().clone()])
        training.destroy()

    assert all(map(torch.equal, *found))


@deprecated
def test_a_scripted_part_of_two_models_is_that_of_the_last_run() -> None:
    """The host gets the weights of either one, also after the other one was destroyed."""
    part = torch.jit.script(nn.Linear(4, 2))
    models = [nn.Sequential(part, Scored()) for _ in range(2)]
    first, second = (
        poptorch.trainingModel(one, optimizer=torch.optim.SGD(one.parameters(), lr=0.1)) for one in models
    )
    begin = part.state_dict()["weight"].clone()
    num_steps = []
    for training in (first, second, second, first):
        training(torch.ones(2, 4))
        num_steps.append((begin - part.state_dict()["weight"]).mean().item() / 0.05)
        assert torch.equal(part(torch.ones(1, 4)), functional.linear(torch.ones(1, 4), part.weight, part.bias))
    first.destroy()
    second(torch.ones(2, 4))
    num_steps.append((begin - copy.deepcopy(part).weight.detach()).mean().item() / 0.05)
    second.destroy()

    assert num_steps == pytest.approx([1, 2, 3, 2, 4])  # each model has a copy of its own
    assert not any("Watched" in type(one).__name__ for one in (*part.modules(), *part.parameters()))
    assert not hasattr(part, "destroy")


@deprecated
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda it: torch.jit.trace(it, torch.ones(1, 4))])
def test_weights_of_another_dtype_in_a_scripted_part_are_refused(compiled: Callable[[nn.Module], Any]) -> None:
    """As torch has no place at which they could be cast; in a plain part they are."""
    plain, scripted = (nn.Sequential(one, Scored()) for one in (nn.Linear(4, 2), compiled(nn.Linear(4, 2))))
    half = torch.ones(2, 4, dtype=torch.bfloat16)
    assert poptorch.inferenceModel(plain)(half).dtype is torch.bfloat16
    with pytest.raises(poptorch.Error, match=r"torch.jit compiled .* call half\(\) or bfloat16\(\) of that part"):
        poptorch.inferenceModel(scripted)(half)
    scripted.bfloat16()
    assert poptorch.inferenceModel(scripted)(half).dtype is torch.bfloat16


@deprecated
def test_a_scripted_model_infers_and_hides_its_loss() -> None:
    """Whole models of torch.jit: their forward says what it takes; a loss in one cannot be seen."""
    scripted = torch.jit.script(Affine())
    inference = poptorch.inferenceModel(scripted)
    x, y = _batch(2)

    assert all(map(torch.equal, inference(x, y=y), scripted(x, y)))
    with pytest.raises(poptorch.Error, match="Mandatory parameter y missing"):
        poptorch.inferenceModel(scripted)(x)
    with pytest.raises(poptorch.Error, match=r"Couldn't find a loss.*torch.jit.*in a module around that"):
        poptorch.trainingModel(scripted)(x, y)
    for made in (torch.jit.trace(nn.Linear(2, 1), x), torch.jit.freeze(torch.jit.script(nn.Linear(2, 1).eval()))):
        assert torch.equal(poptorch.inferenceModel(made)(x), made(x))


@deprecated
def test_a_scripted_block_lies_on_its_ipu() -> None:
    """Its weights and activations count there, all together."""
    model = Encoded(torch.jit.script)
    poptorch.BeginBlock(model.encoder, ipu_id=1)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    training = poptorch.trainingModel(model, options)
    training(torch.randn(2, 5, 4), torch.tensor([0, 1]))
    first, second = training.report().ipus

    assert first.parameter_bytes == 0
    assert second.parameter_bytes == sum(one.nbytes for one in model.parameters())
    assert second.activation_bytes > 0
