"""The backend ``popdist`` of torch.distributed obeys torch's contract, alone and among two and three ranks.

Holds popdist.exchange.process_group.group_calls, popdist.exchange.process_group.watched_calls,
popdist.exchange.process_group.work_queue, popdist.exchange.host_memory.in_place,
popdist.exchange.host_memory.host_collectives, popdist.exchange.host_memory.host_group,
popdist.exchange.host_memory.addition and popdist.exchange.host_memory.shared_storages.
"""

import pytest

from tests.contract import process_group_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_laws(forked_world: ForkedWorlds, num_instances: int) -> None:
    """Every law of process_group_laws.py and host_memory_laws.py, on every rank."""
    counts = forked_world(
        process_group_laws.run_all, num_instances=num_instances, timeout_seconds=DEADLINE_SECONDS
    )
    assert counts == [len(process_group_laws.all_laws())] * num_instances


def test_laws_with_the_extension_on_one_rank_of_two(forked_world: ForkedWorlds) -> None:
    """What is in C and what does the same in Python understand each other, and each is right."""
    counts = forked_world(process_group_laws.run_all_mixed, num_instances=2, timeout_seconds=DEADLINE_SECONDS)
    assert counts == [len(process_group_laws.all_laws())] * 2
