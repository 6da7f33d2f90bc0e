"""The schedule of the checks that cost time."""

import pytest
from torch import nn

import popdist
from popdist.context import Checks
from popdist.training.checks import is_checked


def test_the_first_steps_and_every_100th_are_checked() -> None:
    """Counted from 1."""
    assert [number for number in range(1, 301) if is_checked(number)] == [1, 2, 3, 100, 200, 300]


@pytest.mark.parametrize(("checks", "numbers"), [("full", [1, 2, 3, 100]), ("off", [])])
def test_a_model_counts_its_own_steps(checks: Checks, numbers: list[int]) -> None:
    """Those that ended with a gradient; one that was left does not count, and no step of another model."""
    popdist.init(checks=checks)
    model, other = (popdist.ReplicatedModel(nn.Linear(2, 1)) for _ in range(2))
    found = []
    try:
        for number in range(1, 101):
            with pytest.raises(KeyError), model.micro_batch(0):
                raise KeyError
            with pytest.raises(popdist.MicroBatchError):
                popdist.barrier()
            other.reduce_gradients(reduction="sum")
            with model.micro_batch(0):
                step = model._model_steps.step
                found += [number] if step is not None and step.is_checked else []
            model.reduce_gradients()
    finally:
        popdist.finalize()
    assert found == numbers
