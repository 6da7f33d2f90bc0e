"""How much longer a step of poptorch.trainingModel takes than that of a plain loop, for one replica.

    python benchmarks/poptorch_overhead.py --rounds 100

Both loops make the same steps: the result and the loss of each are kept until the next one. Every round times
both, in turn and the other way round in the next one; what counts is the median over the rounds of the ratio
within a round.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring.documents import put, table
from measuring.medians import Median, median, ratio
from measuring.turns import by_turns, seconds
from overhead import Step, Task, digits, interval, wide
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import poptorch

MOST_RATIO = 1.05


class WithLoss(nn.Module):
    """A network with its loss, as poptorch's models have it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and loss."""
        scores = self.net(x)
        return scores, cross_entropy(scores, y)


def plain_step(task: Task, y: Tensor) -> Step:
    """As torch's own tutorials write it."""
    model = WithLoss(task.net)
    optimizer = task.optimizer(model.parameters())
    kept: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        scores, loss = model(task.x, y)
        loss.backward()
        optimizer.step()
        kept[:] = scores.detach(), loss.detach()

    return step


def poptorch_step(task: Task, y: Tensor) -> Step:
    """The same by a call."""
    model = WithLoss(task.net)
    training = poptorch.trainingModel(model, poptorch.Options(), task.optimizer(model.parameters()))
    kept: list[Tensor] = []

    def step() -> None:
        kept[:] = training(task.x, y)

    return step


def measure(make: Callable[[], Task], rounds: int, steps: int) -> tuple[Median, Median, Median]:
    """Seconds of a plain step and of poptorch's, and their ratio."""
    loops: dict[str, Step] = {}
    for name, loop in (("plain", plain_step), ("poptorch", poptorch_step)):
        torch.manual_seed(0)
        task = make()
        loops[name] = loop(task, torch.arange(len(task.x)) % 10)
        seconds(loops[name], steps)
    times = by_turns({name: partial(seconds, step, steps) for name, step in loops.items()}, rounds)
    return median(times["plain"]), median(times["poptorch"]), ratio(times["poptorch"], times["plain"])


def main() -> None:
    """Measure, print a table, and put it into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="how often each loop is timed (100)")
    parser.add_argument("--steps", type=int, default=100, help="steps in a round (100)")
    parser.add_argument(
        "--document", type=Path, help="a Markdown file whose part `poptorch overhead` gets the table"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    few = max(1, options.rounds // 10), max(1, options.steps // 50)
    rows = []
    for name, make, rounds, steps in (
        ("digits CNN, batches of 16", partial(digits, 16), options.rounds, options.steps),
        ("digits CNN, batches of 64", partial(digits, 64), options.rounds, options.steps),
        ("MLP, 25 M parameters", wide, *few),
    ):
        plain, ours, found = measure(make, rounds, steps)
        is_kept = "yes" if found.value <= MOST_RATIO else "NO"
        cells = [f"{it.value * 1e3:.3g} ms" for it in (plain, ours)]
        rows.append([name, str(rounds), *cells, interval(found, 1, ".3f", ""), f"≤ {MOST_RATIO}", is_kept])
    head = ["a step of", "rounds", "plain loop", "trainingModel", "ratio", "limit", "holds"]
    command = shlex.join(["python", *sys.argv])
    text = f"1 replica, 1 thread: `{command}`\n\n{table(head, rows)}"
    print(text)
    if options.document:
        put(options.document, "poptorch overhead", text)


if __name__ == "__main__":
    main()
