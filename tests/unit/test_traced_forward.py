"""What has to be cast in a forward, and what torch.jit and torch.compile have compiled.

Holds poptorch.executor.traced_forward.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import poptorch
from tests.unit.poptorch_models import Affine, Forward, random_batch


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


def test_forward_knows_that_it_runs() -> None:
    """Only there."""
    seen = []

    def look(_: Forward, x: Tensor) -> Tensor:
        seen.append(poptorch.isRunningOnIpu())
        return x

    poptorch.inferenceModel(Forward(look))(torch.ones(2))

    assert set(seen) == {True}
    assert not poptorch.isRunningOnIpu()


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

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
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
    found += [value.clone() for value in model.state_dict().values()]
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
        losses = [training(*random_batch(4, seed))[1] for seed in range(3)]
        found.append(
            [*losses, poptorch.inferenceModel(model)(*random_batch(4))[0], model.fc.weight.detach().clone()]
        )
        training.destroy()

    assert all(map(torch.equal, *found))


@deprecated
def test_a_scripted_part_of_two_models_is_trained_by_both() -> None:
    """Also after one of them was destroyed."""
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
    first.destroy()
    second(torch.ones(2, 4))
    num_steps.append((begin - copy.deepcopy(part).weight.detach()).mean().item() / 0.05)

    assert num_steps == pytest.approx([1, 2, 3, 4, 5])


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
    x, y = random_batch(2)

    assert all(map(torch.equal, inference(x, y=y), scripted(x, y)))
    with pytest.raises(poptorch.Error, match="Mandatory parameter y missing"):
        poptorch.inferenceModel(scripted)(x)
    with pytest.raises(poptorch.Error, match=r"Couldn't find a loss.*torch.jit.*in a module around that"):
        poptorch.trainingModel(scripted)(x, y)
    for made in (torch.jit.trace(nn.Linear(2, 1), x), torch.jit.freeze(torch.jit.script(nn.Linear(2, 1).eval()))):
        assert torch.equal(poptorch.inferenceModel(made)(x), made(x))


@deprecated
def test_a_scripted_part_can_begin_a_block() -> None:
    """Whose virtual IPU is a stage of the pipeline."""
    model = Encoded(torch.jit.script)
    poptorch.BeginBlock(model.encoder, ipu_id=1)
    training = poptorch.trainingModel(model)
    with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(3\)"):
        training(torch.randn(2, 5, 4), torch.tensor([0, 1]))
