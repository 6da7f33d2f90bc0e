"""What an instance wants of a row is cut into rounds and joined without losing or repeating a number."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from popdist.gradients.exchange import NEAR, joined
from popdist.gradients.shards import in_rounds


@st.composite
def apart(draw: st.DrawFn) -> list[range]:
    """Runs of numbers without overlap, some of them empty, in any order."""
    runs, start = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)))):
        runs.append(range(start + gap, start + gap + length))
        start += gap + length
    return draw(st.permutations(runs))


@given(apart())
def test_joined_runs_hold_all_numbers_and_gaps_that_are_small(runs: list[range]) -> None:
    """Each number once, in order; what else they hold lies between two runs that are near each other."""
    found = joined(runs)
    wanted = {number for run in runs for number in run}
    held = [number for run in found for number in run]
    assert held == sorted(set(held))
    assert wanted <= set(held)
    assert all(after.start - before.stop >= NEAR for before, after in pairwise(found))
    for number in set(held) - wanted:
        below, above = max(it for it in wanted if it < number), min(it for it in wanted if it > number)
        assert above - below <= NEAR


@given(apart(), st.integers(1, 30))
def test_rounds_are_full_and_in_order(runs: list[range], width: int) -> None:
    """Every round but the last has ``width`` numbers, and one after the other they are the runs."""
    rounds = in_rounds(runs, width)
    lengths = [sum(map(len, it)) for it in rounds]
    assert [number for it in rounds for run in it for number in run] == [number for run in runs for number in run]
    assert all(length == width for length in lengths[:-1])
    assert all(length > 0 for length in lengths)
