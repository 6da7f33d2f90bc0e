"""The training data of this instance's replicas: rows of batches, dealt as another library deals to processes."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from popdist.data.randomness import ReplicaRandomness
from popdist.errors import BatchError
from popdist.job import context
from popdist.step.checks.python_state import generator_states
from popdist.trainers.replica_steps import ReplicaSteps

T = TypeVar("T")

Collate = Callable[[list[Any]], Any]


class Row(list[T]):
    """One batch of each replica of this instance, in the order of the replicas."""


class RowSampler(Sampler[list[list[int]]]):
    """A sampler that yields, for each step, one list of sample indices for each replica of this instance.

    Args:
        batch_sampler: Yields the batches of the whole job, lists of indices.
        shards: For each replica of this instance, makes from such a sampler the sampler of the replica's batches.
        scopes: Begins an epoch when the first batch of the epoch is read.
    """

    def __init__(self, batch_sampler: Any, shards: list[Callable[[Any], Any]], scopes: "ReplicaScopes") -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = scopes.num_replicas  # as accelerate names it
        self.sampler = getattr(batch_sampler, "sampler", None)  # accelerate tells it the epoch
        self._shards = shards
        self._scopes = scopes
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        """Return the number of batches of one replica."""
        return len(self._shards[0](self.batch_sampler))

    def __iter__(self) -> Iterator[list[list[int]]]:
        self._scopes.begin_epoch()
        same = tee(iter(self.batch_sampler), len(self._shards))
        dealt = [shard(_Batches(self.batch_sampler, it)) for shard, it in zip(self._shards, same, strict=True)]
        for row in zip(*dealt, strict=True):
            yield list(row)


class _Batches:
    """The batches that one replica's sampler reads; local replicas share one pass over ``batch_sampler``."""

    def __init__(self, batch_sampler: Any, batches: Iterator[Any]) -> None:
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        """Yield a copy of each batch of indices, because accelerate's samplers extend the last batch in place."""
        return map(list, self._batches)


def no_steps() -> None:
    """Return None, as the callback of an object that was copied to a DataLoader worker, which has no model."""


class ReplicaScopes:
    """The random states with which each local replica reads samples, in this process or in a DataLoader worker.

    In a worker, a replica's random states begin as in the worker of a process whose rank is the replica's number:
    ``worker_init_fn`` may be a ``partial`` with the keyword ``rank``.
    """

    def __init__(self, steps: Callable[[], ReplicaSteps | None], worker_init_fn: Any = None) -> None:
        self.replicas, self.num_replicas = context.local_replicas(), context.num_replicas()
        self._steps = steps
        self.worker_init_fn = worker_init_fn
        self._of_worker: dict[int, ReplicaRandomness] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": no_steps}

    def begin_epoch(self) -> None:
        """Begin an epoch of the model's steps, if this process has a model."""
        if get_worker_info() is None and (steps := self._steps()) is not None:
            steps.begin_epoch()

    def of(self, replica: int, row: int | None = None) -> AbstractContextManager[None]:
        """Return the context in which the replica ``replica`` draws random numbers.

        Args:
            replica: The job-wide number of a local replica.
            row: If the samples of a row are read: the number of the row in an epoch that is read from its first
                row, as a stream is; 0 if the rows before it are left out.
        """
        worker = get_worker_info()
        if worker is None and (steps := self._steps()) is not None:
            return steps.scope_of(replica) if row is None else steps.scope_of_read(replica, row)
        if not self._of_worker:
            self._of_worker.update({it: self._begin(it, worker) for it in self.replicas})
        return self._of_worker[replica].of(replica, torch.device("cpu"))

    def _begin(self, replica: int, worker: Any) -> ReplicaRandomness:
        init = self.worker_init_fn
        if worker is not None and isinstance(init, partial) and "rank" in init.keywords:
            random.seed(worker.seed)
            torch.manual_seed(worker.seed)
            partial(init, rank=replica)(worker.id)
        randomness = ReplicaRandomness(0, range(replica, replica + 1))
        randomness.begin_as_program(torch.device("cpu"))
        return randomness


