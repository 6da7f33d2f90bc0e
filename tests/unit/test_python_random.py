"""Python's random state as bytes, and torch's marks: what is put in place goes on exactly as what was taken."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from popdist.data import process_generators

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
        monkeypatch.setattr(process_generators, "_row", None)


def test_cpython_has_the_fast_way() -> None:
    """The interpreters that are supported keep the state where it is looked for."""
    assert process_generators._row is not None


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("number_of_draws", [0, 1, 3, 2000])
def test_a_state_goes_on_where_it_was_taken(number_of_draws: int) -> None:
    """All functions of ``random`` repeat what they gave, the second of a pair of normal numbers included."""
    random.seed(7)
    drawn = [DRAWS[i % 2]() for i in range(number_of_draws)]
    state, expected = process_generators.python_state(), random.getstate()
    first = [draw() for draw in DRAWS]

    process_generators.set_python_state(state)

    assert len(drawn) == number_of_draws
    assert random.getstate() == expected
    assert [draw() for draw in DRAWS] == first


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_makes_another_state(draw: Callable[[], object]) -> None:
    """Also the one that only takes the second number of a pair."""
    random.gauss(0, 1)
    before = process_generators.python_state()
    draw()

    assert process_generators.python_state() != before


def test_both_ways_give_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a state may be taken by one and put in place by the other."""
    state = process_generators.python_state()
    monkeypatch.setattr(process_generators, "_row", None)

    assert process_generators.python_state() == state


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_seeded_state_is_that_of_random_seed(seed: int) -> None:
    """And it survives being written down as numbers, which are those of ``random.getstate``."""
    random.seed(seed)
    state = process_generators.seeded_python_state(seed)
    numbers, gauss = process_generators.as_numbers(state)

    assert state == process_generators.python_state()
    assert (numbers[0], tuple(numbers[1:]), gauss) == random.getstate()
    assert process_generators.from_numbers(numbers, gauss) == state


@pytest.mark.parametrize("numbers", [[3], [3, *range(600)], [99, *range(625)]])
def test_numbers_that_are_no_state_are_refused(numbers: list[int]) -> None:
    """A checkpoint may hold anything."""
    with pytest.raises((TypeError, ValueError)):
        process_generators.from_numbers(numbers, None)


TORCH_DRAWS: tuple[Callable[[], object], ...] = (
    lambda: torch.rand(1),
    lambda: torch.rand(624),
    lambda: torch.randn(1),
    lambda: torch.randn(1, dtype=torch.float64),
    lambda: torch.randperm(5),
    lambda: torch.manual_seed(3),
    lambda: torch.default_generator.set_state(torch.Generator().manual_seed(4).get_state()),
)


def test_torch_has_marks() -> None:
    """The version that is pinned keeps its words where they are looked for."""
    assert process_generators.torch_mark() is not None


@given(st.lists(st.sampled_from(TORCH_DRAWS), max_size=6), st.sampled_from([None, *TORCH_DRAWS]))
def test_a_mark_tells_whether_torch_has_drawn(
    before: list[Callable[[], object]], draw: Callable[[], object]
) -> None:
    """It is another one wherever the state is, also when only the second of a pair was taken."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for earlier in before:
            earlier()
        mark, state = process_generators.torch_mark(), torch.get_rng_state()
        if draw is not None:
            draw()

        has_drawn = not torch.equal(torch.get_rng_state(), state)
        assert (process_generators.torch_mark() != mark) >= has_drawn
        assert (process_generators.torch_mark() == mark) >= (draw is None)
