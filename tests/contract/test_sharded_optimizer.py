"""The sharded optimizer obeys the same laws in jobs of every size, the job of one included."""

from pathlib import Path

import pytest

from popdist.testing import run_world
from tests.contract import sharding_laws
from tests.contract.forking import ForkedWorlds
from tests.contract.on_hosts import run_on_hosts

DEADLINE_SECONDS = 120.0
NUM_LAWS = len([name for name in vars(sharding_laws) if name.startswith("law_")])


@pytest.mark.deadline(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize(
    ("num_instances", "num_replicas", "apart"),
    [(1, 1, False), (2, 4, False), (3, 3, False), (4, 4, False), (3, 6, True)],
)
def test_laws(
    forked_world: ForkedWorlds,
    tmp_path: Path,
    num_instances: int,
    num_replicas: int,
    apart: bool,  # noqa: FBT001 - a case
) -> None:
    """Every law of sharding_laws.py, on every instance, where they share memory and where they do not."""
    world = run_world if num_instances == 2 else forked_world
    counts = world(
        sharding_laws.run_all,
        tmp_path,
        apart,
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [NUM_LAWS] * num_instances


@pytest.mark.deadline(DEADLINE_SECONDS + 20)
def test_laws_on_two_hosts(tmp_path: Path) -> None:
    """Every law where two and two instances share memory."""
    texts = run_on_hosts(
        "-m", "tests.contract.sharding_laws", str(tmp_path), num_hosts=2, num_local=2, num_replicas=4
    )
    assert texts == [f"{NUM_LAWS}\n"] * 4
