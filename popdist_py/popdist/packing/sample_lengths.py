"""The length in tokens of each sample of a dataset, and the treatment of samples that are longer than a row.

Lengths come from a sequence of numbers, a column of a dataset of the library ``datasets``, or a function of a
sample. The function is called once for each sample, and its results may be kept in a file.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Subset

from popdist.errors import CollectiveError, DatasetError
from popdist.ground.layout import part
from popdist.job import context
from popdist.job.collectives import fail_together, gather
from popdist.job.instances import first_on_host, is_main

TooLong = Literal["error", "truncate", "drop", "split"]

TOO_LONG: Final = ("error", "truncate", "drop", "split")

LengthSource = Iterable[int] | str | Callable[[Any], int]
"""The source of sample lengths: one number for each sample, the name of a column, or a function of a sample."""

_COUNTING_BATCH: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The sequences that are packed (pieces): whole samples, or parts of samples that were longer than a row."""

    lengths: NDArray[np.int32]  # tokens of each piece, 1 to `max_length`
    whole_lengths: NDArray[np.int64]  # tokens of each sample of the dataset, before samples are cut
    samples: NDArray[np.int64] | None = None  # index of each piece's sample; None if piece i is sample i
    starts: NDArray[np.int64] | None = None  # first token of each piece in its sample; None if all starts are 0

    def place_of(self, piece: int) -> tuple[int, int, int]:
        """Return the sample that contains ``piece``, its first token in the sample, and its number of tokens."""
        sample = piece if self.samples is None else int(self.samples[piece])
        start = 0 if self.starts is None else int(self.starts[piece])
        return sample, start, int(self.lengths[piece])


