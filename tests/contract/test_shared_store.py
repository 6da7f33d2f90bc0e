"""The instances of a host share one store; an error of one of them is raised on all."""

from pathlib import Path

from tests.contract import store_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


def test_two_instances_share_a_store(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Each reads what the other wrote, in a folder and in host memory; other folders are other stores."""
    told = forked_world(
        store_laws.run_all, tmp_path, num_instances=2, num_replicas=2, timeout_seconds=DEADLINE_SECONDS
    )

    assert told == [([0, 1], [[2, 2], [2, 2]]), ([0, 1], [[1, 1], [1, 1]])]
    assert sorted(it.name for it in tmp_path.iterdir()) == ["0", "1", "shared"]
