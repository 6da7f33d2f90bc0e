"""Train a small network on scikit-learn's handwritten digits.

    poprun --num-instances 2 --num-replicas 4 python examples/train_digits.py

The last line is the same for ``--num-instances`` 1, 2 and 4: the bits of the weights depend on the replicas, not
on how many instances they are dealt to. Without poprun it trains one replica.
"""

import argparse
from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import popdist

NUM_TEST_IMAGES = 360


class DigitsNet(nn.Sequential):
    """Two convolutions and a classifier for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(32 * 4 * 4),
            nn.Linear(32 * 4 * 4, 10),
        )


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train with and 360 to test with, in a fixed random order."""
    digits, device = load_digits(), popdist.device()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[NUM_TEST_IMAGES:], order[:NUM_TEST_IMAGES]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Iterable[tuple[Tensor, Tensor]]]) -> float:
    """The share of all instances' images that the model gets right, the same number on every instance."""
    right: list[bool] = []
    for batch in loader:
        for images, labels in batch:
            right += (model(images).argmax(dim=1) == labels).tolist()
    return popdist.weighted_mean(sum(right), len(right))


def main() -> None:
    """Train, test after each epoch, and print from one instance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    num_epochs = parser.parse_args().epochs
    popdist.init()
    torch.manual_seed(0)
    model = popdist.ReplicatedModel(DigitsNet().to(popdist.device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train, test = load_images()
    train_loader = popdist.data_loader(train, 16, shuffle=True)
    test_loader = popdist.data_loader(test, 90)
    for epoch in range(num_epochs):
        for batch in train_loader:
            for images, labels in model.micro_batches(batch):
                nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        test_accuracy = accuracy(model, test_loader)
        if popdist.is_main():
            print(f"epoch {epoch + 1}: test accuracy {test_accuracy:.2%}")
    if popdist.is_main():
        print(f"test accuracy {test_accuracy:.2%}, weights {popdist.checksum(model)}")


if __name__ == "__main__":
    main()
