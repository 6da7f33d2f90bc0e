"""Streams (datasets without a length): every instance reads all items and keeps the items of its replicas.

A stream has no index, so each process reads the whole stream and skips the items of other instances. All instances
see the end of the stream, so that an epoch ends on all instances at the same step. But a stream may be cut off on
one instance. So before each step the instances tell each other whether they still have samples.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from popdist.data.batch import Share
from popdist.data.randomness import Reseed, isolated
from popdist.data.replica_loader import Collation, Fetched, ReplicaLoader
from popdist.errors import DatasetError
from popdist.ground.torch_private import hide_worker_info
from popdist.job import context


class ShardedIterable(IterableDataset[Any]):
    """The items of a stream that belong to this instance's replicas; :func:`shard_iterable` makes it."""

    def __init__(self, stream: Iterable[Any]) -> None:
        self.stream = stream
        self.num_replicas, self.replicas = context.num_replicas(), context.local_replicas()
        self._worker = 0, 1

    def __iter__(self) -> Iterator[Any]:
        """Yield this instance's items in their order; each worker of a DataLoader yields its part of the items."""
        number, num_workers = self.worker()
        for index, item in enumerate(self.stream):
            turn, replica = divmod(index, self.num_replicas)
            own = turn * len(self.replicas) + replica - self.replicas.start
            if replica in self.replicas and own % num_workers == number:
                yield item

    def worker(self) -> tuple[int, int]:
        """Return this DataLoader worker's number and the number of workers. Also make torch's
        ``get_worker_info()`` return None here, so that the stream's own code does not divide its items again.
        """
        if (info := get_worker_info()) is not None:
            self._worker = info.id, info.num_workers
            hide_worker_info()
        return self._worker


def shard_iterable(stream: Iterable[Any]) -> ShardedIterable:
    """Deal the items of a stream to the replicas of the job: item i to replica i mod ``num_replicas()``.

    Pass the result to ``popdist.data_loader``, which deals whole steps to its workers and ends the epoch of all
    instances together. By itself the result is a torch IterableDataset of this instance's items. Every process
    (each worker of each instance) reads the whole stream and skips the items of other processes, so expensive work
    belongs in ``collate_fn`` and not in the stream.

    Args:
        stream: An iterable that can be read again for each epoch. It must give the same items in the same order on
            every instance; random numbers that it draws from Python's, numpy's and torch's own generators are the
            same. It must not be divided already, neither by node nor by worker. If it has a method ``set_epoch``,
            this method is called before each epoch.

    Raises:
        DatasetError: If ``stream`` cannot be iterated over.
        ContractError: If the environment variables announce a job and do not describe the job.
    """
    if not hasattr(stream, "__iter__"):
        raise DatasetError(f"shard_iterable takes what can be iterated over, and was given {stream!r}")
    return ShardedIterable(stream)


class StreamFetcher(IterableDataset[Any]):
    """The IterableDataset for a DataLoader of a stream: it yields the steps of one DataLoader worker."""

    def __init__(
        self, sharded: ShardedIterable, collation: Collation, samples_per_replica: int, *, drop_last: bool
    ) -> None:
        self.dataset = sharded
        self._collation = collation
        self._step_size = samples_per_replica * sharded.num_replicas
        self.drop_last = drop_last
        self._place = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()

    def begin(self, epoch: int, position: int) -> None:
        """Write the next epoch and its start position into memory that the DataLoader workers share."""
        self._place.copy_(torch.tensor([epoch, position], dtype=torch.int64, device="cpu"))

    def __iter__(self) -> Iterator[Fetched]:
        """Read the whole stream; yield this instance's micro batches of each step that belongs to this worker."""
        epoch, first = self._place.tolist()
        number, num_workers = self.dataset.worker()
        if hasattr(self.dataset.stream, "set_epoch"):
            self.dataset.stream.set_epoch(epoch)
        items = iter(self.dataset.stream)
        for start in range(0, first, self._step_size):
            self._read(items, range(start, min(start + self._step_size, first)), epoch)
        step, start = 0, first
        while read := self._read(items, range(start, start + self._step_size), epoch):
            if self.drop_last and len(read) < self._step_size:
                return
            if step % num_workers == number:
                yield self._make(
                    read,
                    Share(
                        epoch=epoch,
                        step=step,
                        stop=start + len(read),
                        num_samples_job=len(read),
                        indices=self._keep(range(start, start + len(read))),
                    ),
                )
            step, start = step + 1, start + len(read)

    def _keep(self, numbers: range) -> list[int]:
        """Return the item numbers in ``numbers`` that belong to this instance's replicas, replica by replica."""
        num_replicas = self.dataset.num_replicas
        return [number for replica in self.dataset.replicas for number in numbers[replica::num_replicas]]

    def _read(self, items: Iterator[Any], numbers: range, epoch: int) -> list[Any]:
        """Read one stream item for each number in ``numbers``; return fewer items if the stream ends."""
        seeds = self._collation.seeds(epoch, list(numbers))

        def read(reseed: Reseed) -> list[Any]:
            found = []
            for seed in seeds:
                reseed(seed)
                try:
                    found.append(next(items))
                except StopIteration:
                    break
            return found

        return isolated(read)

    def _make(self, read: list[Any], share: Share) -> Fetched:
        start = share.stop - len(read)

        def collate(indices: list[int], reseed: Reseed) -> Any:
            samples = [read[number - start] for number in indices]
            return self._collation.collate(samples, share.epoch, indices[0], reseed)

        def make(reseed: Reseed) -> list[Any]:
            return [collate(indices, reseed) if indices else None for indices in self._collation.split(share)]

        return share, isolated(make)


class StreamLoader(ReplicaLoader):
    """A loader of a stream; before each step the instances agree whether any of them still has samples."""

    dataset: StreamFetcher

    def _begin(self) -> None:
        self.dataset.begin(self._position.epoch, self._position.num_read)

    def _fetched(self) -> Iterator[Fetched]:
        return self._agreed(super()._fetched())

    def _agreed(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        """Yield steps until all instances' streams end; steps without samples if this instance's ends earlier."""
        epoch = self._position.epoch
        for step in itertools.count():
            share, contents = next(fetched, (None, []))
            own = [] if share is None else [self._num_samples(share, contents), share.stop]
            text = f"data_loader over a stream, epoch {epoch}, step {step}"
            headers = context.data_parallel_group().start(text, own).wait()
            if not any(headers) or (self.dataset.drop_last and not all(headers)):
                return
            nonempty = [numbers for numbers in headers if numbers]
            stop, total = max(end for _, end in nonempty), sum(size for size, _ in nonempty)
            if share is None:
                share = Share(epoch=epoch, step=step, stop=stop, num_samples_job=total, indices=[])
                contents = [None] * (len(self._replicas) * self._accumulation)
            kept = [contents]
            del contents
            yield share._replace(num_samples_job=total, stop=stop), kept.pop()

    def _num_samples(self, share: Share, _contents: list[Any]) -> int:
        """Return the number of samples that this instance has in the step ``share``."""
        return len(share.indices)
