"""Buffers of all wrapped models belong to the replicas, inside of steps and outside.

Holds popdist.gradients.step_headers, popdist.gradients.buffers,
popdist.step.checks.tensor_changes and popdist.step.training.batch_norm.
"""

import pytest

from tests.contract import buffer_laws, buffer_recipes
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

NUM_REPLICAS = 4


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 1), (1, 4), (2, 4), (4, 4)])
def test_laws(forked_world: ForkedWorlds, num_instances: int, num_replicas: int) -> None:
    """Every law of buffer_laws.py, on every instance."""
    forked_world.keep_laws(buffer_laws, num_instances=num_instances, num_replicas=num_replicas)


def test_recipes_have_the_same_bits_in_every_split(forked_world: ForkedWorlds) -> None:
    """What buffer_recipes.py trains on four replicas is the same with one, two and four instances."""
    alone, *others = (
        end
        for number in (1, 2, 4)
        for end in forked_world(
            buffer_recipes.run_all,
            num_instances=number,
            num_replicas=NUM_REPLICAS,
            timeout_seconds=DEADLINE_SECONDS,
        )
    )
    assert others == [alone] * len(others)
    assert len(set(alone.values())) == len(alone)
