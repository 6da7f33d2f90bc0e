"""Several hosts, as the contract tells of them, on this one: the same bits, through the memory of each host."""

from pathlib import Path

import pytest

from tests.contract.on_hosts import DEADLINE_SECONDS, run_on_hosts

PROGRAM = Path(__file__).parent / "distant.py"


@pytest.mark.deadline(DEADLINE_SECONDS + 60)
@pytest.mark.parametrize(
    ("num_hosts", "num_local", "num_replicas", "num_neighbours"),
    [(2, 2, 8, 2), (2, 3, 6, 3)],
    ids=["whole nodes of the tree", "no whole nodes"],
)
def test_hosts_have_the_bits_of_one_process(
    num_hosts: int, num_local: int, num_replicas: int, num_neighbours: int
) -> None:
    """Instances of a host add in its memory where they make up a node of the tree, and else with all others."""

    def train(num_hosts: int, num_local: int) -> set[str]:
        return set(run_on_hosts(str(PROGRAM), num_hosts=num_hosts, num_local=num_local, num_replicas=num_replicas))

    ((_, alone),) = (line.split() for line in train(1, 1))

    assert train(num_hosts, num_local) == {f"{num_neighbours} {alone}\n"}
