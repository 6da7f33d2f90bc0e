"""Data obeys the same laws in jobs of every size and split, the job of one included.

Holds popdist.data.lone_reading.
"""

from pathlib import Path

import pytest

from popdist.testing import run_world
from tests.contract import data_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 3), (3, 6)])
def test_laws(forked_world: ForkedWorlds, num_instances: int, num_replicas: int, tmp_path: Path) -> None:
    """Every law of data_laws.py, on every instance."""
    world = forked_world if num_instances == 1 else run_world
    counts = world(
        data_laws.run_all,
        tmp_path,
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [len([name for name in vars(data_laws) if name.startswith("law_")])] * num_instances
