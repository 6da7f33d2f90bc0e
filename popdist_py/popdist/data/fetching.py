"""How the samples of a step are read and become its micro batches, in the loader's process or in a worker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from popdist.data.batch import Share
from popdist.data.sample_randomness import Randomness, Reseed, draws_nothing, sample_seeds
from popdist.data.sending import SMALL_BYTES
from popdist.errors import BatchError

Collate = Callable[[list[Any]], Any]
Fetched = tuple[Share, list[Any]]
"""A share, and the content of each of its micro batches; None for one without samples."""

_FOR_COLLATE: Final = 1
"""Tells the random numbers of a collate function from those of its first sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collation:
    """How the samples of a step become micro batches.

    Attributes:
        collate_fn: Makes a micro batch of a list of samples.
        num_replicas: Local replicas.
        accumulation: Micro batches of each.
        seed: With epoch and index it fixes what the samples' augmentation draws.
    """

    collate_fn: Collate
    num_replicas: int
    accumulation: int
    seed: int

    def split(self, share: Share) -> list[list[int]]:
        """The indices of each micro batch of ``share``."""
        return share.split(self.num_replicas, self.accumulation)

    def seeds(self, epoch: int, indices: list[int]) -> list[int]:
        """The seeds of the random numbers of each sample."""
        return sample_seeds(indices, seed=self.seed, epoch=epoch)

    def collate(self, samples: list[Any], epoch: int, first: int, reseed: Reseed | None) -> Any:  # noqa: ANN401 - whatever the collate function makes
        """One micro batch of ``samples``; what is drawn for it follows from ``first``, as for its first sample.

        Raises:
            BatchError: If the collate function returns None.
        """
        if reseed is not None and self.collate_fn is not default_collate:
            reseed(sample_seeds([first], seed=self.seed, epoch=epoch, what=_FOR_COLLATE)[0])
        content = _collated(samples) if self.collate_fn is default_collate else self.collate_fn(samples)
        if content is None:
            name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__name__)
            raise BatchError(
                f"collate_fn {name} returned None for {len(samples)} samples: it must return the micro batch"
            )
        return content


def _collated(samples: list[Any]) -> Any:  # noqa: ANN401 - as torch's
    """What torch's ``default_collate`` makes of ``samples``, in less time where they are tuples, as most are."""
    kinds = dict(default_collate_fn_map)
    if kinds.get(Tensor) is collate_tensor_fn:
        kinds[Tensor] = _stacked
    if type(samples[0]) is not tuple or any(issubclass(tuple, kind) for kind in kinds):
        return collate(samples, collate_fn_map=kinds)
    try:
        columns = list(zip(*samples, strict=True))
    except (TypeError, ValueError):  # torch says what is wrong
        return default_collate(samples)
    return [collate(column, collate_fn_map=kinds) for column in columns]


def _stacked(samples: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:  # noqa: ANN401 - torch's
    """What torch makes of tensors; a worker does not put small ones into shared memory, since it sends a copy."""
    first = samples[0]
    if first.layout is torch.strided and not first.is_nested and first.nbytes * len(samples) <= SMALL_BYTES:
        return torch.stack(samples)
    made: Tensor = collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    return made


class MapFetcher(Dataset[Any]):
    """A map-style dataset as DataLoader sees it: indexed by shares, it gives their micro batches.

    Args:
        dataset: Has a length, and a sample for each index; or ``__getitems__`` for a list of them.
        collation: Makes the micro batches.
    """

    def __init__(self, dataset: Any, collation: Collation) -> None:  # noqa: ANN401 - anything with a length and items
        self.dataset = dataset
        self._collation = collation
        is_plain = collation.collate_fn is default_collate
        self._randomness = None if is_plain and draws_nothing(dataset) else Randomness()
        self._are_rows = is_plain and type(dataset) is TensorDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, share: Share) -> Fetched:
        """The micro batches of ``share``."""
        if self._are_rows:
            return share, [self._rows(indices) if indices else None for indices in self._collation.split(share)]
        if self._randomness is None:
            return share, self._contents(share, None)
        return share, self._randomness.run(lambda reseed: self._contents(share, reseed))

    def _rows(self, indices: list[int]) -> list[Any]:
        """The rows at ``indices``, taken at once: what collating them one by one would give."""
        rows = torch.tensor(indices, dtype=torch.int64)
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
        """The samples, whose random numbers follow from ``numbers``.

        A dataset that reads a list of them at once draws for all as for the first one.
        """
        dataset = self.dataset
        read_all = getattr(dataset, "__getitems__", None)
        if reseed is None:
            return [dataset[index] for index in indices] if read_all is None else list(read_all(indices))
        seeds = self._collation.seeds(epoch, numbers)
        if read_all is not None and not isinstance(dataset, Subset):
            reseed(seeds[0])
            return list(read_all(indices))
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            reseed(seed)
            samples.append(dataset[index])
        return samples
