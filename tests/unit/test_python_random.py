"""Random states of Python and torch as bytes: what is put in place goes on exactly as what was taken."""

import random
from collections.abc import Callable, Iterator

import numpy as np
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


def test_torch_has_a_row() -> None:
    """The version that is pinned keeps its state where it is looked for."""
    assert process_generators._torch_row is not None


@given(
    before=st.lists(st.sampled_from(TORCH_DRAWS), max_size=6),
    meanwhile=st.lists(st.sampled_from(TORCH_DRAWS), max_size=3),
    has_row=st.booleans(),
)
def test_a_state_of_torch_goes_on_where_it_was_taken(
    before: list[Callable[[], object]], meanwhile: list[Callable[[], object]], *, has_row: bool
) -> None:
    """Whatever was drawn before and meanwhile; the tensor of a checkpoint says the same as the bytes."""
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        if not has_row:
            patch.setattr(process_generators, "_torch_row", None)
        torch.manual_seed(3)
        for draw in before:
            draw()
        expected = torch.get_rng_state()
        state = process_generators.torch_state()
        process_generators.set_torch_state(process_generators.seeded_torch_state(5))
        seeded = torch.get_rng_state()
        for draw in meanwhile:
            draw()
        tensor = process_generators.as_torch_tensor(state)
        process_generators.set_torch_state(process_generators.from_torch_tensor(tensor))

        assert torch.equal(seeded, torch.Generator().manual_seed(5).get_state())
        assert torch.equal(process_generators.as_torch_tensor(state), expected)
        assert torch.equal(torch.get_rng_state(), expected)


@given(numbers=st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_seeds_one_after_the_other_are_those_one_by_one(numbers: list[int]) -> None:
    """Whatever is prepared ahead: all that a generator gives from then on, without the second of a pair before."""
    draws: dict[str, Callable[[], object]] = {
        "python": lambda: (random.getrandbits(9000), random.gauss(0, 1)),
        "numpy": lambda: (np.random.bytes(3000), np.random.randn()),  # noqa: NPY002 - under test
        "torch": lambda: (
            torch.randn(()).item(),
            torch.randn((), dtype=torch.float64).item(),
            torch.rand(900).sum(),
        ),
    }
    for generator in process_generators.GENERATORS:
        draw = draws[generator.name]
        draw()
        one_by_one = [(generator.seed(number), draw())[1] for number in numbers]
        draw()
        assert [draw() for _ in generator.seed_each(numbers)] == one_by_one
