"""Which samples of a dataset each process reads, and in what order."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.utils.data import Sampler

from poptorch.errors import Error

_SEED_BYTES: Final = 7


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A consecutive part of the dataset, or of a permutation of it, for each process."""

    num_samples: int  # of the whole dataset
    batch_size: int  # samples of a process's combined batch
    process_id: int  # this process
    num_processes: int  # processes that the samples are divided among
    # give each process the same number of full batches; else the first processes get one more sample where they do
    # not divide
    drop_last: bool
    # of the permutations, another one in each epoch and the same on all processes; None for the dataset's order
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.drop_last and self.size == 0:
            raise Error(
                f"{self.num_samples} samples are no full combined batch of {self.batch_size} for each of "
                f"{self.num_processes} processes: give more samples, smaller batches, or drop_last=False"
            )

    @property
    def size(self) -> int:
        """Samples of this process in an epoch."""
        if self.drop_last:
            return self.batch_size * (self.num_samples // (self.batch_size * self.num_processes))
        return self.num_samples // self.num_processes + (self.process_id < self.num_samples % self.num_processes)

    def positions(self, epoch: int) -> range:
        """This process's positions in the order of ``epoch``.

        Where samples are dropped, every second epoch begins later by as many as one process's share leaves over,
        so that other samples are dropped.
        """
        if not self.drop_last:
            share, larger = divmod(self.num_samples, self.num_processes)
            first = self.process_id * share + min(self.process_id, larger)
        else:
            first = self.process_id * self.size + epoch % 2 * (self.num_samples % self.size)
        return range(first, first + self.size)

    def indices(self, epoch: int) -> Sequence[int]:
        """The samples of this process in ``epoch``, in order."""
        positions = self.positions(epoch)
        if self.seed is None:
            return positions
        generator = torch.Generator().manual_seed(_seed_of(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        chosen: list[int] = order[positions.start : positions.stop].tolist()
        return chosen


def _seed_of(seed: int, epoch: int) -> int:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little")


class PartitionSampler(Sampler[int]):
    """Gives the samples of this process; each new iterator is the next epoch."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(self.partition.indices(epoch))

    def __len__(self) -> int:
        return self.partition.size


class JoinedBatchSampler(Sampler[list[int]]):
    """Joins each ``num_joined`` batches of another sampler to a combined one."""

    def __init__(self, batches: Sampler[list[int]], num_joined: int, *, drop_last: bool) -> None:
        self.batches = batches
        self.num_joined = num_joined
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        joined: list[int] = []
        num_batches = 0
        for batch in self.batches:
            joined += batch
            num_batches += 1
            if num_batches == self.num_joined:
                yield joined
                joined, num_batches = [], 0
        if joined and not self.drop_last:
            yield joined

    def __len__(self) -> int:
        num_batches = len(self.batches)  # type: ignore[arg-type]  # samplers of batches mostly have one
        return num_batches // self.num_joined if self.drop_last else -(-num_batches // self.num_joined)
