"""`DataLoader`: torch's, of combined batches, with each process's part of the samples and their order."""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from popdist.errors import whole_number
from poptorch.custom_types import PARSERS, ICustomArgParser, parser_of, picklable_parsers
from poptorch.data.read_ahead import AsynchronousDataAccessor
from poptorch.enums import DataLoaderMode
from poptorch.errors import Error
from poptorch.options import Options, check_options
from poptorch.options.combined_batch import count_parts
from poptorch.options.option_values import at_least_one, one_of

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
        """This process's positions in the order of ``epoch``; every second epoch drops other samples."""
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
        digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=_SEED_BYTES).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        order = torch.randperm(self.num_samples, generator=generator, device="cpu")
        chosen: list[int] = order[positions.start : positions.stop].tolist()
        return chosen


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
        batches = iter(self.batches)
        while joined := list(islice(batches, self.num_joined)):
            if len(joined) == self.num_joined or not self.drop_last:
                yield list(chain(*joined))

    def __len__(self) -> int:
        num_batches = len(self.batches)  # type: ignore[arg-type]  # samplers of batches mostly have one
        return num_batches // self.num_joined if self.drop_last else -(-num_batches // self.num_joined)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Yields combined batches: what one call of a model takes on this process.

    A combined batch holds ``batch_size`` samples for each device iteration, local replica (in groups of input, for
    each group) and step of gradient accumulation. With several processes each reads its part of the dataset. The
    processes exchange nothing. The options are frozen.

    Args:
        options: Say the size of the combined batch and the process.
        dataset: Of either kind that torch knows.
        batch_size: Samples of a micro batch; None for a dataset whose items are combined batches.
        shuffle: Read in another order each epoch.
        num_workers: Processes that read.
        drop_last: Leave out what makes no full combined batch.
        persistent_workers: Keep them from epoch to epoch; None for True where there are any.
        auto_distributed_partitioning: Whether to read this process's part only.
        mode: Sync reads when it is asked; Async reads ahead in a worker; AsyncRebatched does so, and joins what
            workers have read in part.
        async_options: Arguments of :class:`AsynchronousDataAccessor`.
        rebatched_worker_size: With AsyncRebatched, samples that a worker reads at once; None for a combined batch.
        batch_sampler: Gives the indices of micro batches, of which combined ones are joined.
        **kwargs: Arguments of torch's DataLoader.

    Raises:
        Error: If arguments exclude each other, or a process would have no batch.
        AssertionError: If ``batch_size`` is no number from 1, ``mode`` no ``DataLoaderMode``, shuffled data are
            divided without ``options.randomSeed``, or an iterable dataset is to be divided.
    """

    def __init__(
        self,
        options: Options,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Sampler[list[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._accessor: AsynchronousDataAccessor | None = None
        self._reader: DataLoader | None = None
        if batch_size is not None:
            at_least_one("batch_size", batch_size)
        _check_kinds(dataset, mode, async_options)
        check_options("poptorch.DataLoader", options)._freeze()  # noqa: SLF001 - using options freezes them
        self._options = options
        self._factor = count_parts(options)
        self._combined_batch_size = None if batch_size is None else batch_size * self._factor
        is_ragged = mode is DataLoaderMode.Async and isinstance(dataset, IterableDataset) and not drop_last
        joins = batch_sampler is None and (mode is DataLoaderMode.AsyncRebatched or is_ragged)
        self._rebatched_size = self._combined_batch_size if joins else None
        self._check_worker_size(mode, rebatched_worker_size)
        is_divided = auto_distributed_partitioning and options.Distributed.numProcesses > 1
        arguments = {
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0 if persistent_workers is None else persistent_workers,
            **kwargs,
        }
        if batch_size is not None or batch_sampler is not None:
            arguments.setdefault("collate_fn", _Collate())
        if batch_sampler is not None:
            _check_batch_sampler(batch_size, shuffle=shuffle, is_divided=is_divided)
            arguments["batch_sampler"] = JoinedBatchSampler(batch_sampler, self._factor, drop_last=drop_last)
            size = getattr(batch_sampler, "batch_size", None)
            self._combined_batch_size = size * self._factor if isinstance(size, int) else None
        else:
            arguments["batch_size"] = rebatched_worker_size or self._combined_batch_size
            if batch_size is not None:
                arguments["drop_last"] = drop_last and mode is not DataLoaderMode.AsyncRebatched
            if is_divided:
                arguments["sampler"] = self._divide(dataset, kwargs, shuffle=bool(shuffle), drop_last=drop_last)
            elif shuffle is not None:
                arguments["shuffle"] = shuffle
        self._drops_last = drop_last
        super().__init__(dataset, **arguments)
        if mode is not DataLoaderMode.Sync:
            joining = {"rebatched_size": self._rebatched_size, "drop_last": drop_last}
            self._accessor = AsynchronousDataAccessor(self, **(joining | (async_options or {})))

    def _check_worker_size(self, mode: DataLoaderMode, worker_size: int | None) -> None:
        if worker_size is None:
            return
        if mode is not DataLoaderMode.AsyncRebatched:
            raise Error(f"rebatched_worker_size is for DataLoaderMode.AsyncRebatched, and the mode is {mode.name}")
        if self._rebatched_size is None:
            raise Error("rebatched_worker_size is for batches of batch_size samples, without a batch_sampler")
        whole_number("rebatched_worker_size", worker_size, Error, maximum=self._rebatched_size)

    def _divide(
        self, dataset: Dataset[Any], kwargs: dict[str, Any], *, shuffle: bool, drop_last: bool
    ) -> PartitionSampler:
        """A sampler of this process's part of ``dataset``."""
        if isinstance(dataset, IterableDataset):
            raise AssertionError(
                "auto_distributed_partitioning cannot divide an iterable dataset among "
                f"{self._options.Distributed.numProcesses} processes: divide it in the dataset, and say "
                "auto_distributed_partitioning=False"
            )
        if kwargs.get("sampler") is not None:
            raise Error(
                "sampler= and auto_distributed_partitioning=True both choose the samples of this process: say "
                "auto_distributed_partitioning=False"
            )
        if shuffle and not self._options.exists("random_seed"):
            raise AssertionError(
                "auto_distributed_partitioning with shuffle=True needs options.randomSeed(seed), the same seed in "
                "every process"
            )
        return PartitionSampler(
            Partition(
                num_samples=len(dataset),  # type: ignore[arg-type]  # map-style datasets have one
                batch_size=self._combined_batch_size or 1,
                process_id=self._options.Distributed.processId,
                num_processes=self._options.Distributed.numProcesses,
                drop_last=drop_last,
                seed=self._options.random_seed if shuffle else None,
            )
        )

    @property
    def combinedBatchSize(self) -> int | None:
        """Samples of a combined batch; None where the dataset's items are such batches."""
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options that it was made with."""
        return self._options

    def terminate(self) -> None:
        """End the workers."""
        if self._accessor is not None:
            self._accessor.terminate()
        self._reader = None

    def __len__(self) -> int:
        size = self._rebatched_size
        if size is None:
            return super().__len__()
        source: Any = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        return len(source) // size if self._drops_last else -(-len(source) // size)

    def __iter__(self) -> Any:
        if self._accessor is not None:
            return iter(self._accessor)
        if not self.persistent_workers:
            return super().__iter__()
        if self._reader is None:
            self._reader = copy.copy(self)  # torch ends workers that persist with the loader that started them
        return torch.utils.data.DataLoader.__iter__(self._reader)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: a copy reads when it is asked."""
        return {**self.__dict__, "_accessor": None, "_reader": None}


