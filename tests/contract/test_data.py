"""Data obeys the same laws in jobs of every size and split, the job of one included.

Holds popdist.data.dealt_streams.
"""

from pathlib import Path

import pytest

from tests.contract import data_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 3), (3, 6)])
def test_laws(forked_world: ForkedWorlds, num_instances: int, num_replicas: int, tmp_path: Path) -> None:
    """Every law of data_laws.py, on every instance."""
    forked_world.keep_laws(data_laws, tmp_path, num_instances=num_instances, num_replicas=num_replicas)


def test_samplers(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """The laws of samplers, and the same epochs however four replicas are dealt to instances."""
    found = [
        forked_world(
            data_laws.run_sampler_laws,
            tmp_path,
            num_instances=num_instances,
            num_replicas=4,
            timeout_seconds=DEADLINE_SECONDS,
        )
        for num_instances in (1, 2, 4)
    ]
    assert all(world == [found[0][0]] * num for world, num in zip(found, (1, 2, 4), strict=True))
    assert found[0][0][0] == 3
