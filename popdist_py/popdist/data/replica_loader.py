"""The loader that yields batches: samples are read, collated to micro batches, and passed to the loop.

Samples are read and collated in the loader's process or in a worker. The loader counts the batches that the loop
has received, however far the workers have read ahead.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from popdist.data.batch import Batch, Share
from popdist.data.epoch import EpochPosition, EpochReader
from popdist.data.outliving import LoaderStart
from popdist.data.randomness import Reseed, SampleRandomness, draws_nothing, sample_seeds
from popdist.errors import BatchError, PopdistWarning
from popdist.gradients.optimizer_steps import training_loop
from popdist.job import context

SMALL_BYTES: Final = 2**18
"""The largest tensor, in bytes, that is sent as a copy; for larger tensors torch's shared memory is faster."""

Collate = Callable[[list[Any]], Any]
Fetched = tuple[Share, list[Any]]
"""A share, and the content of each micro batch of the share; None for a micro batch without samples."""

_FOR_COLLATE: Final = 1
"""The number that makes the seeds of collate functions differ from the seeds of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collation:
    """The settings by which the samples of a step become micro batches of the ``num_replicas`` local replicas."""

    collate_fn: Collate
    num_replicas: int
    accumulation: int
    seed: int

    def split(self, share: Share) -> list[list[int]]:
        """Return the sample indices of each micro batch of ``share``, this instance's part of a step."""
        return share.split(self.num_replicas, self.accumulation)

    def seeds(self, epoch: int, indices: list[int]) -> list[int]:
        """Return, for each sample in ``indices``, the seed of the random numbers that the dataset draws for it."""
        return sample_seeds(indices, seed=self.seed, epoch=epoch)

    def collate(self, samples: list[Any], epoch: int, first: int, reseed: Reseed | None) -> Any:
        """Collate one micro batch; its random numbers follow from ``first``, the index of the first sample."""
        if reseed is not None and self.collate_fn is not default_collate:
            reseed(sample_seeds([first], seed=self.seed, epoch=epoch, what=_FOR_COLLATE)[0])
        content = _collated(samples) if self.collate_fn is default_collate else self.collate_fn(samples)
        if content is None:
            name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__name__)
            raise BatchError(
                f"collate_fn {name} returned None for {len(samples)} samples: it must return the micro batch"
            )
        return content


def _collated(samples: Any) -> Any:
    """Collate ``samples`` as ``default_collate`` does, but faster, and without shared memory for small tensors."""
    first = samples[0]
    if type(first) is Tensor:
        is_plain = first.layout is torch.strided and not first.is_nested
        is_small = is_plain and first.nbytes * len(samples) <= SMALL_BYTES
        return torch.stack(samples) if is_small else default_collate(samples)
    try:
        if type(first) in (tuple, list):
            return [_collated(column) for column in zip(*samples, strict=True)]
        if type(first) is dict:
            return {key: _collated([sample[key] for sample in samples]) for key in first}
    except (KeyError, TypeError, ValueError):  # default_collate raises an error that says what is wrong
        pass
    return default_collate(samples)


class MapFetcher(Dataset[Any]):
    """The dataset that torch's DataLoader reads. An index is a ``Share``, this instance's sample indices of one
    step; the item at this index has the collated micro batches of the step.
    """

    def __init__(self, dataset: Any, collation: Collation) -> None:
        self.dataset = dataset
        self._collation = collation
        is_plain = collation.collate_fn is default_collate
        self._randomness = None if is_plain and draws_nothing(dataset) else SampleRandomness()
        self._are_rows = is_plain and type(dataset) is TensorDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, share: Share) -> Fetched:
        """Return ``share``, this instance's sample indices of a step, and its collated micro batches."""
        if self._are_rows:
            return share, [self._rows(indices) if indices else None for indices in self._collation.split(share)]
        if self._randomness is None:
            return share, self._contents(share, None)
        return share, self._randomness.run(lambda reseed: self._contents(share, reseed))

    def _rows(self, indices: list[int]) -> list[Any]:
        """Return the samples at ``indices`` from each tensor of a TensorDataset, as if collated one by one."""
        rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
        return [tensor[rows.to(tensor.device)] for tensor in self.dataset.tensors]

    def _contents(self, share: Share, reseed: Reseed | None) -> list[Any]:
        split = seeded = self._collation.split(share)
        if share.positions is not None:
            seeded = self._collation.split(share._replace(indices=list(share.positions)))
        return [
            self._collation.collate(
                self._read(indices, numbers, share.epoch, reseed), share.epoch, numbers[0], reseed
            )
            if indices
            else None
            for indices, numbers in zip(split, seeded, strict=True)
        ]

    def _read(self, indices: list[int], numbers: list[int], epoch: int, reseed: Reseed | None) -> list[Any]:
        """Return the samples at ``indices``; ``numbers`` has the number that seeds each sample's random draws."""
        dataset = self.dataset
        read_all = getattr(dataset, "__getitems__", None)
        if reseed is None:
            return [dataset[index] for index in indices] if read_all is None else list(read_all(indices))
        seeds = self._collation.seeds(epoch, numbers)
        if read_all is not None and not isinstance(dataset, Subset):
            reseed(seeds[0])  # one seed for all samples, because one call reads all of the samples
            return list(read_all(indices))
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            reseed(seed)
            samples.append(dataset[index])
        return samples


