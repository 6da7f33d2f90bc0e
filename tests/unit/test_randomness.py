"""Each replica's generators go on where they were, also where several loops take turns in one program."""

import random

import numpy as np
import torch

from popdist.training.randomness import ReplicaRandomness

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    """One number from each generator that programs draw from unasked."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311, NPY002 - they are the subject


def drawn_alone(seed: int, count: int) -> list[tuple[float, float, float]]:
    """The first numbers of a replica that nobody interrupts."""
    with ReplicaRandomness(seed, range(1)).of(0, CPU):
        return [draw() for _ in range(count)]


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
