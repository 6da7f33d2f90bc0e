"""Train handwritten digits in float32, in float16 rounded to the nearest, and in float16 rounded by chance.

    poprun --num-instances 2 --num-replicas 4 python examples/low_precision.py --plot low_precision.png

The learning rate is so small that most updates are below half the distance to the next number of float16: rounded
to the nearest they are lost, and the training stalls. Rounded by chance, weights move by the updates in the mean.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from popdist.optim import LowPrecision

LEARNING_RATE = 8e-6
NUM_IMAGES = 240

RUNS = {
    "float32": (torch.float32, "nearest"),
    "float16, rounded to the nearest": (torch.float16, "nearest"),
    "float16, rounded by chance": (torch.float16, "stochastic"),
}
"""Name of each run → what weights are held in, and how they are rounded."""


def digits() -> tuple[Tensor, Tensor]:
    """The first images as rows of 64 numbers, and their classes: this instance's share."""
    x, y = (torch.tensor(it[:NUM_IMAGES]) for it in load_digits(return_X_y=True))
    rows = popdist.num_local_replicas() * (len(x) // popdist.num_replicas())
    part = slice(popdist.instance_index() * rows, (popdist.instance_index() + 1) * rows)
    return (x[part] / 8 - 1).float(), y[part]


def train(dtype: torch.dtype, rounding: str, num_steps: int) -> list[float]:
    """The mean loss over the job of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = popdist.ReplicatedModel(net.to(dtype))
    moments = torch.float32 if dtype == torch.float32 else torch.bfloat16
    optimizer = popdist.ShardedOptimizer(
        model,
        LowPrecision,
        optimizer_class=torch.optim.AdamW,
        moments=moments,
        rounding=rounding,
        lr=LEARNING_RATE,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    batch, losses = digits(), []
    for _ in range(num_steps):
        mean = popdist.Mean()
        for x, y in model.micro_batches(batch):
            loss = cross_entropy(model(x.to(dtype)).float(), y)
            scaler.scale(loss).backward()
            mean.add(loss.detach() * len(x), len(x))
        scaler.step(optimizer)
        scaler.update()
        losses.append(mean.compute())
    return losses


def draw(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """The losses over the steps, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        axes.plot(losses, style, label=name, linewidth=2)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train all three, and print their last losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="steps of each run (3000)")
    parser.add_argument("--plot", type=Path, help="a PNG for the curves")
    options = parser.parse_args()
    popdist.init()
    curves = {name: train(dtype, rounding, options.steps) for name, (dtype, rounding) in RUNS.items()}
    if popdist.is_main():
        for name, losses in curves.items():
            ratio = losses[-1] / curves["float32"][-1]
            print(f"{name:32} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {ratio:.4f} of float32's")
        if options.plot:
            draw(curves, options.plot)


if __name__ == "__main__":
    main()
