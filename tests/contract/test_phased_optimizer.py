"""The optimizer of a model in phases among several instances: tests/unit has it in a job of one.

Holds popdist.parallel.phased_optimizer.
"""

from pathlib import Path

from tests.contract import phased_optimizer_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

NUM_LAWS = len([name for name in vars(phased_optimizer_laws) if name.startswith("law_")])


def test_laws(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """Every law of phased_optimizer_laws.py, on every instance."""
    counts = forked_world(
        phased_optimizer_laws.run_all, disk_folder, num_instances=2, timeout_seconds=DEADLINE_SECONDS
    )
    assert counts == [NUM_LAWS] * 2
