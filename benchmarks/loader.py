"""What data loading costs: against torch's DataLoader with the same workers, and at the start of an epoch.

    python benchmarks/loader.py --rounds 9

Every round reads one epoch with each loader in turn, and the order is turned round from round to round, so that a
slow moment of the machine meets both. Times differ from machine to machine; the ratios of one run are what can be
compared. The last line is all of it in JSON.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import popdist

MICRO_BATCH_SIZE = 64
HUGE = 10**9


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


def seconds_of(read: Callable[[], Iterable[object]]) -> float:
    """How long an epoch takes, from its start to its end."""
    start = time.perf_counter()
    for _ in read():
        pass
    return time.perf_counter() - start


def compare(dataset: Dataset[Any], num_workers: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds of torch's loader and ours, and median and quartiles of the ratio in each round."""
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loaders: list[Iterable[object]] = [
        DataLoader(dataset, MICRO_BATCH_SIZE, shuffle=True, **options),
        popdist.data_loader(dataset, MICRO_BATCH_SIZE, shuffle=True, **options),
    ]
    for loader in loaders:
        seconds_of(lambda loader=loader: loader)  # type: ignore[misc] # a lambda's default has no annotation
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            loader = loaders[which]
            times[which].append(seconds_of(lambda loader=loader: loader))  # type: ignore[misc] # as above
    ratios = [theirs / ours for theirs, ours in zip(*times, strict=True)]
    lower, median, upper = statistics.quantiles(ratios * 2 if rounds == 1 else ratios, n=4, method="inclusive")
    return {
        "torch_seconds": statistics.median(times[0]),
        "popdist_seconds": statistics.median(times[1]),
        "throughput_ratio": median,
        "throughput_ratio_lower_quartile": lower,
        "throughput_ratio_upper_quartile": upper,
    }


def start_seconds(length: int, rounds: int) -> float:
    """From the start of a shuffled epoch to its first indices."""
    sampler = popdist.ReplicaSampler(length, MICRO_BATCH_SIZE, shuffle=True)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        next(iter(sampler))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def distributed_start_seconds(length: int) -> float:
    """The same of torch's DistributedSampler, once: it makes a list of all indices."""
    sampler: DistributedSampler[int] = DistributedSampler(range(length), num_replicas=1, rank=0)  # type: ignore[arg-type] # all it asks for is a length
    start = time.perf_counter()
    next(iter(sampler))
    return time.perf_counter() - start


def main() -> None:
    """Measure, then print a table, the command that made it, and everything in JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each loader reads an epoch (9)")
    parser.add_argument("--size", type=int, default=4096, help="images in an epoch (4096)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of workers (0 2)")
    parser.add_argument("--list-length", type=int, default=10**7, help="for DistributedSampler (10000000)")
    arguments = parser.parse_args()

    found: dict[str, Any] = {"loaders": []}
    print(f"{'an epoch':20} {'workers':>7} {'torch':>9} {'popdist':>9}   throughput against torch's (quartiles)")
    for name, dataset in datasets(arguments.size).items():
        for num_workers in arguments.workers:
            row = compare(dataset, num_workers, arguments.rounds)
            found["loaders"].append({"dataset": name, "num_workers": num_workers, **row})
            both = f"{row['torch_seconds']:7.3f} s {row['popdist_seconds']:7.3f} s"
            lower, upper = row["throughput_ratio_lower_quartile"], row["throughput_ratio_upper_quartile"]
            print(f"{name:20} {num_workers:7} {both}   {row['throughput_ratio']:.3f} ({lower:.3f} to {upper:.3f})")
    ours, theirs = start_seconds(HUGE, arguments.rounds), distributed_start_seconds(arguments.list_length)
    found["epoch_start_seconds"] = {
        "popdist": {HUGE: ours},
        "DistributedSampler": {arguments.list_length: theirs},
    }
    print(
        f"\nan epoch of {HUGE:,} samples starts in {ours * 1000:,.2f} ms; DistributedSampler takes "
        f"{theirs * 1000:,.2f} ms for {arguments.list_length:,}, {theirs / ours:,.0f} times as long"
    )
    print(f"{arguments.rounds} rounds; again: {shlex.join(['python', *sys.argv])}\n{json.dumps(found)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