def cut_to_fit(lengths: NDArray[np.int64], max_length: int, too_long: TooLong) -> Pieces:
    """Drop, cut or split samples longer than a row, as ``too_long`` says. Raise DatasetError if none remains."""
    if not len(lengths):
        raise DatasetError("the dataset has no samples to pack: look at where it is made")
    if lengths.min() < 1:
        sample = int(lengths.argmin())
        raise DatasetError(
            f"sample {sample} has length {lengths[sample]}: a sequence has at least one token; leave empty ones "
            "out"
        )
    long = np.flatnonzero(lengths > max_length)
    if not long.size:
        return Pieces(lengths=lengths.astype(np.int32), whole_lengths=lengths)
    if too_long == "error":
        longest = int(lengths.argmax())
        raise DatasetError(
            f"{len(long)} of {len(lengths)} samples are longer than max_length={max_length}; the longest, sample "
            f"{longest}, has {lengths[longest]} tokens: choose too_long='truncate', 'drop' or 'split', or a "
            "larger max_length"
        )
    if too_long == "truncate":
        return Pieces(lengths=np.minimum(lengths, max_length).astype(np.int32), whole_lengths=lengths)
    if too_long == "drop":
        kept = np.flatnonzero(lengths <= max_length)
        if not kept.size:
            raise DatasetError(f"too_long='drop' leaves no sample: all are longer than max_length={max_length}")
        return Pieces(lengths=lengths[kept].astype(np.int32), whole_lengths=lengths, samples=kept)
    num_pieces = -(-lengths // max_length)
    samples = np.repeat(np.arange(len(lengths)), num_pieces)
    numbers = np.arange(len(samples)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = numbers * max_length
    return Pieces(
        lengths=np.minimum(lengths[samples] - starts, max_length).astype(np.int32),
        whole_lengths=lengths,
        samples=samples,
        starts=starts,
    )


def find_lengths(
    dataset: Any,
    source: LengthSource,
    *,
    num_workers: int,
    cache: str | os.PathLike[str] | None,
) -> NDArray[np.int64]:
    """Return each sample's number of tokens from ``source``: numbers, a column's name, or a counting function."""
    if callable(source):
        lengths = _count_or_load(dataset, source, num_workers, cache)
    elif isinstance(source, str):
        lengths = as_lengths(_column(dataset, source), f"column {source!r}")
    else:
        lengths = as_lengths(source, "lengths")
    if isinstance(dataset, Sized) and len(lengths) != len(dataset):
        raise DatasetError(
            f"there are {len(lengths)} lengths for {len(dataset)} samples: give one for each sample"
        )
    return lengths


def as_lengths(given: Iterable[int], what: str) -> NDArray[np.int64]:
    """Return ``given`` as an array of int64. Raise DatasetError if ``given`` is no list of whole numbers."""
    try:
        numbers = np.asarray(given if hasattr(given, "__array__") else list(given))
    except (TypeError, ValueError):
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise DatasetError(
            f"{what} of type {type(given).__name__} is no row of whole numbers, one for each sample"
        )
    return numbers.astype(np.int64)


def _column(dataset: Any, name: str) -> Iterable[int]:
    names = getattr(dataset, "column_names", None)
    if names is None:
        raise DatasetError(
            f"lengths={name!r}: a {type(dataset).__name__} has no columns; give one number for each sample, or a "
            "function of a sample"
        )
    if name not in names:
        raise DatasetError(f"lengths={name!r}: the dataset's columns are {', '.join(names)}")
    column: Iterable[int] = dataset.with_format("numpy")[name][:]
    return column


class _Counted(Dataset[int]):
    """A dataset whose items are the lengths of the samples of another dataset."""

    def __init__(self, dataset: Any, length_of: Callable[[Any], int]) -> None:
        self.dataset = dataset
        self.length_of = length_of

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        length = self.length_of(self.dataset[index])
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise DatasetError(f"lengths gave {length!r} for sample {index}: expected its number of tokens")
        return int(length)


def _count_or_load(
    dataset: Any,
    length_of: Callable[[Any], int],
    num_workers: int,
    cache: str | os.PathLike[str] | None,
) -> NDArray[np.int64]:
    """Return all samples' lengths, read from the file ``cache`` if it exists; else count, and write the file."""
    if cache is None:
        return _count_parts(_Counted(dataset, length_of), num_workers)
    path = Path(cache)
    if not context.is_initialized():
        return _load(path, len(dataset)) if path.exists() else _save(path, dataset, length_of, num_workers)
    with first_on_host():
        if not path.exists():
            return _save(path, dataset, length_of, num_workers)
    return _load(path, len(dataset))


def _count_parts(counted: _Counted, num_workers: int) -> NDArray[np.int64]:
    """Measure this instance's samples in tokens, exchange the lengths, and return the lengths of all samples."""
    contract = context.environment().contract
    if not context.is_initialized() or contract.layout.num_instances == 1:
        return _count(counted, num_workers)
    own_part = part(range(len(counted)), contract.data_parallel_index, contract.layout.num_instances)
    with fail_together(context.current_group(), "count the lengths of samples", CollectiveError):
        lengths = _count(Subset(counted, own_part), num_workers)
    all_lengths: NDArray[np.int64] = gather(torch.from_numpy(lengths)).numpy()
    return all_lengths


def _save(path: Path, dataset: Any, length_of: Callable[[Any], int], num_workers: int) -> NDArray[np.int64]:
    """Measure all samples in tokens, and write the lengths to ``path``; an interrupted write leaves no file."""
    lengths = _count(_Counted(dataset, length_of), num_workers)
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")  # hosts may write into one folder at the same time
    try:
        with unfinished.open("wb") as file:
            np.save(file, lengths, allow_pickle=False)
        unfinished.replace(path)
    except OSError as error:
        raise DatasetError(f"lengths cannot be kept in {path}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return lengths


def _load(path: Path, num_samples: int) -> NDArray[np.int64]:
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the file of lengths {path} cannot be read: {error}; remove it") from error
    if lengths.shape != (num_samples,) or lengths.dtype != np.int64:
        raise DatasetError(
            f"the file of lengths {path} has shape {lengths.shape} of {lengths.dtype}, and the dataset "
            f"{num_samples} samples: it belongs to another dataset; remove it or name another file"
        )
    found: NDArray[np.int64] = lengths
    return found


def _count(counted: Dataset[int], num_workers: int) -> NDArray[np.int64]:
    """Count the tokens of each sample in DataLoader workers, and show a progress bar on a terminal."""
    loader = DataLoader(counted, batch_size=_COUNTING_BATCH, num_workers=num_workers, collate_fn=list)
    lengths = np.empty(len(loader.dataset), np.int64)  # type: ignore[arg-type] # the dataset has a length
    done = 0
    for numbers in _shown(loader):
        lengths[done : done + len(numbers)] = numbers
        done += len(numbers)
    return lengths


def _shown(loader: "DataLoader[int]") -> Iterator[list[int]]:
    """Yield the batches of ``loader``; show a progress bar if this is the main instance and has a terminal."""
    is_shown = sys.stderr.isatty() and (not context.is_initialized() or is_main())
    if not is_shown:
        yield from loader
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(loader, "lengths of samples", console=Console(stderr=True), transient=True)
