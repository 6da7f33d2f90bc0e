"""How much longer a training step takes with ReplicatedModel than without, for one instance with one replica.

    python benchmarks/overhead.py --rounds 40

Every round times both loops for some steps, in turn and the other way round in the next one, so that a slow moment
of the machine meets both. What counts is the median over the rounds of the ratio within a round.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained.

    Attributes:
        net: The model.
        x: A batch.
        optimizer: Makes the optimizer of a model's parameters.
    """

    net: nn.Module
    x: Tensor
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of one model; durations are medians over the rounds."""

    bare_seconds: float
    replicated_seconds: float
    ratio: float
    ratio_quartiles: tuple[float, float]


def digits(batch_size: int) -> Task:
    """The network and the optimizer of examples/train_digits.py."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(32 * 4 * 4),
        nn.Linear(32 * 4 * 4, 10),
    )
    return Task(net=net, x=torch.randn(batch_size, 1, 8, 8), optimizer=partial(torch.optim.Adam, lr=2e-3))


def wide() -> Task:
    """A multilayer perceptron of 25 million parameters."""
    net = nn.Sequential(
        nn.Linear(1024, 3072),
        nn.ReLU(),
        nn.Linear(3072, 3072),
        nn.ReLU(),
        nn.Linear(3072, 4096),
        nn.Linear(4096, 10),
    )
    return Task(net=net, x=torch.randn(64, 1024), optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))


def bare_step(task: Task, y: Tensor) -> Step:
    """As torch's own tutorials write it."""
    net, x, optimizer = task.net, task.x, task.optimizer(task.net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def replicated_step(task: Task, y: Tensor) -> Step:
    """The same with the model replicated."""
    model = popdist.ReplicatedModel(task.net)
    optimizer = task.optimizer(model.parameters())

    def step() -> None:
        for x, labels in model.micro_batches((task.x, y)):
            cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def measure(make: Callable[[], Task], rounds: int, steps: int) -> Figures:
    """Seconds of a step of each kind, and the ratio of a replicated to a bare one."""
    loops: dict[str, Step] = {}
    for name, loop in (("bare", bare_step), ("replicated", replicated_step)):
        torch.manual_seed(0)
        task = make()
        loops[name] = loop(task, torch.arange(len(task.x)) % 10)
        seconds(loops[name], steps)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in sorted(loops, reverse=bool(number % 2)):
            times[name].append(seconds(loops[name], steps))
    ratios = [replicated / bare for bare, replicated in zip(times["bare"], times["replicated"], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return Figures(
        bare_seconds=statistics.median(times["bare"]),
        replicated_seconds=statistics.median(times["replicated"]),
        ratio=statistics.median(ratios),
        ratio_quartiles=(lower, upper),
    )


def seconds(step: Step, steps: int) -> float:
    """Of one of ``steps`` steps."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Measure, print a table, and write everything as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="how often each loop is timed (40)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round (10)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; more need idle cores (1)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    popdist.init()

    found = {
        "digits CNN, batch of 16": measure(partial(digits, 16), options.rounds, options.steps * 5),
        "digits CNN, batch of 64": measure(partial(digits, 64), options.rounds, options.steps * 5),
        "MLP, 25 M parameters": measure(wide, options.rounds, max(1, options.steps // 5)),
    }
    print(f"{'a step, 1 instance x 1 replica':32} {'bare':>10} {'replicated':>12} {'ratio':>7}  (quartiles)")
    for name, figures in found.items():
        bare, replicated = figures.bare_seconds * 1e3, figures.replicated_seconds * 1e3
        lower, upper = figures.ratio_quartiles
        print(f"{name:32} {bare:7.3f} ms {replicated:9.3f} ms {figures.ratio:7.3f}  ({lower:.3f} to {upper:.3f})")
    command = shlex.join(["python", *sys.argv])
    print(f"\n{options.rounds} rounds, {options.threads} threads; again: {command}")
    if options.json:
        models = {name: asdict(figures) for name, figures in found.items()}
        text = json.dumps({"command": command, "num_threads": options.threads, "models": models}, indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
