"""Models of which a few layers at a time are in memory: they learn what they learn in memory, bit by bit.

Holds popdist.phases.phased_sums, popdist.phases.phase_memory, popdist.phases.phased_layers,
popdist.phases.phased_calls, popdist.phases.phased_model, popdist.phases.phased_run and popdist.phases.phased_step.
"""

from pathlib import Path

import pytest

from tests.contract import layer_zoo, phased_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 1), (2, 6)])
def test_laws(forked_world: ForkedWorlds, disk_folder: Path, num_instances: int, num_replicas: int) -> None:
    """Every law of phased_laws.py, on every instance."""
    forked_world.keep_laws(phased_laws, disk_folder, num_instances=num_instances, num_replicas=num_replicas)


def test_four_instances(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """The laws that depend on their number."""
    forked_world(phased_laws.keep_some, disk_folder, num_instances=4, timeout_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize(("num_instances", "sizes"), [(1, [(2, 3)]), (1, [(1, 1)]), (2, [(1, 3), (2, 1)])])
def test_layers(
    forked_world: ForkedWorlds, disk_folder: Path, num_instances: int, sizes: list[tuple[int, int]]
) -> None:
    """Layers as people write them learn what they learn in memory, or are refused by name."""
    found = forked_world(
        layer_zoo.keep_the_law,
        disk_folder,
        sizes,
        num_instances=num_instances,
        timeout_seconds=4 * DEADLINE_SECONDS,
    )

    assert found == [{}] * num_instances


def test_hosts(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """Two hosts of two instances, with a store each."""
    forked_world(
        phased_laws.train_on_hosts,
        disk_folder,
        num_instances=4,
        num_replicas=4,
        num_hosts=2,
        timeout_seconds=DEADLINE_SECONDS,
    )


def test_parts(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """Two replicas of two instances, which have parts of each layer."""
    forked_world(
        phased_laws.train_in_parts, disk_folder, num_instances=4, tensor=2, timeout_seconds=DEADLINE_SECONDS
    )


def test_stages_are_refused(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """Phases are of whole models."""
    forked_world(
        phased_laws.refuse_stages, disk_folder, num_instances=2, pipeline=2, timeout_seconds=DEADLINE_SECONDS
    )
