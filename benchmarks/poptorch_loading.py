"""Batches a second when reading and computing take as long as each other: Async against Sync, at least 1.3 times.

python benchmarks/poptorch_loading.py --rounds 5
"""

import argparse
import statistics
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

import poptorch
from poptorch import DataLoaderMode, SharingStrategy

NUM_BATCHES = 20
SIDE = 1200


class Products(Dataset[Tensor]):
    """Each sample is a product of two matrices."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> Tensor:
        return product(index)


def product(seed: int) -> Tensor:
    """What both sides compute."""
    matrix = torch.full((SIDE, SIDE), 1.0 / (SIDE + seed))
    return matrix @ matrix


def seconds(mode: DataLoaderMode) -> float:
    """One epoch, without the start of the process."""
    options = {"sharing_strategy": SharingStrategy.ForkServer} if mode is DataLoaderMode.Async else None
    loader = poptorch.DataLoader(poptorch.Options(), Products(), mode=mode, async_options=options)
    start = time.perf_counter()
    for number, _ in enumerate(loader):
        product(number)
    taken = time.perf_counter() - start
    loader.terminate()
    return taken


def main() -> None:
    """Print the median ratio of both over rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ratios = [seconds(DataLoaderMode.Sync) / seconds(DataLoaderMode.Async) for _ in range(rounds)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"Async reads {middle:.2f} times as many batches a second as Sync (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
