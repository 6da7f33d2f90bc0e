"""Train on handwritten digits in a job that may be killed, or asked to leave, at any moment and started again.

    poprun --num-instances 2 --num-replicas 4 python examples/train_digits_resumable.py --folder run1

Kill it and type the same again, with any ``--num-instances``: it goes on from the last checkpoint, and its last
line is that of a run that was never killed. With ``--max-restarts 50`` it starts again by itself when it fails; at
SIGTERM, or SIGUSR1 from Slurm, it saves first.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import popdist
from popdist.checkpoint import load_latest, save


def load_images() -> TensorDataset:
    """All 1797 images with their digits."""
    digits, device = load_digits(), popdist.device()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).flatten(1) / 16
    return TensorDataset(images, torch.tensor(digits.target, device=device))


def main() -> None:
    """Train from where the last run came to, and save every few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    arguments = parser.parse_args()
    popdist.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))
    model = popdist.ReplicatedModel(net.to(popdist.device()))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.8)
    loader = popdist.data_loader(load_images(), 8, shuffle=True)

    training: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    last = load_latest(arguments.folder, **training)
    epoch, step = (last.values["epoch"], last.step) if last else (0, 0)
    if popdist.is_main():
        print(f"start in epoch {epoch + 1}, after {step} steps", flush=True)

    def keep() -> None:
        saved = save(arguments.folder, step=step, epoch=epoch, **training)
        if popdist.is_main():
            print(f"saved {saved.name}", flush=True)

    popdist.on_preemption(lambda: keep() if step % arguments.save_every else None)
    while epoch < arguments.epochs:
        for batch in loader:
            for pixels, digits in model.micro_batches(batch):
                nn.functional.cross_entropy(model(pixels), digits).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % arguments.save_every == 0:
                keep()
        epoch += 1
    if popdist.is_main():
        print(f"{step} steps, weights {popdist.checksum(model)}")


if __name__ == "__main__":
    main()
