"""Packing strategies: every sequence in one pack, no row too long, and bounds that nothing goes below.

Holds popdist.packing and popdist.packing.linear_programme.
"""

import builtins
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popdist.errors import DatasetError
from popdist.packing import PackingStrategy, lpfhp, nnlshp, optimal, spfhp, unpacked
from popdist.packing.strategies import Algorithm, table

ALGORITHMS: tuple[Algorithm, ...] = (spfhp, lpfhp, nnlshp, optimal)

LIMITS = st.sampled_from([1, 2, 3, 4, 7, None])


@st.composite
def _histograms(draw: st.DrawFn, largest: int = 24, most: int = 40) -> tuple[list[int], int]:
    max_length = draw(st.integers(1, largest))
    counts = draw(st.lists(st.integers(0, most), max_size=max_length))
    return counts, max_length


@given(histogram=_histograms(), limit=LIMITS, algorithm=st.sampled_from(ALGORITHMS))
@settings(deadline=None, max_examples=40)
def test_every_sequence_is_in_one_pack(
    histogram: tuple[list[int], int], limit: int | None, algorithm: Algorithm
) -> None:
    """The packs hold the histogram, no more and no less, within both limits."""
    counts, max_length = histogram
    if algorithm is nnlshp and (limit or 0) > 3:
        limit = None
    strategy = algorithm(counts, max_length, limit)

    packed = strategy.histogram().tolist()
    assert packed == counts + [0] * (max_length - len(counts))
    most = 3 if algorithm is nnlshp and limit is None else limit
    for pack, count in strategy.packs.items():
        assert sum(pack) <= max_length
        assert most is None or len(pack) <= most
        assert pack == tuple(sorted(pack, reverse=True))
        assert count >= 1
    assert strategy.num_packs >= strategy.lower_bound
    assert strategy.num_tokens + strategy.padding_tokens == strategy.num_packs * max_length


@lru_cache(maxsize=100_000)
def _fewest_rows(lengths: tuple[int, ...], max_length: int, limit: int) -> int:
    """The fewest rows for ``lengths``, by trying all packs that hold the first one."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]

    def extend(pack: tuple[int, ...], room: int, left: tuple[int, ...]) -> int:
        best = 1 + _fewest_rows(left, max_length, limit)
        if len(pack) == limit:
            return best
        tried = set()
        for index, length in enumerate(left):
            if length <= min(room, pack[-1]) and length not in tried:
                tried.add(length)
                best = min(best, extend((*pack, length), room - length, left[:index] + left[index + 1 :]))
        return best

    return extend((first,), max_length - first, rest)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    max_length=st.integers(12, 14),
    limit=st.sampled_from([2, 3, 8]),
)
@settings(deadline=None, max_examples=30)
def test_bounds_hold_and_the_optimum_is_near(lengths: list[int], max_length: int, limit: int) -> None:
    """Compared with a search of all packings: no bound is above the best, and no strategy below it."""
    ordered = tuple(sorted(lengths, reverse=True))
    best = _fewest_rows(ordered, max_length, limit)
    histogram = np.bincount(lengths, minlength=max_length + 1)[1:].tolist()

    for algorithm in (spfhp, lpfhp, optimal):
        strategy = algorithm(histogram, max_length, limit)
        assert strategy.lower_bound <= best <= strategy.num_packs
    assert optimal(histogram, max_length, limit).num_packs <= lpfhp(histogram, max_length, limit).num_packs


@pytest.mark.parametrize(("limit", "gap"), [(2, 0.001), (3, 0.001), (5, 0.001), (None, 0.0005)])
def test_optimal_proves_a_small_gap(limit: int | None, gap: float) -> None:
    """On many sequences of 96 lengths the rows are within a thousandth of the proved bound."""
    histogram = np.concatenate([np.zeros(19, int), np.random.default_rng(0).integers(0, 4000, 30)])

    strategy = optimal(histogram, 96, limit)

    assert 0 <= strategy.gap <= gap
    assert strategy.num_packs < lpfhp(histogram, 96, limit).num_packs or limit == 2


@pytest.mark.parametrize(
    ("algorithm", "packs"),
    [(spfhp, {(6, 3): 1, (5, 4): 1, (2,): 1}), (lpfhp, {(6, 4): 1, (5, 3, 2): 1})],
)
def test_the_greedy_ones_by_hand(algorithm: Algorithm, packs: dict[tuple[int, ...], int]) -> None:
    """One sequence each of 2 to 6 tokens, in rows of 10."""
    assert dict(algorithm([0, 1, 1, 1, 1, 1], 10).packs) == packs


def test_a_strategy_prints_as_a_table() -> None:
    """One line under its headings; several strategies share them."""
    strategy = lpfhp([0, 0, 3, 1], 8)

    assert str(strategy).splitlines() == [
        "strategy  most a pack  packs  efficiency  packing factor  padding tokens  bound      gap",
        "lpfhp             any      2     81.250%          2.0000               3      2  0.0000%",
    ]
    assert len(table([strategy, unpacked([0, 0, 3, 1], 8)]).splitlines()) == 3


def test_equal_packs_have_one_digest() -> None:
    """The digest names packs and counts, whoever found them."""
    assert spfhp([1, 4, 0, 1], 4, 1).digest() == lpfhp([1, 4, 0, 1], 4, 1).digest()
    assert lpfhp([0, 4], 4).digest() != lpfhp([0, 5], 4).digest()
    assert lpfhp([0, 4], 4).digest() != lpfhp([0, 4], 5).digest()


def test_no_sequences_are_no_rows() -> None:
    """An empty histogram has an empty packing."""
    for algorithm in ALGORITHMS:
        strategy: PackingStrategy = algorithm([], 8)
        assert (strategy.num_packs, strategy.efficiency, strategy.packing_factor, strategy.gap) == (
            0,
            1.0,
            1.0,
            0.0,
        )


@pytest.mark.parametrize(
    ("histogram", "max_length", "limit", "message"),
    [
        ([1, -2], 8, None, "the histogram counts -2 sequences of length 2: a count is at least 0"),
        ([0, 0, 0, 5, 2], 3, None, "7 sequences are longer than max_length=3, the longest has 5 tokens"),
        ([1.5], 8, None, "no row of whole numbers"),
        (7, 8, None, "a histogram of type int is no row of whole numbers"),
        ([[1, 2], [3, 4]], 8, None, "no row of whole numbers"),
        ([1], 0, None, "max_length=0 must be a whole number of at least 1"),
        ([1], 8, 0, "max_sequences_per_pack=0 must be a whole number of at least 1"),
        ([2**62, 2**62], 8, None, r"at most 2\*\*53 are packed"),
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bad_input_is_named(
    algorithm: Algorithm, histogram: Iterable[int], max_length: int, limit: int | None, message: str
) -> None:
    """Each error names what is wrong."""
    with pytest.raises(DatasetError, match=message):
        algorithm(histogram, max_length, limit)


def test_least_squares_knows_small_packs() -> None:
    """More than three sequences a pack are refused by ``nnlshp``."""
    with pytest.raises(DatasetError, match="knows those of at most 3; take optimal, lpfhp or spfhp"):
        nnlshp([1], 8, 4)


def test_without_scipy_the_greedy_ones_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need scipy say what to install."""
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "scipy":
            raise ImportError(name)
        return real(name, *arguments, **options)

    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)

    for algorithm in (optimal, nnlshp):
        with pytest.raises(DatasetError, match=r"pip install 'poprun\[packing\]', or take lpfhp"):
            algorithm([1, 2], 8)
    assert lpfhp([1, 2], 8).num_packs == 1
