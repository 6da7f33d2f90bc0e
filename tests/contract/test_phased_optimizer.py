"""The optimizer of a model in phases obeys the same laws in jobs of every size.

Holds popdist.parallel.phased_optimizer and popdist.parallel.stored_pieces.
"""

from pathlib import Path

import pytest

from tests.contract import phased_optimizer_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

NUM_LAWS = len([name for name in vars(phased_optimizer_laws) if name.startswith("law_")])


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 1), (2, 2)])
def test_laws(forked_world: ForkedWorlds, disk_folder: Path, num_instances: int, num_replicas: int) -> None:
    """Every law of phased_optimizer_laws.py, on every instance."""
    counts = forked_world(
        *(phased_optimizer_laws.run_all, disk_folder),
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [NUM_LAWS] * num_instances
