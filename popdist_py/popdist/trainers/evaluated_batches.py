"""The batches of an evaluation under another library: the same for any number of instances.

Batches are dealt to the instances in turn. An instance may repeat samples to have as many batches as the others.
So a metric counts each sample once only if the repeated samples are left out.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import Dataset

from popdist.data.randomness import remember_states, seed_all
from popdist.job import context
from popdist.trainers.replica_rows import Collate, RowStream, options_of, read_alike, samples_of

T = TypeVar("T")


class WholeRows:
    """The batches of ``batch_sampler``, but not a last row that has fewer than ``width`` batches."""

    def __init__(self, batch_sampler: Any, width: int) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, "sampler", None)  # accelerate tells it the epoch
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = True
        self._width = width

    def __len__(self) -> int:
        return len(self.batch_sampler) // self._width * self._width

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batch_sampler, len(self))


class SeededDataset(Dataset[Any]):
    """A dataset that returns batches of an evaluation: their random numbers follow from their samples' indices.

    An attribute that the class does not have is the attribute of the dataset ``dataset``.
    """

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while this object is copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: Iterable[int]) -> Any:
        """Return the batch of the samples ``indices``; torch calls this."""
        chosen = list(indices)
        return _seeded(chosen, partial(read_alike, partial(self._read, chosen), self.dataset, self._collate_fn))

    def _read(self, indices: list[int]) -> Any:
        return self._collate_fn(samples_of(self.dataset, indices))


class SeededStream(RowStream):
    """An IterableDataset for an evaluation: its batches are dealt to the instances of the job in turn."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this instance; the random numbers of a batch follow from the batch's number."""
        own = slice(context.instance_index(), None, context.num_instances())
        for step, batches in enumerate(self.samples_of_steps()):
            for place, samples in list(enumerate(batches))[own]:
                read = partial(self.collate_fn, samples)
                yield _seeded((step, place), partial(read_alike, read, self.collate_fn))


def _seeded(key: object, read: Callable[[], T]) -> T:
    """Return ``read()``, whose random numbers follow from ``key``; then restore the random states."""
    restore = _seed_for(key)
    try:
        return read()
    finally:
        restore()


def _seed_for(key: object) -> Callable[[], None]:
    """Give the random generators a hash of ``key`` as seed; return a function that restores the states."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    restore = remember_states()
    seed_all(int.from_bytes(digest, "little"))
    return restore


def seeded_turns(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches of this instance; the random numbers in the loop's body follow from the batch's number."""
    number, step = context.instance_index(), context.num_instances()
    for batch in batches:
        restore = _seed_for(("body", number))
        try:
            yield batch
        finally:
            restore()
        number += step


def seeded_options(loader: Any, batch_sampler: Any) -> dict[str, Any]:
    """Return the options of a DataLoader whose items are batches of an evaluation, by ``batch_sampler``."""
    dataset = SeededDataset(loader.dataset, loader.collate_fn)
    return {**options_of(loader), "dataset": dataset, "batch_sampler": batch_sampler, "collate_fn": _as_it_is}


def _as_it_is(batch: Any) -> Any:
    return batch


def repeats_samples(loader: Any) -> bool:
    """Whether an evaluation's loader ``loader`` repeats samples, for this or for another number of instances."""
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not size or not isinstance(loader.dataset, SeededDataset):
        return False
    return bool(len(loader.dataset) % (size * context.num_replicas()))


def num_counted_batches(loader: Any) -> int | None:
    """Return the number of batches in the last turn of the instances without repeated ones; before it None."""
    if not (repeats_samples(loader) and loader.end_of_dataloader and loader.remainder > 0):
        return None
    return -(-int(loader.remainder) // int(loader.batch_sampler.batch_size))
