"""Train the digits with 1 and with 16 replicas at the same global batch, and draw the loss of every step.

    python examples/poptorch/scaling.py --plot docs/poptorch_scaling.png

A step is 64 images. One replica that accumulates 16 micro batches of 4 images and 16 replicas with one each have
the same micro batches: their curves and weights are equal to the last bit. One replica with all 64 images in one
micro batch adds the same numbers in another order: its curve lies on theirs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

import popdist
import poptorch
from one_replica import Classifier, datasets

GLOBAL_BATCH_SIZE = 64
RUNS = [(1, 16), (16, 1), (1, 1)]
"""Replicas, and micro batches of each in a step. The first two have the same micro batches."""


def train(num_replicas: int, num_micro_batches: int, num_epochs: int) -> tuple[list[float], str]:
    """The loss of each step, and a checksum of the weights."""
    options = poptorch.Options().replicationFactor(num_replicas).outputMode(poptorch.OutputMode.All).randomSeed(42)
    options.Training.gradientAccumulation(num_micro_batches)
    size = GLOBAL_BATCH_SIZE // num_replicas // num_micro_batches
    loader = poptorch.DataLoader(options, datasets()[0], batch_size=size, shuffle=True)
    model = Classifier()
    training_model = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=2e-3))
    losses = [
        float(training_model(images, labels)[1].double().mean())
        for _ in range(num_epochs)
        for images, labels in loader
    ]
    training_model.destroy()
    return losses, popdist.checksum(model)


def main(words: Sequence[str] | None = None) -> None:
    """Train all three, print, check what must be equal, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="of each training (4)")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    chosen = parser.parse_args(words)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    found = []
    for place, (replicas, micro_batches) in enumerate(RUNS):
        losses, checksum = train(replicas, micro_batches, chosen.epochs)
        found.append((losses, checksum))
        size = GLOBAL_BATCH_SIZE // replicas // micro_batches
        label = f"{replicas} replica{'s' * (replicas > 1)} x {micro_batches} x {size} images"
        most = max(abs(mine - its) / its for mine, its in zip(losses, found[0][0], strict=True))
        print(f"{label:28} last loss {losses[-1]:.6f}, furthest from the first {most:.1e}, weights {checksum}")
        axes.plot(losses, linewidth=6 - 2.5 * place, alpha=0.6, label=label)
    if found[0] != found[1]:
        sys.exit("the same micro batches gave different bits: that must not be")
    axes.set(xlabel=f"step of {GLOBAL_BATCH_SIZE} images", ylabel="training loss", yscale="log")
    axes.legend()
    if chosen.plot:
        figure.savefig(chosen.plot, dpi=110)


if __name__ == "__main__":
    main()
