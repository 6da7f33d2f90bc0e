"""Training has the bits of a plain loop, over any number of replicas.

Holds poptorch.executor.compiled_model.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import poptorch
from poptorch.executor.saved_models import read
from tests.unit.poptorch_models import Affine, Forward, Net, random_batch, states_are_equal

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
    assert states_are_equal(model, plain)


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
        x, y = random_batch(8)
        order = torch.arange(4).view(replicas, accumulation).T.reshape(-1)  # so that replicas see the same samples
        parts = [part[order].flatten(0, 1) for part in (x.view(4, 2, 2), y.view(4, 2, 1))]
        losses = [training(*parts)[1][order.argsort()] for _ in range(3)]
        found.append((torch.cat(losses), model.fc.weight.detach().clone()))

    for losses_of_one, weight in found[1:]:
        assert torch.equal(weight, found[0][1])
        assert torch.equal(losses_of_one, found[0][0])


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

    assert states_are_equal(model, plain)


def test_losses_can_be_scaled() -> None:
    """The weights are those without, as far as a power of two changes nothing."""
    found = []
    for scaling in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Affine()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=scaling)
        poptorch.trainingModel(model, optimizer=optimizer)(*random_batch(4))
        found.append(model.fc.weight.detach().clone())

    assert torch.equal(*found)


def test_options_of_another_number_of_processes_are_refused() -> None:
    """Training is a matter of all instances of the job."""
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="process 0 of 2, and this job has 1 instances"):
        poptorch.trainingModel(Affine(), options)(*random_batch(2))


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
        training(*random_batch(2))
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
            executor(*random_batch(2))
        assert not executor.isCompiled()
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    sharded = Affine()
    poptorch.BeginBlock(sharded.fc, ipu_id=1)
    assert poptorch.trainingModel(sharded, options)(*random_batch(2))[0].shape == (2, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_needs_no_gradients_of_the_programs(replicas: int) -> None:
    """A call under no_grad trains; a program's own backward pass stays its own, also after ``destroy()``."""
    model = Affine()
    training = poptorch.trainingModel(model, poptorch.Options().replicationFactor(replicas))
    before = model.fc.weight.detach().clone()
    with torch.no_grad():
        training(*random_batch(2))
    assert not torch.equal(model.fc.weight, before)
    model(*random_batch(2))[1].backward()
    gradient = model.fc.weight.grad
    training(*random_batch(2))
    assert gradient is not None
    assert model.fc.weight.grad is gradient
    training.destroy()
    model(*random_batch(2))[1].backward()


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
    assert states_are_equal(model, plain)


def _count(m: Forward, x: Tensor) -> Tensor:
    m.y.add_(1)
    return x * m.y


class _Centred(nn.Module):
    """Statistics of a layer, which torch.jit may have compiled, and of its own, by torch's operation."""

    mean: Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        functional.batch_norm(x, self.mean, self.var, training=True)  # type: ignore[arg-type] # a buffer
        return poptorch.identity_loss(y.square(), "mean")


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shares", [True, False])
def test_each_replica_has_its_running_statistics(shares: bool, compiled: bool, tmp_path: Path) -> None:  # noqa: FBT001 - parameters
    """The module those of replica 0, as a plain loop over its samples has them; a saved model has all."""
    norm = nn.BatchNorm1d(2)
    model = _Centred(torch.jit.script(norm) if compiled else norm)
    alone = _Centred(nn.BatchNorm1d(2))
    options = poptorch.Options().replicationFactor(3).deviceIterations(2).broadcastBuffers(shares)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.randn(2, 3, 4, 2)
    training(x.flatten(0, 2))
    for part in x[:, 0]:
        alone(part)

    assert states_are_equal(model, alone)
    assert not torch.equal(model.mean, torch.zeros(2))
    training.save(tmp_path, export_model=False)
    other = _Centred(nn.BatchNorm1d(2))
    loaded = poptorch.trainingModel(other, options, torch.optim.SGD(other.parameters(), lr=0.0))
    loaded.loadExecutable(tmp_path)
    assert states_are_equal(other, alone)
    loaded.save(tmp_path / "again", export_model=False)
    first, second = (read(path).replica_buffers for path in (tmp_path, tmp_path / "again"))
    assert [len(one) for one in first] == [0, 5, 5]
    assert not torch.equal(first[1]["mean"], first[2]["mean"])
    for one, again in zip(first, second, strict=True):
        assert all(torch.equal(one[name], again[name]) for name in one)


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


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [poptorch.optim.LAMB, poptorch.optim.AdamW])
def test_torchs_default_dtype_plays_no_part(make: Callable[..., Any], default: torch.dtype) -> None:
    """In what training with half-precision moments, a loss scaling and several replicas makes."""
    found = []
    for dtype in (torch.float32, default):
        torch.manual_seed(0)
        model = Affine()
        optimizer = make(
            model.parameters(), loss_scaling=3.0, max_grad_norm=1.0, first_order_momentum_accum_type=torch.half
        )
        batch = random_batch(8)
        options = poptorch.Options().replicationFactor(2)
        options.Training.gradientAccumulation(2)
        torch.set_default_dtype(dtype)
        try:
            training = poptorch.trainingModel(model, options, optimizer)
            results = [training(*batch)[1] for _ in range(3)]
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([*results, *model.state_dict().values()])
        training.destroy()

    assert all(map(torch.equal, *found))
