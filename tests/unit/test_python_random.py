"""Python's random state as bytes: what is put in place goes on exactly as what was taken, in both ways."""

import random
from collections.abc import Callable, Iterator

import pytest

from popdist.data import python_random

DRAWS: tuple[Callable[[], object], ...] = (
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.getrandbits(64),
    lambda: random.sample(range(1000), 400),
)


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """The process's state is afterwards what it was."""
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.fixture(params=["as bytes in memory", "by getstate and setstate"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever interpreter this is."""
    if request.param == "by getstate and setstate":
        monkeypatch.setattr(python_random, "_row", None)


def test_cpython_has_the_fast_way() -> None:
    """The interpreters that are supported keep the state where it is looked for."""
    assert python_random._row is not None


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("number_of_draws", [0, 1, 3, 2000])
def test_a_state_goes_on_where_it_was_taken(number_of_draws: int) -> None:
    """All functions of ``random`` repeat what they gave, the second of a pair of normal numbers included."""
    random.seed(7)
    drawn = [DRAWS[i % 2]() for i in range(number_of_draws)]
    state, expected = python_random.current(), random.getstate()
    first = [draw() for draw in DRAWS]

    python_random.put_in_place(state)

    assert len(drawn) == number_of_draws
    assert random.getstate() == expected
    assert [draw() for draw in DRAWS] == first


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_makes_another_state(draw: Callable[[], object]) -> None:
    """Also the one that only takes the second number of a pair."""
    random.gauss(0, 1)
    before = python_random.current()
    draw()

    assert python_random.current() != before


def test_both_ways_give_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a state may be taken by one and put in place by the other."""
    state = python_random.current()
    monkeypatch.setattr(python_random, "_row", None)

    assert python_random.current() == state


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_seeded_state_is_that_of_random_seed(seed: int) -> None:
    """And it survives being written down as numbers, which are those of ``random.getstate``."""
    random.seed(seed)
    state = python_random.seeded(seed)
    numbers, gauss = python_random.as_numbers(state)

    assert state == python_random.current()
    assert (numbers[0], tuple(numbers[1:]), gauss) == random.getstate()
    assert python_random.from_numbers(numbers, gauss) == state


@pytest.mark.parametrize("numbers", [[3], [3, *range(600)], [99, *range(625)]])
def test_numbers_that_are_no_state_are_refused(numbers: list[int]) -> None:
    """A checkpoint may hold anything."""
    with pytest.raises((TypeError, ValueError)):
        python_random.from_numbers(numbers, None)
