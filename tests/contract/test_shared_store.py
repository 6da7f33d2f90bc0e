"""The instances of a host share one store; an error of one of them is raised on all."""

from pathlib import Path

from tests.contract import phased_checkpoints, store_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


def test_two_instances_share_a_store(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """Each reads what the other wrote, in a folder and in host memory; other folders are other stores."""
    told = forked_world(
        store_laws.run_all, disk_folder, num_instances=2, num_replicas=2, timeout_seconds=DEADLINE_SECONDS
    )

    assert told == [([0, 1], [[2, 2], [2, 2]]), ([0, 1], [[1, 1], [1, 1]])]
    assert sorted(it.name for it in disk_folder.iterdir()) == ["0", "1", "shared"]


def test_every_host_loads_into_its_own_store(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """The first instance saves and reads, and a run that went back comes to the same bits everywhere."""
    told = forked_world(
        phased_checkpoints.save_and_go_back, disk_folder, num_instances=2, timeout_seconds=DEADLINE_SECONDS
    )

    (first, second), (others, last) = (found["ends"] for found in told)
    assert first == second == others == last


def test_parts_of_layers_load_into_whole_ones(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """The instances of a replica save from stores of their own, and what they saved has all elements."""
    told = forked_world(
        phased_checkpoints.save_in_parts,
        disk_folder,
        num_instances=2,
        tensor=2,
        timeout_seconds=DEADLINE_SECONDS,
    )
    (whole,) = forked_world(
        phased_checkpoints.load_whole, disk_folder, num_instances=1, timeout_seconds=DEADLINE_SECONDS
    )

    for found in told:
        assert found["ends"][0] == found["ends"][1]
    assert whole["saved"] == [told[0]["saved"], told[0]["saved"]]
