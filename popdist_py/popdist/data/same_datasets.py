"""Checksums that show whether all instances read the same dataset: of subset indices and of first samples."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from popdist.job.weights import bytes_of

_NUM_SAMPLES: Final = 16
_MOST_BYTES: Final = 2**15
_MOST_TENSORS: Final = 4
"""The first 16 samples of at most 4 tensors are compared, and at most 32 KiB of each tensor."""


def checksum_of_subsets(dataset: object) -> int:
    """Return a 64-bit checksum of the indices of each ``Subset`` in ``dataset``; 0 if there is no ``Subset``."""
    subsets = [it for it in _datasets_in(dataset, set()) if isinstance(it, Subset)]
    digest = hashlib.blake2b(digest_size=8)
    for subset in subsets:
        indices = np.asarray(subset.indices)
        digest.update(indices.astype("<i8").tobytes() if indices.dtype.kind in "iu" else repr(indices).encode())
    return int.from_bytes(digest.digest(), "little", signed=True) if subsets else 0


def checksum_of_contents(dataset: object) -> int:
    """Return a 64-bit checksum of the first samples that ``dataset`` has in memory; 0 if there are none.

    The samples in memory are tensors and arrays: the dataset itself, the first item of a list, and the attributes
    of a dataset. If an attribute is a list or tuple, its items count. No sample is read by the dataset's own code.
    """
    heads = list(islice(_heads(dataset), _MOST_TENSORS))
    digest = hashlib.blake2b(b"".join(heads), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) if heads else 0


def _heads(dataset: object) -> Iterator[bytes]:
    if isinstance(dataset, list):
        yield from _heads_of(dataset[0] if dataset else None)
    yield from _heads_of(dataset)
    for part in _datasets_in(dataset, set()):
        for value in vars(part).values():
            yield from _heads_of(value)


def _heads_of(value: object) -> Iterator[bytes]:
    for item in islice(value, _MOST_TENSORS) if isinstance(value, list | tuple) else [value]:
        if isinstance(item, np.ndarray) and item.dtype.kind in "iufcb" and item.ndim and item.size:
            yield item[:_NUM_SAMPLES].tobytes()[:_MOST_BYTES]
        elif isinstance(item, torch.Tensor) and _has_numbers(item):
            yield bytes_of(item[:_NUM_SAMPLES])[:_MOST_BYTES]


def _has_numbers(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim() and tensor.numel()) and tensor.layout == torch.strided and not tensor.is_meta


def _datasets_in(dataset: object, seen: set[int]) -> Iterator[Dataset[Any]]:
    """Yield ``dataset``, if it is a torch Dataset, and each torch Dataset in its attributes."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    if isinstance(dataset, Dataset):
        yield dataset
    for value in getattr(dataset, "__dict__", {}).values():
        parts = list(value.values()) if isinstance(value, dict) else value
        are_datasets = isinstance(parts, list | tuple) and parts and isinstance(parts[0], Dataset)
        for part in parts if are_datasets else [value]:
            if isinstance(part, Dataset):
                yield from _datasets_in(part, seen)
