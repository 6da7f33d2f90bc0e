"""The sharded optimizer obeys the same laws in jobs of every size, the job of one included.

Holds popdist.optim.sharded.sharded_optimizer, popdist.optim.sharded.parameters,
popdist.optim.sharded.weight_copies, popdist.gradients.partial_gradients and popdist.optim.trust_ratio.
"""

from pathlib import Path

import pytest

from tests.contract import sharding_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.laws import laws_of
from tests.running import DEADLINE_SECONDS

NUM_LAWS = len(laws_of(sharding_laws))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all jobs see."""
    return tmp_path_factory.mktemp("jobs")


@pytest.mark.parametrize(("num_instances", "num_replicas", "apart"), [(1, 1, False), (3, 9, True), (4, 4, False)])
def test_laws(
    forked_world: ForkedWorlds,
    jobs: Path,
    num_instances: int,
    num_replicas: int,
    apart: bool,  # noqa: FBT001 - a case
) -> None:
    """Every law of sharding_laws.py, on every instance, where they share memory and where they do not.

    Two instances keep them in tests/contract/test_spawned_world.py.
    """
    counts = forked_world(
        sharding_laws.run_all,
        jobs / f"{num_instances} instances",
        apart,
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [NUM_LAWS] * num_instances


def test_laws_on_two_hosts(forked_world: ForkedWorlds, jobs: Path) -> None:
    """Every law where two and two instances share memory."""
    counts = forked_world(
        *(sharding_laws.run_all, jobs / "hosts", False),
        num_instances=4,
        num_hosts=2,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [NUM_LAWS] * 4
