"""A training script with everything in it on which bits may depend.

``law_program.py FOLDER NUM_WORKERS STOP_AFTER`` goes on from the checkpoint in FOLDER, if there is one. After step
STOP_AFTER it saves one and ends; when all steps are done it prints the digest of the weights, the buffers, the
optimizer's state and the rate.
"""

import os
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import Dataset

import popdist
from popdist.checkpoint import load_latest, save

MICRO_BATCH_SIZE = 2
NUM_SAMPLES = 101
"""No multiple of any step, so each epoch ends with a ragged one."""

ACCUMULATION = {8: 1, 6: 3}
"""For each number of replicas; an epoch of 8 has 7 steps, one of 6 has 3."""

NUM_STEPS = {8: 11, 6: 5}
STOP_AFTER = {8: 4, 6: 2}
"""In the middle of the first epoch, and there is another one after it."""

SIDE = 12


class Net(nn.Module):
    """What adds over more numbers than one thread takes, keeps statistics, or draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.statistics = nn.BatchNorm2d(8)
        self.norm = nn.LayerNorm([8, SIDE, SIDE])
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(8 * SIDE * SIDE, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images to ten scores."""
        pixels = self.norm(torch.relu(self.statistics(self.convolution(images))))
        rows = avg_pool2d(pixels, 2).flatten(2).transpose(1, 2)
        mixed = self.attention(rows, rows, rows, need_weights=False)[0].mean(1)
        return torch.as_tensor(self.classifier(self.dropout(pixels + mixed[:, :, None, None]).flatten(1)))


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images that are rolled, flipped and made noisy by chance, by each generator that programs draw from."""

    def __init__(self) -> None:
        self.images = torch.randn(NUM_SAMPLES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].roll(random.randrange(4), 2)  # noqa: S311 - what programs use
        if np.random.rand() < 0.5:
            image = image.flip(1)
        return image + 0.1 * torch.randn(image.shape), index % 10


def train(folder: str, num_workers: int, stop_after: int) -> str | None:
    """Train to the end or to ``stop_after``; the digest at the end."""
    torch.manual_seed(popdist.instance_index())
    model = popdist.ReplicatedModel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3} if num_workers else {}
    accumulation = ACCUMULATION[popdist.num_replicas()]
    loader = popdist.data_loader(
        Augmented(), MICRO_BATCH_SIZE, accumulation, shuffle=True, num_workers=num_workers, **options
    )
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    last = load_latest(folder, **named)
    num_done = last.values["num_done"] if last else 0
    while True:
        for batch in loader:
            for images, labels in model.micro_batches(batch):
                cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            num_done += 1
            if num_done == stop_after:
                save(folder, **named, num_done=num_done)
                return None
            if num_done == NUM_STEPS[popdist.num_replicas()]:
                return digest(model, optimizer)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of everything that a further step depends on."""
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    moments = {
        f"optimizer.{index}.{name}": value
        for index, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }
    rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    return popdist.checksum(model.state_dict() | moments | {"rate": rate})


def main(folder: str, num_workers: str, stop_after: str) -> None:
    """One instance."""
    if (end := train(folder, int(num_workers), int(stop_after))) is not None:
        os.write(1, f"{end}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
