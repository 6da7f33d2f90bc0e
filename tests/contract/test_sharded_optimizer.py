"""The sharded optimizer obeys the same laws in jobs of every size, the job of one included."""

from pathlib import Path

import pytest

from popdist.testing import run_world
from tests.contract import sharding_laws

DEADLINE_SECONDS = 120.0


@pytest.mark.deadline(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 1), (2, 4), (3, 3), (4, 4)])
def test_laws(tmp_path: Path, num_instances: int, num_replicas: int) -> None:
    """Every law of sharding_laws.py, on every instance."""
    counts = run_world(
        sharding_laws.run_all,
        tmp_path,
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [len([name for name in vars(sharding_laws) if name.startswith("law_")])] * num_instances
