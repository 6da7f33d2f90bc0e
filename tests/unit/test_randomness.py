"""Each replica's generators go on where they were, also where several loops take turns in one program."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random.mtrand import get_bit_generator, set_bit_generator

import popdist
from popdist.data.randomness import ReplicaRandomness

CPU = torch.device("cpu")

BITS = get_bit_generator()


def draw() -> tuple[float, float, float]:
    """One number from each generator that programs draw from unasked."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311 - they are the subject


def drawn_alone(seed: int, count: int) -> list[tuple[float, float, float]]:
    """The first numbers of a replica that nobody interrupts."""
    with ReplicaRandomness(seed, range(1)).of(0, CPU):
        return [draw() for _ in range(count)]


DRAWS: tuple[Callable[[], object], ...] = (
    draw,
    lambda: random.gauss(0, 1),
    lambda: [random.random() for _ in range(312)],  # noqa: S311 - as many words as a state has
    lambda: random.getrandbits(32),
    lambda: np.random.rand(624).tolist(),
    np.random.normal,
    lambda: set_bit_generator(np.random.MT19937(4)),
    lambda: set_bit_generator(np.random.SFC64(4)),
    lambda: torch.rand(624).tolist(),
    lambda: torch.randn(()).tolist(),
    lambda: torch.randn((), dtype=torch.float64).tolist(),
    lambda: bool(torch.manual_seed(3)),
    lambda: random.seed(3),
)

Work = list[Callable[[], object]]
WORK = st.lists(st.sampled_from(DRAWS), max_size=3)


def drawn(program: list[Work], replica: list[Work]) -> tuple[list[object], list[object]]:
    """What a program draws and what a replica draws, in turn, from known states."""
    random.seed(5)
    set_bit_generator(BITS)
    np.random.seed(5)
    torch.manual_seed(5)
    states, found = ReplicaRandomness(1, range(1)), (list[object](), list[object]())
    for outside, inside in zip(program, replica, strict=True):
        found[0].extend(work() for work in outside)
        with states.of(0, CPU):
            found[1].extend(work() for work in inside)
    return found


@given(turns=st.lists(st.tuples(WORK, WORK), max_size=4))
def test_program_and_replica_draw_as_if_alone(turns: list[tuple[Work, Work]]) -> None:
    """Whatever each of them draws, also where it seeds, takes the second of a pair, or draws nothing."""
    program, replica, silent = (
        [turn[0] for turn in turns],
        [turn[1] for turn in turns],
        [list[Any]() for _ in turns],
    )
    states = random.getstate(), torch.get_rng_state()
    try:
        both, alone = drawn(program, replica), (drawn(program, silent)[0], drawn(silent, replica)[1])
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        set_bit_generator(BITS)

    assert both == alone


def test_loops_side_by_side_have_the_numbers_of_loops_alone() -> None:
    """A scope may be left after the next one was entered, as by two loops that are stepped in turn."""
    first, second = ReplicaRandomness(1, range(1)), ReplicaRandomness(2, range(1))
    scopes = first.of(0, CPU), second.of(0, CPU)
    found: list[list[tuple[float, float, float]]] = [[], []]

    scopes[0].__enter__()
    found[0].append(draw())
    scopes[1].__enter__()
    found[1].append(draw())
    scopes[0].__exit__(None, None, None)
    found[1].append(draw())
    scopes[1].__exit__(None, None, None)
    with first.of(0, CPU):
        found[0].append(draw())
    with second.of(0, CPU):
        found[1].append(draw())

    assert found == [drawn_alone(1, 2), drawn_alone(2, 3)]


def test_the_programs_own_generators_go_on_untouched() -> None:
    """Whatever was drawn in a replica's micro batches, in whatever order they were left."""
    own = random.getstate(), torch.get_rng_state()
    expected = random.random(), float(torch.rand(()))  # noqa: S311 - the subject
    random.setstate(own[0])
    torch.set_rng_state(own[1])

    scopes = [ReplicaRandomness(seed, range(1)).of(0, CPU) for seed in range(2)]
    for scope in scopes:
        scope.__enter__()
        draw()
    for scope in scopes:
        draw()
        scope.__exit__(None, None, None)

    assert (random.random(), float(torch.rand(()))) == expected  # noqa: S311 - as above


def test_a_seeded_replica_draws_what_the_seeded_generators_do() -> None:
    """Its masks are the same in every version of popdist: a replica's states are those of a seed."""
    numbers = {
        name: int.from_bytes(hashlib.blake2b(f"7 3 {name}".encode(), digest_size=8).digest(), "little") >> 1
        for name in ("python", "numpy", "torch")
    }
    expected = (
        random.Random(numbers["python"]).random(),  # noqa: S311 - the subject
        float(np.random.RandomState(np.random.MT19937(numbers["numpy"])).rand()),
        float(torch.rand((), generator=torch.Generator().manual_seed(numbers["torch"]))),
    )

    with ReplicaRandomness(7, range(3, 4)).of(3, CPU):
        assert draw() == expected


def test_states_survive_being_written_down() -> None:
    """Also with the second of a pair of normal numbers; a bit generator of the program's own is left out."""
    states, loaded = ReplicaRandomness(1, range(2)), ReplicaRandomness(2, range(2))
    with states.of(0, CPU):
        random.gauss(0, 1)
        torch.randn(())
        draw()
    with states.of(1, CPU):
        set_bit_generator(np.random.SFC64(4))

    written = states.state_dict()
    loaded.load_state_dict(written)

    assert written["1"]["numpy"] is None
    found = []
    for randomness in (states, loaded):
        with randomness.of(0, CPU):
            found.append((random.gauss(0, 1), draw(), float(torch.randn(()))))
    assert found[0] == found[1]


@pytest.mark.parametrize("numbers", [[3], [3, *range(600)], [99, *range(625)]])
def test_numbers_that_are_no_state_are_refused(numbers: list[int]) -> None:
    """A checkpoint may hold anything."""
    randomness = ReplicaRandomness(1, range(1))
    values = randomness.state_dict()["0"] | {"python": torch.tensor(numbers)}

    with pytest.raises(popdist.WeightsError, match="no random states"):
        randomness.load_state_dict({0: values})


def test_a_generator_that_nothing_drew_from_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read Python's state takes longer than all else that a replica's turn costs."""
    states = ReplicaRandomness(1, range(2))
    with states.of(0, CPU):
        pass  # from now on the program's own state is known
    monkeypatch.delattr(random, "getstate")

    for replica in (0, 1):
        with states.of(replica, CPU):
            pass
