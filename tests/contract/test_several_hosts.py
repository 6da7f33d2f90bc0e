"""Several hosts, as the contract tells of them, on this one: the same bits, through the memory of each host."""

import pytest

from tests.contract import batch_norm_laws, header_losses, several_hosts_training
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("num_hosts", "num_local", "num_replicas", "num_on_host"),
    [(2, 2, 8, 2), (2, 3, 6, 3)],
    ids=["whole nodes of the tree", "no whole nodes"],
)
def test_hosts_have_the_bits_of_one_process(
    forked_world: ForkedWorlds, num_hosts: int, num_local: int, num_replicas: int, num_on_host: int
) -> None:
    """Instances of a host add in its memory where they make up a node of the tree, and else with all others."""

    def train(num_hosts: int, num_local: int) -> list[tuple[int, str]]:
        return forked_world(
            several_hosts_training.train,
            num_instances=num_hosts * num_local,
            num_replicas=num_replicas,
            num_hosts=num_hosts,
            timeout_seconds=DEADLINE_SECONDS,
        )

    ((_, alone),) = train(1, 1)

    assert train(num_hosts, num_local) == [(num_on_host, alone)] * (num_hosts * num_local)


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(2, 4), (4, 4)])
def test_batch_norm_groups_span_hosts(forked_world: ForkedWorlds, num_instances: int, num_replicas: int) -> None:
    """One batch, clear errors and no hang, where the replicas of a group are on two hosts."""
    forked_world.keep_laws(batch_norm_laws, num_instances=num_instances, num_replicas=num_replicas, num_hosts=2)


def test_headers_of_who_is_interrupted_or_has_left(forked_world: ForkedWorlds) -> None:
    """A wait goes on after Ctrl-C, and nothing is sent after the end."""
    told = forked_world(header_losses.run, num_instances=3, num_hosts=3, timeout_seconds=DEADLINE_SECONDS)
    assert told == [f"instance {it}, in too late: instance {it} has left the job" for it in range(3)]