class SentContents:
    """The micro batches that a DataLoader worker sends: small tensors as bytes, large tensors in shared memory."""

    def __init__(self, contents: list[Any]) -> None:
        stream = io.BytesIO()  # pickled now, because the sending thread could only print an error
        _Pickler(stream).dump(contents)
        self._pickled = stream.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


class _Pickler(ForkingPickler):
    """A pickler that copies the bytes of small tensors, and leaves all other objects to torch."""

    def reducer_override(self, value: object) -> Any:
        """Return a function and arguments that make a small tensor again; NotImplemented for any other value."""
        if type(value) is not Tensor or not _is_copied(value):
            return NotImplemented
        content = bytearray(value.view(-1).view(torch.uint8).numpy())
        return _tensor_of, (content, value.dtype, *value.shape)


def _is_copied(tensor: Tensor) -> bool:
    """Whether ``tensor`` is small, dense and plain, so that its bytes, dtype and shape make a copy."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and 0 < tensor.nbytes <= SMALL_BYTES
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor_of(content: bytearray, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return the bytes ``content`` as a tensor in torch's own memory: other alignment changes the rounding."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(content, dtype=torch.uint8))
    return tensor


class ReplicaLoader(EpochReader, DataLoader[Batch]):
    """A torch DataLoader whose batches are :class:`Batch` objects; ``popdist.data_loader`` makes the loader."""

    def __init__(
        self,
        fetcher: Dataset[Any],
        position: EpochPosition,
        accumulation: int,
        options: Mapping[str, Any],
    ) -> None:
        self._replicas = context.local_replicas()
        self._accumulation = accumulation
        self._position = position
        own = {"generator": torch.Generator().manual_seed(position.identity["seed"])}
        collate_fn = _to_the_loop if options.get("num_workers") else _as_it_is
        self._start = LoaderStart(options.get("worker_init_fn"))
        if options.get("num_workers"):
            options = {**options, "worker_init_fn": self._start}
        super().__init__(fetcher, batch_size=None, collate_fn=collate_fn, **(own | dict(options)))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override] # torch promises an iterator class of its own
        """Iterate over the next epoch, or over the rest of the epoch whose state was loaded."""
        _warn_if_limited()
        number = self._position.start()
        if self.num_workers:
            self._start.prepare(training_loop.leaving_signals, self.multiprocessing_context)
        self._begin()
        return self._received(self._fetched(), number)

    def _fetched(self) -> Iterator[Fetched]:
        """Return an iterator over each step's sample indices and its collated micro batches."""
        iterator: Iterator[Any] = super().__iter__()  # also checks options, and draws from a given generator
        is_direct = self.num_workers == 0 and not self.pin_memory and isinstance(self.dataset, MapFetcher)
        return map(self.dataset.__getitem__, self.sampler) if is_direct else iterator  # type: ignore[arg-type] # torch's annotation says that items are batches

    def _begin(self) -> None:
        """Prepare the next epoch before its first sample is read; only subclasses do something here."""

    def _received(self, fetched: Iterator[Fetched], number: int) -> Iterator[Batch]:
        """Yield each batch and record it as read; keep no reference, so that the batch's memory can be reused."""
        with training_loop.read_loader() as ask:
            for share, contents in fetched:
                self._position.read_to(share.stop, number)
                batches = [self._batch(share, contents)]
                del contents
                yield batches.pop()
                ask()
        self._position.end_epoch(number)

    def _batch(self, share: Share, contents: list[Any]) -> Batch:
        """Make the batch that the loop receives for ``share`` and its ``contents``."""
        return Batch.of(share, contents, self._replicas, self._accumulation)


def _warn_if_limited() -> None:
    """Warn if only some instances read the loader, because no instance then reads the samples of the others."""
    number = context.environment().contract.layout.num_instances
    if context.is_initialized() and len((group := context.data_parallel_group()).instances) < number:
        warnings.warn(
            "a loader of popdist.data_loader is read in execute_on_instances, by a part of the instances only, "
            f"and has a share of the samples for each {group.backend.names.noun} of the {number}: evaluate on all "
            "and join what they find by popdist.weighted_mean or popdist.gather, or read a DataLoader of torch's "
            "there",
            PopdistWarning,
            stacklevel=3,
        )


def _as_it_is(fetched: Any) -> Any:
    """Return ``fetched`` unchanged: the ``collate_fn`` of a loader without workers, which collates itself."""
    return fetched


def _to_the_loop(fetched: Any) -> tuple[Share, SentContents]:
    """Return what a worker process sends to the program's loop: this instance's share of a step (the indices of
    its samples), and the pickled samples.
    """
    share, contents = fetched
    return share, SentContents(contents)
