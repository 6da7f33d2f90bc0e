"""Train one model at one global batch with 1, 4 and 16 replicas, and draw the loss of every step.

    python examples/identical_curves.py --plot docs/identical_curves.png

A step is 64 images, whoever computes them. Left: a model without batch statistics. Cut into 16 micro batches of 4
images, the curves and the weights of all numbers of replicas are equal to the last bit: a replica adds its micro
batches in a binary tree, the replicas are added in one, and for powers of two that is one tree over 16 equal
parts. Cut into one micro batch for each replica they lie on each other: the same sum, added in another order.

Right: a model with BatchNorm. Over a group of all replicas its statistics are those of the 64 images, and the
curves lie on each other. Where each replica has statistics of its own, the numbers of replicas train apart.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import popdist

GLOBAL_BATCH_SIZE = 64


class Run(NamedTuple):
    """One training.

    Attributes:
        replicas: Of the job.
        micro_batches: Of each replica in a step.
        group_size: Replicas whose BatchNorm layers share statistics; 0 for a model without these layers.
    """

    replicas: int
    micro_batches: int
    group_size: int = 0

    def __str__(self) -> str:
        """For the legend."""
        size = GLOBAL_BATCH_SIZE // self.replicas // self.micro_batches
        times = f" x {self.micro_batches}" if self.micro_batches > 1 else ""
        groups = f", groups of {self.group_size}" if self.group_size else ""
        return f"{self.replicas} replica{'s' * (self.replicas > 1)}{times} x {size} images{groups}"


EQUAL = [Run(1, 16), Run(4, 4), Run(16, 1)]
NEAR = [Run(1, 1), Run(4, 1)]
GROUPS = [Run(1, 1, 1), Run(4, 1, 4), Run(16, 1, 16)]
APART = [Run(4, 1, 1), Run(16, 1, 1)]


def net(*, has_batch_norm: bool) -> nn.Module:
    """Two layers and a classifier for images of 8 x 8 pixels."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(64) if has_batch_norm else nn.LayerNorm(64) for _ in range(2)]
    layers = [nn.Linear(64, 64), norms[0], nn.ReLU(), nn.Linear(64, 64), norms[1], nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


def train(run: Run, num_steps: int) -> tuple[list[float], str]:
    """The loss of each step over all replicas, and a checksum of the weights; every instance calls it."""
    popdist.init()
    torch.set_num_threads(1)  # one replica on its own would get all cores, and other bits
    model = popdist.ReplicatedModel(
        net(has_batch_norm=run.group_size > 0), batch_norm_group_size=max(1, run.group_size)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    size = GLOBAL_BATCH_SIZE // run.replicas // run.micro_batches
    loader = popdist.data_loader(
        TensorDataset(images, torch.tensor(digits.target)),
        size,
        accumulation=run.micro_batches,
        shuffle=True,
        drop_last=True,
    )

    def body(x: Tensor, y: Tensor) -> float:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return float(loss.detach()) * len(x)

    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            found = model.run_micro_batches(batch, body)
            optimizer.step()
            losses.append(popdist.weighted_mean(sum(found), size * len(found)))
    return losses[:num_steps], popdist.checksum(model)


def plot(curves: Mapping[Run, Sequence[float]], path: Path) -> None:
    """Draw the runs without batch statistics beside those with them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    sides = ((left, "without batch statistics", EQUAL, NEAR), (right, "with BatchNorm", GROUPS, APART))
    for axes, title, first, second in sides:
        for place, run in enumerate(first):
            axes.plot(curves[run], linewidth=7 - 2.5 * place, alpha=0.55, label=str(run))
        for run in second:
            axes.plot(curves[run], linewidth=1, linestyle="--", label=str(run))
        axes.set(title=title, xlabel=f"step of {GLOBAL_BATCH_SIZE} images")
        axes.legend(fontsize=8)
    left.set(ylabel="training loss", yscale="log")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train everything in jobs on this machine, check what must be equal, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="of each training (80)")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    options = parser.parse_args()
    found: dict[Run, tuple[list[float], str]] = {}
    for run in (*EQUAL, *NEAR, *GROUPS, *APART):
        instances = min(2, run.replicas)
        found[run] = popdist.launch(
            train, (run, options.steps), num_instances=instances, num_replicas=run.replicas
        )[0]
    reference = dict.fromkeys((*EQUAL, *NEAR), EQUAL[0]) | dict.fromkeys((*GROUPS, *APART), GROUPS[0])
    for run, (losses, checksum) in found.items():
        other = found[reference[run]][0]
        most = max(abs(mine - its) / its for mine, its in zip(losses, other, strict=True))
        print(f"{run!s:42} last loss {losses[-1]:.6f}, furthest from the first {most:.1e}, weights {checksum}")
    if len({found[run][1] for run in EQUAL}) != 1:
        sys.exit("micro batches of equal composition gave different bits: that must not be")
    if options.plot:
        plot({run: losses for run, (losses, _) in found.items()}, options.plot)


if __name__ == "__main__":
    main()