def _check_kinds(dataset: object, mode: object, async_options: object) -> None:
    one_of("mode", mode, DataLoaderMode)
    if not isinstance(async_options, dict | None):
        raise Error(f"async_options must be a dict, as {{'buffer_size': 3}}, and is {async_options!r}")
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        raise Error(f"poptorch.DataLoader takes a dataset, and was given {dataset!r}")


def _check_batch_sampler(batch_size: int | None, *, shuffle: bool | None, is_divided: bool) -> None:
    if batch_size not in (1, None) or shuffle:
        raise Error("batch_sampler excludes batch_size and shuffle: it gives the indices of each micro batch")
    if is_divided:
        raise Error(
            "batch_sampler excludes auto_distributed_partitioning with several processes: have it give this "
            "process's batches, and say auto_distributed_partitioning=False"
        )


class _Collate:
    """One batch of samples, as torch makes it, with objects of registered types; a copy has these types, too."""

    def __call__(self, samples: list[Any]) -> Any:
        first = samples[0]
        parser = parser_of(type(first))
        if parser is not None:
            tensors = map(torch.stack, zip(*map(parser.yieldTensors, samples), strict=True))
            return parser.reconstruct(first, tensors)
        if not PARSERS or not isinstance(first, Mapping | tuple | list):
            return default_collate(samples)
        if isinstance(first, Mapping):
            return {key: self([sample[key] for sample in samples]) for key in first}
        parts = [self(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _collate_with, (picklable_parsers(),)


def _collate_with(parsers: dict[type, ICustomArgParser]) -> _Collate:
    PARSERS.update(parsers)
    return _Collate()
