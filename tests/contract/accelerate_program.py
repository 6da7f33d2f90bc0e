"""A program for accelerate, with dropout and noise in its data, whose lines name the bits of its state."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import popdist
from popdist.accelerate import Accelerator


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw a random number each time they are read."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(54, 8, generator=drawn)
        self.y = torch.randint(3, (54,), generator=drawn)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


def main(accumulation: int, saved: Path, begin: int) -> None:
    """Train from epoch ``begin`` to the end of epoch 1, and save the state after each epoch."""
    set_seed(42)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=seedable)
    data = Noisy()
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 400)
    test = DataLoader(TensorDataset(data.x, data.y), batch_size=4)
    model, optimizer, loader, test, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True), test, scheduler
    )
    if begin:
        accelerator.load_state(str(saved / f"epoch-{begin - 1}"))
        loader.set_epoch(begin)
    for epoch in range(begin, 2):
        model.train()
        steps = 0
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                steps += accelerator.sync_gradients
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            rows = [accelerator.gather_for_metrics((model(x).argmax(-1), y)) for x, y in test]
        right = torch.cat([found == y for found, y in rows])
        accelerator.save_state(str(saved / f"epoch-{epoch}"))
        rate, bits = scheduler.get_last_lr()[0], popdist.checksum(model)
        accelerator.print(f"epoch {epoch}: {steps} steps, {right.sum()} of {len(right)}, rate {rate:.4f}, {bits}")


def evaluate_at_the_top() -> None:
    """Evaluate at the top of the loop's body, before a batch is used."""
    set_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=2, shuffle=True)
    test = DataLoader(TensorDataset(torch.randn(30, 4)), batch_size=4)
    model, optimizer, loader, others = accelerator.prepare(model, optimizer, train, test)
    step, evaluated = 0, -1
    for _ in range(2):
        for (x,) in loader:
            if step % 3 == 0 and evaluated != step:
                evaluated = step
                model.eval()
                with torch.no_grad():
                    found = [
                        accelerator.gather_for_metrics(model(it).square() + torch.rand(())) for (it,) in others
                    ]
                model.train()
                accelerator.print(f"step {step}: {torch.cat(found).sort(0).values.sum()}")
            with accelerator.accumulate(model):
                accelerator.backward(model(x + torch.rand_like(x)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
    accelerator.print(f"step {step}: {popdist.checksum(model)}")


def train_twice() -> None:
    """Train a second model after the first one, as in a cross validation."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    for fold in range(2):
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"fold {fold}: {accelerator.use_distributed} {popdist.checksum(model)}")
        accelerator.free_memory()


if __name__ == "__main__":
    folder, first = Path(sys.argv[2]), int(sys.argv[3])
    main(int(sys.argv[1]), folder, first)
    if not first:
        evaluate_at_the_top()
        train_twice()
