"""What poptorch trains on four replicas: the same for every split into instances."""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional

import popdist
import poptorch
from poptorch.executor.saved_models import read

MEAN = "body.1.running_mean"
NUM_ITERATIONS, NUM_ACCUMULATIONS, NUM_REPLICAS, SIZE = 2, 2, 4, 3


class Net(nn.Module):
    """A network with statistics and dropout, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and loss."""
        scores = self.body(x)
        return scores, functional.cross_entropy(scores, y)


def _own_part(samples: Tensor) -> Tensor:
    """This instance's combined batch of the job's, which lies by iteration, accumulation step and replica."""
    own = popdist.local_replicas()
    parts = samples.view(NUM_ITERATIONS, NUM_ACCUMULATIONS, NUM_REPLICAS, SIZE, *samples.shape[1:])
    return parts[:, :, own.start : own.stop].flatten(0, 3)


def train(shards: bool) -> tuple[str, list[Tensor], dict[str, Tensor]]:  # noqa: FBT001 - a world has no names for arguments
    """Three calls: the weights' checksum, each replica's losses and statistics, and the optimizer's state by name.

    Before the last one instance 0 alone changes weights and statistics, which all upload.
    """
    popdist.init()
    torch.manual_seed(5)
    model = Net()
    options = popdist.poptorch.Options()
    options.randomSeed(7).deviceIterations(NUM_ITERATIONS)
    options.outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(NUM_ACCUMULATIONS)
    if shards:
        location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        options.TensorLocations.setOptimizerLocation(location.minElementsForReplicatedTensorSharding(1))
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01, loss_scaling=8.0)
    training = poptorch.trainingModel(model, options, optimizer)
    made = torch.Generator().manual_seed(1)
    num_samples = NUM_ITERATIONS * NUM_ACCUMULATIONS * NUM_REPLICAS * SIZE
    losses = []
    for number in range(3):
        if number == 2:
            if popdist.is_main():
                with torch.no_grad():
                    model.get_parameter("body.4.weight").mul_(2)
                    model.get_buffer(MEAN).fill_(5)
            training.copyWeightsToDevice()
        x, y = torch.randn(num_samples, 5, generator=made), torch.randint(0, 2, (num_samples,), generator=made)
        losses.append(training(_own_part(x), _own_part(y))[1])
    parts = torch.cat(losses).view(-1, popdist.num_local_replicas()).unbind(1)
    with tempfile.NamedTemporaryFile() as file:
        training.save(file.name, export_model=False)
        replicas = read(file.name).replica_buffers
    means = [each.get(MEAN, model.get_buffer(MEAN)) for each in replicas]
    own = [torch.cat(pair) for pair in zip(parts, means, strict=True)]
    return popdist.checksum(model), own, dict(optimizer.state_dict()["ipu_state"] or {})