class DealtRows(Sampler[list[list[int]]]):
    """A sampler that yields, for each step, a list of sample indices from the batch sampler of each replica.

    Attributes:
        first: The number of rows that the next pass leaves out at its beginning.
    """

    def __init__(self, batch_samplers: dict[int, Any], scopes: ReplicaScopes) -> None:
        self.batch_samplers = batch_samplers
        self.first = 0
        self._scopes = scopes

    @property
    def sampler(self) -> "DealtRows":
        """The DealtRows itself, because Lightning calls ``set_epoch`` of a batch sampler's ``sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers of all replicas the number of the epoch."""
        for batch_sampler in self.batch_samplers.values():
            batch_sampler.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of one replica in a whole pass."""
        return min(map(len, self.batch_samplers.values()))

    def __iter__(self) -> Iterator[list[list[int]]]:
        dealt = [self._as_replica(replica, batches) for replica, batches in self.batch_samplers.items()]
        return map(list, islice(zip(*dealt, strict=True), self.first, None))

    def _as_replica(self, replica: int, batches: Any) -> Iterator[list[int]]:
        """Yield the batches of ``replica``, each drawn with the random state of the replica."""
        passed: Any = None
        while True:
            with self._scopes.of(replica):
                passed = iter(batches) if passed is None else passed
                batch = next(passed, None)
            if batch is None:
                return
            yield batch


@dataclass
class RowDataset(Dataset[Any]):
    """A dataset that returns a batch for each replica of this instance, given one list of indices per replica."""

    dataset: Any
    collate_fn: Collate
    scopes: ReplicaScopes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, row: Iterable[list[int]]) -> list[Any]:
        """Return the batches of ``row``, a list of sample indices for each local replica; torch calls this."""
        batches = []
        for replica, indices in zip(self.scopes.replicas, row, strict=True):
            with self.scopes.of(replica, 0):
                batches.append(read_alike(partial(self._read, indices), self.dataset, self.collate_fn))
        return batches

    def _read(self, indices: list[int]) -> Any:
        return self.collate_fn(samples_of(self.dataset, indices))


def samples_of(dataset: Any, indices: list[int]) -> list[Any]:
    """Return the samples of ``dataset`` with the numbers ``indices``, read at once if the dataset can do this."""
    many = getattr(dataset, "__getitems__", None)
    return list(many(indices)) if many else [dataset[index] for index in indices]


def read_alike(read: Callable[[], T], *owners: object) -> T:
    """Return ``read()``, a batch that is read by ``owners``, such as a dataset.

    Raises:
        BatchError: If this instance has several replicas, and an owner has drawn from a random generator of its
            own, which the replicas would share.
    """
    if context.num_local_replicas() == 1:
        return read()
    before = generator_states(*owners)
    batch = read()
    for name, state in generator_states(*owners).items():
        if before.get(name) != state:
            raise BatchError(
                f"{name} is a random generator of the program's own, and the {context.num_local_replicas()} "
                "replicas of this instance would share the generator. Draw from the global generators of torch, "
                "numpy or Python, which each replica has for itself; give a collator no seed"
            )
    return batch


def options_of(loader: Any) -> dict[str, Any]:
    """Return the options that a loader for replicas takes over from the DataLoader ``loader``: options of workers,
    memory and generator, but not the dataset and the options that make batches.
    """
    kept = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    return {name: getattr(loader, name) for name in (*kept, "prefetch_factor", "persistent_workers")}


def row_options(loader: Any, scopes: ReplicaScopes, batch_sampler: Any) -> dict[str, Any]:
    """Return the options of a DataLoader whose items are rows of ``loader``, by the rows of ``batch_sampler``."""
    dataset = RowDataset(loader.dataset, loader.collate_fn, scopes)
    return {**options_of(loader), "dataset": dataset, "batch_sampler": batch_sampler, "collate_fn": Row}


@dataclass
class RowStream(IterableDataset[Any]):
    """The local replicas' batches of an IterableDataset: in each step, replica r gets the batch number r."""

    dataset: Any
    batch_size: int
    drop_last: bool
    collate_fn: Collate
    scopes: ReplicaScopes

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset the number of the epoch, if the dataset has the method ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield for each step a row with one batch for each local replica."""
        self.scopes.begin_epoch()
        for number, batches in enumerate(self.samples_of_steps()):
            row = Row[Any]()
            for replica in self.scopes.replicas:
                with self.scopes.of(replica, number):
                    row.append(read_alike(partial(self.collate_fn, batches[replica]), self.collate_fn))
            yield row

    def samples_of_steps(self) -> Iterator[list[list[Any]]]:
        """Yield for each step the samples of all replicas. Without ``drop_last``, the first samples fill up an
        incomplete last step.
        """
        size, samples = self.batch_size * self.scopes.num_replicas, iter(self.dataset)
        first: list[Any] = []
        while step := list(islice(samples, size)):
            first = first or step
            if len(step) < size and self.drop_last:
                return
            while len(step) < size:
                step = (step + first)[:size]
            yield [step[start : start + self.batch_size] for start in range(0, size, self.batch_size)]
