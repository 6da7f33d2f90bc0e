"""Which samples share which row in which epoch: computed for any row from its number alone.

A strategy says how many rows hold the lengths (300, 200, 12). Each epoch deals the samples of a length anew to the
places that this length has in all rows. No list of rows is built: the places of each length are numbered over the
packs, and a permutation of the samples of that length, made from seed, epoch and length, says who takes which. So
the rows of an epoch follow from seed, epoch and strategy, and take no memory beyond the samples ordered by length.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from popdist.data.epoch import Permutation, round_keys
from popdist.errors import DatasetError
from popdist.packing.strategies import PackingStrategy, lengths_of

Numbers = NDArray[np.int64] | NDArray[np.int32]


def order_by_length(lengths: Numbers) -> Numbers:
    """The indices of all samples by length, shortest first; int32 where it suffices."""
    order = np.argsort(lengths, kind="stable")
    return order.astype(np.int32) if len(order) < 2**31 else order


class PackedRows:
    """The rows of all epochs of one dataset."""

    def __init__(self, lengths: Numbers, strategy: PackingStrategy, *, seed: int, shuffle: bool) -> None:
        """Put samples of these lengths into rows; ``strategy`` must be for just these lengths."""
        counts = np.bincount(lengths, minlength=strategy.max_length + 1)[1:].astype(np.int64)
        _check_same(strategy, counts)
        self.ordered = order_by_length(lengths)
        self.num_rows = strategy.num_packs
        self.digest = _digest(lengths, strategy)
        self._seed, self._shuffle = seed, shuffle
        self._counts = counts
        self._first_of_length = np.concatenate([[0], np.cumsum(counts)])
        counts_of_packs = np.array(list(strategy.packs.values()), np.int64)
        self._last_row_of_pack: NDArray[np.int64] = np.cumsum(counts_of_packs)
        self._first_row_of_pack = self._last_row_of_pack - counts_of_packs
        self._sizes = np.array([len(pack) for pack in strategy.packs])
        self._places = _number_places(strategy)
        self._orders: tuple[int, dict[int, Permutation]] = (-1, {})

    def num_samples(self, step: range, epoch: int) -> int:
        """Samples in the rows at positions ``step`` of the epoch's order."""
        rows = np.arange(step.start, step.stop, dtype=np.int64)
        if self._shuffle:
            rows = Permutation(self.num_rows, seed=self._seed, epoch=epoch).indices(rows)
        return int(self._sizes[self._pack_of(rows)].sum())

    def samples(self, rows: Sequence[int] | range, epoch: int) -> list[list[int]]:
        """The samples of each of ``rows`` (numbers from 0 on), longest first."""
        numbers = np.array(rows, np.int64)
        packs = self._pack_of(numbers)
        copies = numbers - self._first_row_of_pack[packs]
        sizes = self._sizes[packs]
        ends = np.cumsum(sizes)
        first = np.repeat((np.cumsum(self._sizes) - self._sizes)[packs] - (ends - sizes), sizes)
        place = first + np.arange(len(first))
        lengths: NDArray[np.int64] = self._places.lengths[place]
        taken = self._places.first[place] + np.repeat(copies, sizes) * self._places.repeats[place]
        found: list[int] = self._samples_at(lengths, taken.astype(np.int64), epoch).tolist()
        return [found[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def _pack_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._last_row_of_pack, rows, side="right")

    def _samples_at(self, lengths: NDArray[np.int64], places: NDArray[np.int64], epoch: int) -> Numbers:
        """The samples at these places of these lengths in this epoch."""
        if self._shuffle:
            by_length = np.argsort(lengths, kind="stable")
            borders = np.flatnonzero(np.diff(lengths[by_length])) + 1
            for same in np.split(by_length, borders):
                places[same] = self._order_of(int(lengths[same[0]]), epoch).indices(places[same])
        found: Numbers = self.ordered[self._first_of_length[lengths - 1] + places]
        return found

    def _order_of(self, length: int, epoch: int) -> Permutation:
        if self._orders[0] != epoch:
            self._orders = (epoch, {})
        orders = self._orders[1]
        if length not in orders:
            seed = round_keys(self._seed, length)[0]
            orders[length] = Permutation(int(self._counts[length - 1]), seed=seed, epoch=epoch)
        return orders[length]


class _Places(NamedTuple):
    """The places for sequences in all packs, pack after pack."""

    lengths: NDArray[np.int64]  # tokens of the sequence that stands there
    first: NDArray[np.int64]  # number of the place in the first row of its pack, among all places of its length
    repeats: NDArray[np.int64]  # places of its length in its pack, by which that number grows from row to row


def _number_places(strategy: PackingStrategy) -> _Places:
    used: Counter[int] = Counter()
    rows: list[tuple[int, int, int]] = []
    for pack, count in strategy.packs.items():
        repeats = Counter(pack)
        seen: Counter[int] = Counter()
        for length in pack:
            rows.append((length, used[length] + seen[length], repeats[length]))
            seen[length] += 1
        used.update({length: repeat * count for length, repeat in repeats.items()})
    return _Places(*np.array(rows, np.int64).reshape(-1, 3).T)


def _check_same(strategy: PackingStrategy, counts: NDArray[np.int64]) -> None:
    packed = strategy.histogram()
    if len(counts) == len(packed) and (counts == packed).all():
        return
    size = max(len(counts), len(packed))
    differing = np.pad(counts, (0, size - len(counts))) - np.pad(packed, (0, size - len(packed)))
    length = lengths_of(np.abs(differing))[0]
    found, expected = (int(row[length - 1]) if length <= len(row) else 0 for row in (counts, packed))
    raise DatasetError(
        f"the strategy packs {expected} sequences of length {length}, and the dataset has {found}: make the "
        "strategy from the lengths of this dataset, or give its name ('lpfhp') and let the loader make it"
    )


def _digest(lengths: Numbers, strategy: PackingStrategy) -> int:
    words = hashlib.sha256(np.ascontiguousarray(lengths, np.int64).tobytes())
    words.update(strategy.digest().encode())
    return int(words.hexdigest()[:15], 16)
