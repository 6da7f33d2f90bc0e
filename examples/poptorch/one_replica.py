"""Train a classifier of handwritten digits on one replica, and test it.

python examples/poptorch/one_replica.py
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import poptorch

NUM_TEST_IMAGES = 352


class Classifier(nn.Module):
    """Scores of the ten digits, and the loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The result of a loss function is what is trained, wherever it stands in the output."""
        scores: Tensor = self.layers(images)
        return scores if labels is None else (scores, self.loss(scores, labels))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Images and labels to train with, and others to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    first = TensorDataset(images[:-NUM_TEST_IMAGES], labels[:-NUM_TEST_IMAGES])
    return first, TensorDataset(images[-NUM_TEST_IMAGES:], labels[-NUM_TEST_IMAGES:])


def main(words: Sequence[str] | None = None) -> None:
    """Train, print the loss of each epoch, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    num_epochs = parser.parse_args(words).epochs

    options = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.All).randomSeed(42)
    options.Training.gradientAccumulation(2)
    test_options = poptorch.Options().deviceIterations(4)

    train_set, test_set = datasets()
    loader = poptorch.DataLoader(options, train_set, batch_size=16, shuffle=True)
    test_loader = poptorch.DataLoader(test_options, test_set, batch_size=22)

    model = Classifier()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=2e-3)
    training_model = poptorch.trainingModel(model, options, optimizer)
    for epoch in range(num_epochs):
        losses = [training_model(images, labels)[1] for images, labels in loader]
        print(f"epoch {epoch + 1}: loss {torch.cat(losses).mean():.4f}")

    inference_model = poptorch.inferenceModel(model, test_options)
    right = [(inference_model(images).argmax(1) == labels).float() for images, labels in test_loader]
    print(f"test accuracy {torch.cat(right).mean():.2%}")


if __name__ == "__main__":
    main()
