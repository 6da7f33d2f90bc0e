"""What data loading costs: against torch's DataLoader with the same workers, and at the start of an epoch.

    python benchmarks/loader.py

Every round reads one epoch with each loader in turn, and the order is turned round from round to round, so that a
slow moment of the machine slows both. Times differ from machine to machine; the ratios of one run are what can
be compared. Without workers, each round also reads and collates the samples in a plain loop, in the order of the
dataset: the machine's own limit for whatever reads them one by one.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring.documents import put, table
from measuring.limits import duration_name
from measuring.medians import Median, median, ratio
from measuring.turns import by_turns, seconds
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

import popdist

MICRO_BATCH_SIZE = 64
HUGE = 10**9

TORCH, OURS, ALONE = "torch", "popdist", "reading alone"
LEAST_THROUGHPUT = 0.97
"""So much of torch's throughput popdist's loader is to have at least."""


class Lookup(Dataset[tuple[Tensor, int]]):
    """The cheapest class of one's own: a row and its label."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images in memory, 3 x 64 x 64 bytes each: cropped, flipped and scaled as for training, by chance or not."""

    def __init__(self, length: int, *, is_random: bool) -> None:
        self.length = length
        self.is_random = is_random
        self.images = torch.randint(0, 256, (256, 3, 64, 64), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left, flip = torch.randint(0, 8, (3,)).tolist() if self.is_random else (4, 4, 0)
        image = self.images[index % 256, :, top : top + 56, left : left + 56].float().div(255)
        image = image.flip(-1) if flip % 2 else image
        return torch.nn.functional.interpolate(image[None], size=64, mode="bilinear")[0], index % 10


def datasets(size: int) -> dict[str, Dataset[Any]]:
    """What is read, from the cheapest samples to those of an image model."""
    return {
        "TensorDataset": TensorDataset(torch.randn(8 * size, 32), torch.arange(8 * size)),
        "rows of a tensor": Lookup(8 * size),
        "images, resized": Pictures(size, is_random=False),
        "images, augmented": Pictures(size, is_random=True),
    }


class Alone:
    """The samples of an epoch, read and collated in a plain loop: what no loader does without."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[object]:
        for first in range(0, len(self.dataset), MICRO_BATCH_SIZE):
            stop = min(first + MICRO_BATCH_SIZE, len(self.dataset))
            yield default_collate([self.dataset[index] for index in range(first, stop)])


def read(loader: Iterable[object]) -> None:
    """An epoch, from its start to its end."""
    for _ in loader:
        pass


def measure(dataset: Dataset[Any], num_workers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch with each loader in each round."""
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loaders: dict[str, Iterable[object]] = {
        TORCH: DataLoader(dataset, MICRO_BATCH_SIZE, shuffle=True, **options),
        OURS: popdist.data_loader(dataset, MICRO_BATCH_SIZE, shuffle=True, **options),
    }
    if num_workers == 0:
        loaders[ALONE] = Alone(dataset)
    epochs = {name: partial(seconds, partial(read, loader)) for name, loader in loaders.items()}
    for epoch in epochs.values():
        epoch()
    return by_turns(epochs, rounds)


def row_of(name: str, num_workers: int, times: Mapping[str, Sequence[float]]) -> list[str]:
    """What the table says of one dataset."""
    throughput = ratio(times[TORCH], times[OURS])
    return [
        name,
        f"{num_workers}",
        *(duration_name(median(times[loader]).value) for loader in (TORCH, OURS)),
        interval(throughput),
        f"≥ {LEAST_THROUGHPUT:g}",
        "yes" if throughput.value >= LEAST_THROUGHPUT else "NO",
        interval(ratio(times[OURS], times[ALONE])) if ALONE in times else "",
    ]


def interval(found: Median) -> str:
    """A median and between what it lies."""
    return f"{found.value:.3g} ({found.lower:.3g} to {found.upper:.3g})"


def start_seconds(length: int, rounds: int) -> float:
    """From the start of a shuffled epoch to its first indices."""
    sampler = popdist.ReplicaSampler(length, MICRO_BATCH_SIZE, shuffle=True)
    times = [seconds(lambda: next(iter(sampler))) for _ in range(rounds + 1)]
    return statistics.median(times[1:])


def distributed_start_seconds(length: int) -> float:
    """The same of torch's DistributedSampler, once: it makes a list of all indices."""
    sampler: DistributedSampler[int] = DistributedSampler(range(length), num_replicas=1, rank=0)  # type: ignore[arg-type] # all it asks for is a length
    return seconds(lambda: next(iter(sampler)))


def main() -> None:
    """Measure, then print a table with the command that made it, or put it into a document, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each loader reads an epoch (9)")
    parser.add_argument("--size", type=int, default=4096, help="images in an epoch (4096)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of workers (0 2)")
    parser.add_argument("--list-length", type=int, default=10**7, help="for DistributedSampler (10000000)")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `loader` gets the table")
    options = parser.parse_args()

    rows = [
        row_of(name, num_workers, measure(dataset, num_workers, options.rounds))
        for name, dataset in datasets(options.size).items()
        for num_workers in options.workers
    ]
    head = [
        "an epoch",
        "workers",
        TORCH,
        OURS,
        "of torch's throughput",
        "limit",
        "holds",
        "times of reading alone",
    ]
    ours, theirs = start_seconds(HUGE, options.rounds), distributed_start_seconds(options.list_length)
    text = (
        f"{options.rounds} rounds, medians: `{shlex.join(['python', *sys.argv])}`\n\n{table(head, rows)}\n\n"
        f"An epoch of {HUGE:,} samples starts in {duration_name(ours)}; DistributedSampler takes "
        f"{duration_name(theirs)} for {options.list_length:,}, {theirs / ours:,.0f} times as long."
    )
    print(text)
    if options.document:
        put(options.document, "loader", text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
