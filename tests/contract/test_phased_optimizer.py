"""The optimizer of a model in phases among several instances: tests/unit has it in a job of one.

Holds popdist.phases.phased_optimizer.
"""

from pathlib import Path

from tests.contract import phased_optimizer_laws
from tests.contract.forked_calls import ForkedWorlds


def test_laws(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """Every law of phased_optimizer_laws.py, on every instance."""
    forked_world.keep_laws(phased_optimizer_laws, disk_folder, num_instances=2)
