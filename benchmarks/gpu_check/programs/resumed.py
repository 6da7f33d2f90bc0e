"""Train with checkpoints that another device, and another number of instances, load in the middle of an epoch.

poprun -n 2 --num-replicas 4 python resumed.py --folder DIR --stop-after 5
poprun -n 1 --num-replicas 4 python resumed.py --folder DIR --copies
poprun -n 4 --num-replicas 4 python resumed.py --folder DIR
"""

import argparse
from typing import Any

import torch
from gpu_check.programs.device import chosen_device, print_result
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import popdist
from popdist.checkpoint import load_latest, save

NUM_STEPS, NUM_SAMPLES = 12, 250
"""An epoch has 8 steps, of which the last one is smaller."""


def samples() -> TensorDataset:
    """Return random samples in two classes."""
    points = torch.randn(NUM_SAMPLES, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points.sum(1) > 0).long())


def main() -> None:
    """Go on from the last checkpoint, and train to the end; or stop early and save; or only save again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--stop-after", type=int, default=NUM_STEPS)
    parser.add_argument("--copies", action="store_true")
    options = parser.parse_args()
    device = chosen_device()
    popdist.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 2))
    model = popdist.ReplicatedModel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = popdist.data_loader(samples(), 8, shuffle=True)
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    last = load_latest(options.folder, **named)
    step = last.values["trained"] if last else 0
    loaded = popdist.checksum(model)
    while step < options.stop_after and not options.copies:
        for batch in loader:
            for points, labels in model.micro_batches(batch):
                cross_entropy(model(points), labels).backward()
            optimizer.step()
            step += 1
            if step == options.stop_after:
                break
    if options.copies or step < NUM_STEPS:
        save(options.folder, trained=step, **named)
    print_result(loaded=loaded, digest=popdist.checksum(model), step=step)


if __name__ == "__main__":
    main()
