"""Which samples share which row in which epoch: computed for any row from its number alone.

A strategy says how many rows hold the lengths (300, 200, 12). Each epoch deals the samples of a length anew to the
places that this length has in all rows. No list of rows is built: the places of each length are numbered over the
packs, and a permutation of the samples of that length, made from seed, epoch and length, says who takes which. So
the rows of an epoch follow from seed, epoch and strategy, and take no memory beyond the samples ordered by length.
"""

import hashlib
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from popdist.data.epoch import Permutation, round_keys
from popdist.errors import DatasetError
from popdist.packing.strategies import PackingStrategy, lengths_of

Numbers = NDArray[np.int64] | NDArray[np.int32]


def order_by_length(lengths: Numbers) -> Numbers:
    """The numbers of all samples, shortest first, equally long ones in their order; int32 where it fits."""
    order = np.argsort(lengths, kind="stable")
    return order.astype(np.int32) if len(order) < 2**31 else order


class PackedRows:
    """The rows of all epochs of one dataset.

    Args:
        lengths: Tokens of each sample, 1 to ``strategy.max_length``.
        strategy: For just these lengths.
        seed: Chooses who shares a row.
        shuffle: Others share a row in each epoch; else the samples of a length take its places in order.

    Attributes:
        ordered: Samples by length; may be replaced by an equal array in other memory.
        num_rows: Of an epoch.
        digest: A number that names lengths and strategy, 60 bits.

    Raises:
        DatasetError: If the strategy was made for other lengths; the message names one of them.
    """

    def __init__(self, lengths: Numbers, strategy: PackingStrategy, *, seed: int, shuffle: bool) -> None:
        counts = np.bincount(lengths, minlength=strategy.max_length + 1)[1:].astype(np.int64)
        _check_same(strategy, counts)
        self.ordered = order_by_length(lengths)
        self.num_rows = strategy.num_packs
        self.digest = _digest(lengths, strategy)
        self._seed, self._shuffle = seed, shuffle
        self._counts = counts
        self._first_of_length = np.concatenate([[0], np.cumsum(counts)])
        self._packs = list(strategy.packs)
        self._last_row_of_pack = np.cumsum(list(strategy.packs.values()))
        self._sizes = np.array([len(pack) for pack in self._packs])
        self._first_places = _number_places(strategy)
        self._orders: tuple[int, dict[int, Permutation]] = (-1, {})

    def num_samples(self, step: range, epoch: int) -> int:
        """Samples in the rows at positions ``step`` of the epoch's order."""
        rows = np.arange(step.start, step.stop, dtype=np.int64)
        if self._shuffle:
            rows = Permutation(self.num_rows, seed=self._seed, epoch=epoch).indices(rows)
        return int(self._sizes[self._pack_of(rows)].sum())

    def samples(self, rows: list[int], epoch: int) -> list[list[int]]:
        """The samples of each of ``rows`` (numbers from 0 on), longest first."""
        packs = self._pack_of(np.array(rows, np.int64)).tolist()
        places: dict[int, list[int]] = {}
        owners: dict[int, list[tuple[int, int]]] = {}
        found = [[0] * len(self._packs[pack]) for pack in packs]
        for position, (row, pack) in enumerate(zip(rows, packs, strict=True)):
            copy = row - (int(self._last_row_of_pack[pack - 1]) if pack else 0)
            repeats = Counter(self._packs[pack])
            seen: Counter[int] = Counter()
            for place, length in enumerate(self._packs[pack]):
                number = self._first_places[pack][length] + copy * repeats[length] + seen[length]
                seen[length] += 1
                places.setdefault(length, []).append(number)
                owners.setdefault(length, []).append((position, place))
        for length, numbers in places.items():
            samples = self._samples_at(length, np.array(numbers, np.int64), epoch)
            for (position, place), sample in zip(owners[length], samples.tolist(), strict=True):
                found[position][place] = sample
        return found

    def _pack_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._last_row_of_pack, rows, side="right")

    def _samples_at(self, length: int, places: NDArray[np.int64], epoch: int) -> Numbers:
        """The samples that take the ``places`` of ``length`` in this epoch."""
        if self._shuffle:
            places = self._order_of(length, epoch).indices(places)
        found: Numbers = self.ordered[self._first_of_length[length - 1] + places]
        return found

    def _order_of(self, length: int, epoch: int) -> Permutation:
        if self._orders[0] != epoch:
            self._orders = (epoch, {})
        orders = self._orders[1]
        if length not in orders:
            seed = round_keys(self._seed, length)[0]
            orders[length] = Permutation(int(self._counts[length - 1]), seed=seed, epoch=epoch)
        return orders[length]


def _number_places(strategy: PackingStrategy) -> list[dict[int, int]]:
    """For each pack, the number of its first place of each length among all places of that length."""
    used: Counter[int] = Counter()
    first_places = []
    for pack, count in strategy.packs.items():
        repeats = Counter(pack)
        first_places.append({length: used[length] for length in repeats})
        used.update({length: repeat * count for length, repeat in repeats.items()})
    return first_places


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
