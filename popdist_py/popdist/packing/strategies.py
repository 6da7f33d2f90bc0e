"""Packing strategies: they choose which sequences share a row of the batch, from counts of lengths alone.

A strategy says how often each pack (a set of lengths that fit into one row) is used. The strategy follows from the
histogram of lengths alone. Packing is the cutting-stock problem: rows are stock of ``max_length`` tokens,
sequences are the pieces. The names are taken from Krell, Kosec, Perez and Fitzgibbon
(https://arxiv.org/abs/2107.02027).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from popdist.errors import MOST_TOKENS, DatasetError, whole_number

Pack = tuple[int, ...]
"""A pack: the lengths of the sequences of one row, longest first."""

Histogram = NDArray[np.int64]
"""An array of counts: element i is the number of sequences of length i + 1."""

MAX_COUNT: Final = 2**53
"""The largest number of sequences; above it float64, as in the linear programme, is not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingStrategy:
    """The result of packing: how often each pack (lengths that share a row) is used for all sequences together.

    ``print(strategy)`` shows the strategy as a table.

    Attributes:
        algorithm: Name of the function that made the strategy.
        max_length: Tokens of a row. At least 1.
        max_sequences_per_pack: The largest number of sequences in a row; None for as many as fit.
        packs: How often each pack is used, at least once. Empty for an empty histogram.
        lower_bound: No packing of these sequences under these limits has fewer rows than this number.
    """

    algorithm: str
    max_length: int
    max_sequences_per_pack: int | None
    packs: Mapping[Pack, int] = field(hash=False)
    lower_bound: int

    @property
    def num_packs(self) -> int:
        """The number of packs, which is the number of packed rows."""
        return sum(self.packs.values())

    @property
    def num_sequences(self) -> int:
        """The number of sequences in all packed rows."""
        return sum(len(pack) * count for pack, count in self.packs.items())

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding in all packed rows."""
        return sum(sum(pack) * count for pack, count in self.packs.items())

    @property
    def padding_tokens(self) -> int:
        """The number of padding tokens in all packed rows."""
        return self.num_packs * self.max_length - self.num_tokens

    @property
    def efficiency(self) -> float:
        """The tokens without padding divided by all tokens of the rows, 0 to 1; 1 if there are no rows."""
        return self.num_tokens / (self.num_packs * self.max_length) if self.packs else 1.0

    @property
    def packing_factor(self) -> float:
        """The mean number of sequences in a packed row, at least 1; 1 if there are no rows."""
        return self.num_sequences / self.num_packs if self.packs else 1.0

    @property
    def gap(self) -> float:
        """The number of rows above the lower bound, divided by the lower bound; 0 if the packing is optimal."""
        return (self.num_packs - self.lower_bound) / self.lower_bound if self.packs else 0.0

    def histogram(self) -> Histogram:
        """Return the number of packed sequences of each length: int64 of shape ``[max_length]``."""
        counts = np.zeros(self.max_length, np.int64)
        for pack, count in self.packs.items():
            for length in pack:
                counts[length - 1] += count
        return counts

    def digest(self) -> str:
        """Return a digest of the packs and counts: 32 hexadecimal digits, equal on every machine."""
        words = repr((self.max_length, sorted(self.packs.items())))
        return hashlib.sha256(words.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return table([self])


def table(strategies: Sequence[PackingStrategy]) -> str:
    """Return packing strategies as a text table: a line of headings, then one line for each strategy."""
    cells = [_cells(strategy) for strategy in strategies]
    rows = [list(cells[0]), *(list(row.values()) for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cells(strategy: PackingStrategy) -> dict[str, str]:
    """Return the cells of one strategy's line in the text table; the keys are the headings of the columns."""
    return {
        "strategy": strategy.algorithm,
        "most a pack": str(strategy.max_sequences_per_pack or "any"),
        "packs": f"{strategy.num_packs:,}",
        "efficiency": f"{strategy.efficiency:.3%}",
        "packing factor": f"{strategy.packing_factor:.4f}",
        "padding tokens": f"{strategy.padding_tokens:,}",
        "bound": f"{strategy.lower_bound:,}",
        "gap": f"{strategy.gap:.4%}",
    }


