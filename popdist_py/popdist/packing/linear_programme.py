"""Packing of sequences into rows by optimisation: a linear programme, or least squares over small packs.

The programme of cutting stock generates its columns, the packs (Gilmore, Gomory 1961): prices of lengths prove
that no packing is better, or show packs whose value is more than 1. A shorter sequence may take a place, by a
further column for each length (Valério de Carvalho 2005). The bound is proved in whole numbers (Farley 1990).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from popdist.errors import DatasetError
from popdist.packing.strategies import (
    Histogram,
    Pack,
    PackingStrategy,
    check_histogram,
    check_limit,
    greedy_packs,
    lengths_of,
    make_strategy,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Prices = NDArray[Any]
"""The price of a sequence of each length, from length 1 on: float64, or int64 in the proof of the bound."""

SMALL_PACK: Final = 3
"""The largest number of sequences in a pack for which all possible packs are listed, as in :func:`nnlshp`."""

_MOST_LISTED: Final = 100_000
"""The largest number of packs with which the linear programme starts."""

_PRICE_UNIT: Final = 2**40
"""The factor by which prices are multiplied before they are rounded to whole numbers for the proof."""

_GAIN: Final = 1e-9
"""The least gain of a new pack in the linear programme: its value must be above 1 + ``_GAIN``."""

_CLOSE: Final = 1e-7
"""The relative distance between value and bound at which the linear programme counts as solved."""

_MAX_ROUNDS: Final = 500

_SMOOTHING: Final = 0.5
"""The weight of the best prices so far in the prices for new packs, which saves rounds (P. Wentges, 1997)."""

_BLOCK: Final = 2**22
"""The number of candidates that the dynamic programme compares at once."""


def optimal(
    histogram: Iterable[int], max_length: int = 512, max_sequences_per_pack: int | None = None
) -> PackingStrategy:
    """Pack sequences into rows by a linear programme, whose solution is rounded down; pack the rest by best fit.

    Args:
        histogram: Element i counts the sequences of length i + 1; may be all zeros.
        max_length: Tokens of a row. At least 1.
        max_sequences_per_pack: At least 1; None for as many as fit.

    Returns:
        The packing, with a proved lower bound and therefore a proved gap. Rounding costs at most one row for each
        length that occurs, whatever the number of sequences.

    Raises:
        DatasetError: For the same reasons as ``spfhp``, or if scipy is missing.
    """
    _scipy("optimal")
    counts = check_histogram(histogram, max_length)
    limit = check_limit(max_sequences_per_pack)
    greedy = greedy_packs(counts, max_length, limit or max_length)
    if len(greedy) <= 1:
        return make_strategy("optimal", greedy, counts, max_length, limit)
    shortest = lengths_of(counts)[0]
    most = min(limit or max_length, max_length // shortest)
    programme = _Programme(counts, max_length, most, greedy)
    solution, bound = programme.solve()
    rounded = _complete(_rounded_down(solution), counts, max_length, most)
    best = min(greedy, rounded, key=lambda packs: sum(packs.values()))
    return make_strategy("optimal", best, counts, max_length, limit, bound=bound)


def nnlshp(
    histogram: Iterable[int], max_length: int = 512, max_sequences_per_pack: int | None = None
) -> PackingStrategy:
    """Pack sequences into full rows of at most 3 sequences by least squares; pack the other sequences by best fit.

    The counts of packs that fill a row are fitted to the histogram; the sequences that the rounded fit leaves are
    packed by best fit. ``optimal`` is better and faster; ``nnlshp`` exists for comparison with published results.

    Args:
        histogram: Element i counts the sequences of length i + 1; may be all zeros.
        max_length: Tokens of a row. At least 1.
        max_sequences_per_pack: 1 to 3; None means 3.

    Raises:
        DatasetError: For the same reasons as ``spfhp``, if a pack may have more than 3 sequences, or without
            scipy.
    """
    _scipy("nnlshp")
    counts = check_histogram(histogram, max_length)
    limit = check_limit(max_sequences_per_pack) or SMALL_PACK
    if limit > SMALL_PACK:
        raise DatasetError(
            f"nnlshp with max_sequences_per_pack={limit}: it lists all packs, and knows those of at most "
            f"{SMALL_PACK}; take optimal, lpfhp or spfhp for larger ones"
        )
    lengths = lengths_of(counts)
    full = _full_packs(lengths, max_length, limit)
    packs = _fitted(full, counts) if full else {}
    return make_strategy("nnlshp", _complete(packs, counts, max_length, limit), counts, max_length, limit)


def _scipy(algorithm: str) -> None:
    try:
        import scipy.optimize  # noqa: F401 - imported only to find out whether scipy is installed
    except ImportError:
        raise DatasetError(
            f"{algorithm} needs scipy, which is not installed: pip install 'poprun[packing]', or take lpfhp, "
            "which needs none"
        ) from None


def _fitted(packs: list[Pack], counts: Histogram) -> dict[Pack, int]:
    """Return how often to use each of ``packs`` (lengths that share a row): a least-squares fit, rounded down."""
    from scipy.optimize import nnls

    rows = {length: row for row, length in enumerate(lengths_of(counts))}
    matrix = np.zeros((len(rows), len(packs)))
    for column, pack in enumerate(packs):
        for length in pack:
            matrix[rows[length], column] += 1
    solution, _ = nnls(matrix, counts[counts > 0].astype(np.float64), maxiter=50 * len(rows))
    return _rounded_down(dict(zip(packs, solution.tolist(), strict=True)))


def _full_packs(lengths: Iterable[int], max_length: int, limit: int) -> list[Pack]:
    """Return all combinations (packs) of 1 to ``limit``, at most 3, of ``lengths`` that fill a row completely."""
    ordered = list(lengths)
    known = set(ordered)
    packs: list[Pack] = [(max_length,)] if max_length in known else []
    for long in ordered:
        room = max_length - long
        if limit > 1 and room <= long and room in known:
            packs.append((long, room))
        if limit == SMALL_PACK:
            least = max(1, (room + 1) // 2)
            packs += [
                (long, middle, room - middle)
                for middle in range(least, min(long, room - 1) + 1)
                if middle in known and room - middle in known
            ]
    return packs


Fill = Callable[[int], Pack]
"""A function that returns the best pack (lengths of sequences) for a number of free tokens of a row."""


class _Programme:
    """The linear programme of packing; a column is a pack, the lengths of the sequences that share a row."""

    def __init__(self, counts: Histogram, max_length: int, most: int, packs: Iterable[Pack]) -> None:
        self._top = lengths_of(counts)[-1]
        self._demand = counts[: self._top].astype(np.float64)
        self._counts = counts
        self._max_length = max_length
        self._most = most
        self._columns: dict[Pack, None] = {}
        self._rows: list[int] = []
        self._owners: list[int] = []
        for pack in packs:
            self._add(pack)
        self._is_listed = most <= SMALL_PACK and max_length**2 // 12 + max_length <= _MOST_LISTED
        if self._is_listed:  # a full pack has all places of a pack that is not full
            for pack in [*_full_packs(range(1, self._top + 1), max_length, most), (self._top,)]:
                self._add(pack)

    def _add(self, pack: Pack) -> bool:
        """Add ``pack`` as a column of the linear programme; return True, or False if it was a column already."""
        pack = tuple(sorted(pack, reverse=True))
        if pack in self._columns:
            return False
        self._rows += [length - 1 for length in pack]
        self._owners += [len(self._columns)] * len(pack)
        self._columns[pack] = None
        return True

    def solve(self) -> tuple[dict[Pack, float], int]:
        """Solve the linear programme; return how often to use each pack, and a lower bound of the rows' number."""
        best_prices, best_bound = np.zeros(self._top), 0.0
        for _ in range(_MAX_ROUNDS):
            value, solution, prices = self._solve_once()
            smoothed = _SMOOTHING * best_prices + (1 - _SMOOTHING) * prices
            num_added = 0
            for tried in (smoothed, prices) if best_bound else (prices,):
                values, pack_of = self._price(tried)
                scale = max(1.0, float(values.max()))
                bound = float(self._demand @ tried) / scale
                if bound > best_bound:
                    best_prices, best_bound = tried / scale, bound
                num_added = self._add_worthy(values, pack_of, prices)
                if num_added:
                    break
            if not num_added or value - best_bound <= _CLOSE * best_bound:
                break
        return solution, self._prove(best_prices)

    def _solve_once(self) -> tuple[float, dict[Pack, float], Floats]:
        """Solve the linear programme with its present packs; return optimal value, solution and dual prices."""
        from scipy.optimize import linprog
        from scipy.sparse import csc_array

        num_columns, shorter = len(self._columns), np.arange(self._top - 1)
        rows = np.concatenate([self._rows, shorter + 1, shorter]).astype(np.int64)
        columns = np.concatenate([self._owners, num_columns + shorter, num_columns + shorter]).astype(np.int64)
        signs = np.concatenate([-np.ones(len(self._rows)), np.ones(len(shorter)), -np.ones(len(shorter))])
        result = linprog(
            np.concatenate([np.ones(num_columns), np.zeros(len(shorter))]),
            A_ub=csc_array((signs, (rows, columns)), shape=(self._top, num_columns + len(shorter))),
            b_ub=-self._demand,
            method="highs-ipm" if self._is_listed else "highs-ds",
            options={"presolve": False},
        )
        if result.x is None:
            raise DatasetError(
                f"the linear programme of this histogram was not solved: {result.message}; take lpfhp"
            )
        solution = dict(zip(self._columns, result.x[:num_columns].tolist(), strict=True))
        return float(result.fun), solution, np.maximum(-result.ineqlin.marginals, 0.0)

    def _price(self, prices: Prices) -> tuple[Prices, Fill]:
        """Return, for each length, the highest sum of ``prices`` of a pack (row) that has a sequence of this
        length.

        Return also a function that makes the pack for a length.
        """
        choose = _best_of_any if self._most >= self._max_length else partial(_best_of_few, most=self._most - 1)
        values, fill = choose(prices, self._max_length - 1)
        lengths = np.arange(1, self._top + 1)
        totals = prices + values[self._max_length - lengths]
        return totals, lambda length: (length, *fill(self._max_length - length))

    def _add_worthy(self, values: Prices, pack_of: Fill, prices: Floats) -> int:
        """Add each pack whose sequences have ``prices`` with a sum above 1; return the number of packs added."""
        num_added = 0
        for length in (np.flatnonzero(values > 1 - _SMOOTHING) + 1).tolist():
            pack = pack_of(length)
            if sum(prices[part - 1] for part in pack) > 1 + _GAIN:
                num_added += self._add(pack)
        return num_added

    def _prove(self, prices: Floats) -> int:
        """Return the lower bound of the number of rows that ``prices`` prove, computed exactly in integers."""
        whole = np.floor(prices * _PRICE_UNIT).astype(np.int64)
        dearest = int(self._price(whole)[0].max())
        total = sum(int(count) * int(price) for count, price in zip(self._counts[: self._top], whole, strict=True))
        return -(-total // dearest) if dearest else 0


def _best_of_any(prices: Prices, max_room: int) -> tuple[Prices, Fill]:
    """Return, for each number of free tokens in a row, the highest total price of a pack of sequences that fits,
    and a function that makes this pack.
    """
    values = np.zeros(max_room + 1, prices.dtype)
    last = np.zeros(max_room + 1, np.int64)
    for room in range(1, max_room + 1):
        longest = min(room, len(prices))
        candidates = prices[:longest] + values[room - longest : room][::-1]
        choice = int(candidates.argmax())
        if candidates[choice] > values[room - 1]:
            values[room], last[room] = candidates[choice], choice + 1
        else:
            values[room] = values[room - 1]

    def fill(room: int) -> Pack:
        pack: list[int] = []
        while room:
            length = int(last[room])
            pack += [length] if length else []
            room -= length or 1
        return tuple(pack)

    return values, fill


def _best_of_few(prices: Prices, max_room: int, *, most: int) -> tuple[Prices, Fill]:
    """Return, for each number of free tokens in a row, the highest total price of at most ``most`` sequences that
    fit, and a function that makes the pack of these sequences.
    """
    values = np.zeros(max_room + 1, prices.dtype)
    layers: list[Ints] = []
    for _ in range(most):
        values, choices = _with_one_more(values, prices)
        layers.append(choices)

    def fill(room: int) -> Pack:
        pack: list[int] = []
        for choices in reversed(layers):
            length = int(choices[room])
            pack += [length] if length else []
            room -= length
        return tuple(pack)

    return values, fill


def _with_one_more(values: Prices, prices: Prices) -> tuple[Prices, Ints]:
    """Return the highest prices if each pack may get one more sequence, and the length of this sequence or 0."""
    longest = min(len(prices), len(values) - 1)
    worth = np.concatenate([np.zeros(1, prices.dtype), prices[:longest]])
    impossible = np.full(
        longest, -_PRICE_UNIT * len(values) if prices.dtype.kind == "i" else -np.inf, prices.dtype
    )
    padded = np.concatenate([impossible, values])
    step = padded.strides[0]
    windows = as_strided(padded[longest:], (len(values), longest + 1), (step, -step), writeable=False)
    best, choices = np.empty_like(values), np.empty(len(values), np.int64)
    num_rows = max(1, _BLOCK // (longest + 1))
    for start in range(0, len(values), num_rows):
        candidates = windows[start : start + num_rows] + worth
        chosen = candidates.argmax(axis=1)
        choices[start : start + num_rows] = chosen
        best[start : start + num_rows] = candidates[np.arange(len(chosen)), chosen]
    return best, choices


def _rounded_down(solution: dict[Pack, float]) -> dict[Pack, int]:
    rounded = {pack: math.floor(count + 1e-6) for pack, count in solution.items()}
    return {pack: count for pack, count in rounded.items() if count > 0}


def _complete(packs: dict[Pack, int], counts: Histogram, max_length: int, limit: int) -> dict[Pack, int]:
    """Fill the packs ``packs`` with existing sequences, pack the other sequences by best fit; return all packs."""
    taken, rest = _take_places(packs, counts)
    for pack, count in greedy_packs(rest, max_length, limit).items():
        taken[pack] = taken.get(pack, 0) + count
    return taken


def _take_places(packs: dict[Pack, int], counts: Histogram) -> tuple[dict[Pack, int], Histogram]:
    """Fill each place in ``packs`` with the longest sequence that fits; return packs and the other sequences."""
    rest, surplus, current = counts.copy(), -counts, packs
    for pack, count in packs.items():
        for length in pack:
            surplus[length - 1] += count
    for length in range(len(rest), 0, -1):
        if surplus[length - 1] > 0:
            current = _shorten(current, length, int(surplus[length - 1]))
            if length > 1:
                surplus[length - 2] += surplus[length - 1]
            surplus[length - 1] = 0
    filled: dict[Pack, int] = {}
    for pack, count in current.items():
        if pack:
            filled[pack] = filled.get(pack, 0) + count
            for length in pack:
                rest[length - 1] -= count
    return filled, rest


def _shorten(packs: dict[Pack, int], length: int, surplus: int) -> dict[Pack, int]:
    """Return ``packs`` with ``surplus`` places for sequences of ``length`` tokens made one token shorter, because
    too few such sequences exist; a place of 0 tokens is removed.
    """
    changed: dict[Pack, int] = {}
    waiting = list(packs.items())
    while waiting:
        pack, count = waiting.pop()
        used = min(count, surplus) if length in pack else 0
        if used:
            at, surplus = pack.index(length), surplus - used
            rest = pack[:at] + pack[at + 1 :] + ((length - 1,) if length > 1 else ())
            waiting.append((tuple(sorted(rest, reverse=True)), used))
        if used < count:
            changed[pack] = changed.get(pack, 0) + count - used
    return changed
