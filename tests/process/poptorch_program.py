"""A training as programs for PopTorch begin and log theirs, whoever starts it.

Each instance prints where it is, the loss of each epoch over all of them, and its weights. The whole data are one
step of the job, so that the loaders of any split read the same samples in the same order.
"""

import argparse
import json
import logging
import os
from pathlib import Path

if "POPDIST_NUM_TOTAL_REPLICAS" in os.environ:
    import popart  # type: ignore[import-not-found] # before poptorch, which poprun makes possible

    assert popart.TileSet.IO

import torch
from torch import Tensor, nn

import popdist
import popdist.poptorch
import poptorch

log = logging.getLogger("train")


class NetWithLoss(nn.Module):
    """Gives its output, and in training the loss beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The output, and its mean squared distance to ``target`` if there is one."""
        output: Tensor = self.net(x)
        return output if target is None else (output, nn.functional.mse_loss(output, target))


def main() -> None:
    """Start up, train, log, save, validate."""
    import horovod.torch as hvd  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    if popdist.isPopdistEnvSet():
        popdist.init()
        hvd.init()
        if popdist.getNumTotalReplicas() != args.replicas:
            log.warning("%d replicas overridden by poprun: %d", args.replicas, popdist.getNumTotalReplicas())
        args.replicas = int(popdist.getNumLocalReplicas())
        options: poptorch.Options = popdist.poptorch.Options(ipus_per_replica=1)
    else:
        options = poptorch.Options().replicationFactor(args.replicas)
    options.randomSeed(42).outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(1)
    options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useReplicatedTensorSharding())

    torch.manual_seed(popdist.getInstanceIndex())
    model = NetWithLoss()
    if popdist.isPopdistEnvSet():
        torch.manual_seed(0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = poptorch.DataLoader(options, data, batch_size=2)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=16.0)
    training = poptorch.trainingModel(model, options, optimizer)

    losses = []
    for epoch in range(4):
        for batch in loader:
            _, loss = training(*batch)
            assert loss.numel() == args.replicas
            mean = torch.mean(loss)
            losses.append(float(hvd.allreduce(mean, average=True) if popdist.isPopdistEnvSet() else mean))
        optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 2)
        training.setOptimizer(optimizer)

    def save() -> None:
        assert not args.checkpoint.exists()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)

    if popdist.isPopdistEnvSet():
        popdist.execute_on_instances({0}, save)
    else:
        save()
    training.destroy()

    local = poptorch.Options()
    local.Distributed.disable()
    inference = poptorch.inferenceModel(model.eval(), local)
    whole = poptorch.DataLoader(local, data, batch_size=8)
    print(  # noqa: T201 - what the test reads
        json.dumps(
            {
                "instance": popdist.getInstanceIndex(),
                "place": [popdist.popdist_core.getReplicaIndexOffset(), hvd.local_rank(), hvd.size()],
                "losses": losses,
                "weights": popdist.checksum(model),
                "outputs": [row for batch, _ in whole for row in inference(batch).flatten().tolist()],
            }
        )
    )


if __name__ == "__main__":
    main()