def unpacked(histogram: Iterable[int], max_length: int = 512) -> PackingStrategy:
    """Return the strategy without packing: one row for each sequence, to compare with packing strategies.

    Raises:
        DatasetError: For the same reasons as :func:`spfhp`.
    """
    counts = check_histogram(histogram, max_length)
    packs: dict[Pack, int] = {(length,): int(counts[length - 1]) for length in lengths_of(counts)}
    return make_strategy("none", packs, counts, max_length, 1)


def spfhp(
    histogram: Iterable[int], max_length: int = 512, max_sequences_per_pack: int | None = None
) -> PackingStrategy:
    """Pack by shortest-pack-first: put each sequence, longest first, into the row with the most free tokens.

    If no pack has room for the remaining sequences of a length, each of these sequences opens a pack. Time
    O(lengths x max_length).

    Args:
        histogram: Element i counts the sequences of length i + 1; may be all zeros.
        max_length: Tokens of a row. At least 1.
        max_sequences_per_pack: At least 1; None for as many as fit.

    Raises:
        DatasetError: If a count is negative or no whole number, a sequence is longer than ``max_length``, or a
            limit is below 1. The message names the length.
    """
    return _greedy("spfhp", histogram, max_length, max_sequences_per_pack)


def lpfhp(
    histogram: Iterable[int], max_length: int = 512, max_sequences_per_pack: int | None = None
) -> PackingStrategy:
    """Pack by longest-pack-first: put each sequence, longest first, into the fullest row in which it fits.

    The algorithm is best fit decreasing (D. S. Johnson, 1973), for all sequences of a length at once: a new pack
    takes as many sequences of the length as fit. It needs no scipy and is close to the best if rows have many
    sequences.

    Args:
        histogram: Element i counts the sequences of length i + 1; may be all zeros.
        max_length: Tokens of a row. At least 1.
        max_sequences_per_pack: At least 1; None for as many as fit.

    Raises:
        DatasetError: For the same reasons as :func:`spfhp`.
    """
    return _greedy("lpfhp", histogram, max_length, max_sequences_per_pack)


def _greedy(
    algorithm: str, histogram: Iterable[int], max_length: int, max_sequences_per_pack: int | None
) -> PackingStrategy:
    counts = check_histogram(histogram, max_length)
    limit = check_limit(max_sequences_per_pack)
    packs = greedy_packs(counts, max_length, limit or max_length, most_room_first=algorithm == "spfhp")
    return make_strategy(algorithm, packs, counts, max_length, limit)


class _OpenPacks:
    """The open packs (rows being filled), by their number of free tokens, and the closed packs."""

    def __init__(self, max_length: int, limit: int) -> None:
        self.limit = limit
        self.by_room: list[list[tuple[Pack, int]]] = [[] for _ in range(max_length + 1)]
        self.closed: dict[Pack, int] = {}

    def add(self, pack: Pack, count: int, room: int) -> None:
        """Add ``count`` rows that have sequences of the lengths ``pack``; close them if nothing more fits."""
        if not count:
            return
        if room == 0 or len(pack) == self.limit:
            self.closed[pack] = self.closed.get(pack, 0) + count
        else:
            self.by_room[room].append((pack, count))

    def close(self) -> dict[Pack, int]:
        """Close all packs (rows that are being filled); return how often each combination of lengths is used."""
        for packs in self.by_room:
            for pack, count in packs:
                self.closed[pack] = self.closed.get(pack, 0) + count
        return self.closed


def greedy_packs(
    counts: Histogram, max_length: int, limit: int, *, most_room_first: bool = False
) -> dict[Pack, int]:
    """Pack the sequences of ``counts``, at most ``limit`` a row; return how often each pack of lengths is used.

    Each sequence gets the pack with the least room in which it fits, as in :func:`lpfhp`; with ``most_room_first``
    it gets the pack with the most room, as in :func:`spfhp`.
    """
    packs = _OpenPacks(max_length, limit)
    most = 1 if most_room_first else limit
    for length in reversed(lengths_of(counts)):
        remaining = int(counts[length - 1])
        rooms = range(length, max_length + 1)
        for room in reversed(rooms) if most_room_first else rooms:
            while remaining and packs.by_room[room]:
                pack, count = packs.by_room[room].pop()
                remaining = _fill(packs, pack, count, room, (length, remaining, most))
        _fill(packs, (), remaining, max_length, (length, remaining, most))
    return packs.close()


