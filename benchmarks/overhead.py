"""How much longer a training step takes with ReplicatedModel than without, for one instance.

    python benchmarks/overhead.py --rounds 200

First with one replica, then with two and four: the bare loop then accumulates as many micro batches in a step.

Every round times both loops for some steps, in turn and the other way round in the next one, so that a slow moment
of the machine slows both. What counts is the median over the rounds of the difference and of the ratio within a
round. A round of 100 steps has one of those in which the checks are made that cost time.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from measuring.documents import put, table
from measuring.medians import Median, median, ratio
from measuring.turns import by_turns, seconds
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
    """What was measured of one model: medians over the rounds."""

    num_rounds: int
    bare_seconds: Median
    replicated_seconds: Median
    added_seconds: Median
    ratio: Median


SMALL = ("digits CNN, batches of 16", "digits CNN, batches of 64")
MOST_ADDED_SECONDS = 90e-6
"""So much may be added to a step of those that are small."""

SECOND, FURTHER = "the second replica", "each further replica"
MOST_OF_A_REPLICA_SECONDS = {SECOND: 450e-6, FURTHER: 250e-6}
"""And so much more by the other replicas of an instance."""


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


def bare_step(task: Task, y: Tensor, num_replicas: int) -> Step:
    """As torch's own tutorials write it; the samples of several replicas are accumulated."""
    net, optimizer = task.net, task.optimizer(task.net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(num_replicas):
            cross_entropy(net(task.x), y).backward()
        optimizer.step()

    return step


def replicated_step(task: Task, y: Tensor, num_replicas: int) -> Step:
    """The same with the model replicated."""
    model = popdist.ReplicatedModel(task.net, num_local_replicas=num_replicas)
    optimizer = task.optimizer(model.parameters())
    batch = torch.cat([task.x] * num_replicas), y.repeat(num_replicas)

    def step() -> None:
        for x, labels in model.micro_batches(batch):
            cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def measure(make: Callable[[], Task], rounds: int, steps: int) -> Figures:
    """Seconds of a step of each kind, and what a replicated one adds."""
    times = timed(make, [1], rounds, steps)
    bare, replicated = times["bare", 1], times["replicated", 1]
    return Figures(
        num_rounds=rounds,
        bare_seconds=median(bare),
        replicated_seconds=median(replicated),
        added_seconds=median([more - less for less, more in zip(bare, replicated, strict=True)]),
        ratio=ratio(replicated, bare),
    )


def timed(
    make: Callable[[], Task], numbers: Iterable[int], rounds: int, steps: int
) -> Mapping[tuple[str, int], list[float]]:
    """Seconds of a step in each round, by kind of step and number of replicas."""
    loops: dict[tuple[str, int], Step] = {}
    for number in numbers:
        for name, loop in (("bare", bare_step), ("replicated", replicated_step)):
            torch.manual_seed(0)
            task = make()
            loops[name, number] = loop(task, torch.arange(len(task.x)) % 10, number)
            seconds(loops[name, number], steps)
    return by_turns({key: partial(seconds, step, steps) for key, step in loops.items()}, rounds)


def measure_replicas(rounds: int, steps: int) -> dict[str, Median]:
    """What the second replica of an instance adds to a small step, and each further one."""
    times = timed(partial(digits, 16), [1, 2, 4], rounds, steps)
    added = {}
    for number in (1, 2, 4):
        pairs = zip(times["bare", number], times["replicated", number], strict=True)
        added[number] = [more - less for less, more in pairs]
    return {
        SECOND: median([two - one for one, two in zip(added[1], added[2], strict=True)]),
        FURTHER: median([(four - two) / 2 for two, four in zip(added[2], added[4], strict=True)]),
    }


def described_replicas(found: Mapping[str, Median]) -> str:
    """The table of replicas."""
    rows = []
    for name, added in found.items():
        most = MOST_OF_A_REPLICA_SECONDS[name]
        is_kept = "yes" if added.value <= most else "NO"
        rows.append([name, interval(added, 1e6, ".0f", " µs"), f"≤ {most * 1e6:g} µs", is_kept])
    return table([SMALL[0], "added", "limit", "holds"], rows)


def described(found: Mapping[str, Figures], command: str) -> str:
    """Everything in words and a table."""
    rows = []
    for name, figures in found.items():
        limit = ["", ""]
        if name in SMALL:
            is_kept = figures.added_seconds.value <= MOST_ADDED_SECONDS
            limit = [f"≤ {MOST_ADDED_SECONDS * 1e6:g} µs", "yes" if is_kept else "NO"]
        cells = [f"{it.value * 1e3:.3g} ms" for it in (figures.bare_seconds, figures.replicated_seconds)]
        cells += [
            interval(figures.added_seconds, 1e6, ".1f", " µs"),
            *limit,
            interval(figures.ratio, 1, ".3f", ""),
        ]
        rows.append([name, str(figures.num_rounds), *cells])
    head = ["a step of", "rounds", "bare", "ReplicatedModel", "added", "limit", "holds", "ratio"]
    return f"1 instance, {torch.get_num_threads()} thread: `{command}`\n\n{table(head, rows)}"


def interval(found: Median, factor: float, form: str, unit: str) -> str:
    """A median and between what it lies."""
    value, lower, upper = (f"{it * factor:{form}}" for it in (found.value, found.lower, found.upper))
    return f"{value}{unit} ({lower} to {upper})"


def main() -> None:
    """Measure, print a table, and write the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="how often each loop is timed (200)")
    parser.add_argument("--steps", type=int, default=100, help="steps in a round (100)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; more need idle cores (1)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `overhead` gets the table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    popdist.init()

    found = {
        name: measure(partial(digits, size), options.rounds, options.steps)
        for name, size in zip(SMALL, (16, 64), strict=True)
    }
    rounds, steps = max(1, options.rounds // 10), max(1, options.steps // 50)
    found["MLP, 25 M parameters"] = measure(wide, rounds, steps)
    command = shlex.join(["python", *sys.argv])
    replicas = measure_replicas(max(1, options.rounds // 4), options.steps)
    text = f"{described(found, command)}\n\n{described_replicas(replicas)}"
    print(text)
    if options.json:
        models = {name: asdict(figures) for name, figures in found.items()}
        written = json.dumps({"command": command, "num_threads": options.threads, "models": models}, indent=2)
        options.json.write_text(f"{written}\n", encoding="utf-8")
    if options.document:
        put(options.document, "overhead", text)


if __name__ == "__main__":
    main()