def _fill(packs: _OpenPacks, pack: Pack, count: int, room: int, pieces: tuple[int, int, int]) -> int:
    """Put as many sequences as possible into ``count`` equal rows (packs); return how many sequences remain.

    ``pieces`` are the length of the sequences, their number, and the largest number that a pack gets at once.
    """
    length, remaining, most = pieces
    most = min(most, room // length, packs.limit - len(pack))
    full = min(count, remaining // most)
    packs.add(pack + (length,) * most, full, room - length * most)
    rest = min(remaining - full * most, most - 1) if count > full else 0
    if rest:
        packs.add(pack + (length,) * rest, 1, room - length * rest)
    if pack:
        packs.add(pack, count - full - bool(rest), room)
    return remaining - full * most - rest


def check_histogram(histogram: Iterable[int], max_length: int) -> Histogram:
    """Return ``histogram`` as int64 of shape ``[max_length]``. Raise DatasetError if ``histogram`` is invalid."""
    whole_number("max_length", max_length, DatasetError, maximum=MOST_TOKENS)
    try:
        given = np.asarray(list(histogram))
    except TypeError:
        given = np.empty((0, 0))
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DatasetError(
            f"a histogram of type {type(histogram).__name__} is no row of whole numbers: element i counts the "
            "sequences of length i + 1"
        )
    if given.size and given.min() < 0:
        length = int(given.argmin()) + 1
        raise DatasetError(
            f"the histogram counts {given.min()} sequences of length {length}: a count is at least 0"
        )
    if given[max_length:].any():
        length = int(np.flatnonzero(given)[-1]) + 1
        raise DatasetError(
            f"{int(given[max_length:].sum())} sequences are longer than max_length={max_length}, the longest has "
            f"{length} tokens: shorten them first, or take a larger max_length"
        )
    counts = np.zeros(max_length, np.int64)
    counts[: min(given.size, max_length)] = given[:max_length]
    if float(counts.sum(dtype=np.float64)) > MAX_COUNT:
        raise DatasetError(
            f"the histogram counts {counts.sum(dtype=np.float64):.3g} sequences: at most 2**53 are packed"
        )
    return counts


def check_limit(max_sequences_per_pack: int | None) -> int | None:
    """Return the largest number of sequences per row; None for no limit. Raise DatasetError if it is below 1."""
    if max_sequences_per_pack is None:
        return None
    return whole_number("max_sequences_per_pack", max_sequences_per_pack, DatasetError)


def lengths_of(counts: Histogram) -> list[int]:
    """Return the lengths that occur in the histogram ``counts``, shortest first."""
    lengths: list[int] = (np.flatnonzero(counts) + 1).tolist()
    return lengths


def make_strategy(
    algorithm: str,
    packs: Mapping[Pack, int],
    counts: Histogram,
    max_length: int,
    limit: int | None,
    *,
    bound: int = 0,
) -> PackingStrategy:
    """Make a PackingStrategy of ``packs``; its lower bound of rows is ``bound`` or a simple bound, if larger."""
    merged: dict[Pack, int] = {}
    for pack, count in packs.items():
        key = tuple(sorted(pack, reverse=True))
        merged[key] = merged.get(key, 0) + count
    return PackingStrategy(
        algorithm=algorithm,
        max_length=max_length,
        max_sequences_per_pack=limit,
        packs=MappingProxyType(dict(sorted(merged.items(), reverse=True))),
        lower_bound=max(bound, _simple_bound(counts, max_length, limit)),
    )


def _simple_bound(counts: Histogram, max_length: int, limit: int | None) -> int:
    """Return a lower bound of the number of rows, from the numbers of tokens, sequences and long sequences."""
    num_tokens = int(np.dot(counts, np.arange(1, max_length + 1)))
    num_sequences = int(counts.sum())
    num_long = int(counts[max_length // 2 :].sum())
    by_limit = math.ceil(num_sequences / limit) if limit else 0
    return max(math.ceil(num_tokens / max_length), by_limit, num_long)


Algorithm = Callable[..., PackingStrategy]
"""A function with the arguments of :func:`lpfhp` that makes a packing strategy."""
