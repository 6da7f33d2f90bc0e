"""What poptorch trains does not depend on the split into instances.

Holds poptorch.executor.compiled_model.
"""

import pytest
import torch
from torch import Tensor

from tests.contract import poptorch_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


def _train(
    forked_world: ForkedWorlds, num_instances: int, *, shards: bool
) -> list[tuple[str, list[Tensor], dict[str, Tensor]]]:
    return forked_world(
        poptorch_laws.train,
        shards,
        num_instances=num_instances,
        num_replicas=poptorch_laws.NUM_REPLICAS,
        timeout_seconds=DEADLINE_SECONDS,
    )


@pytest.mark.parametrize("shards", [False, True])
def test_every_split_trains_the_same(forked_world: ForkedWorlds, shards: bool) -> None:  # noqa: FBT001 - a parameter
    """Weights, each replica's losses, the optimizer's state, sharded or not, with dropout; and statistics.

    Those of the job's replica 0 are the module's on all instances.
    """
    ((checksum, losses, state),) = _train(forked_world, 1, shards=False)
    for num_instances in (2, 4):
        found = _train(forked_world, num_instances, shards=shards)
        assert {one for one, _, _ in found} == {checksum}
        own = [loss for _, part, _ in found for loss in part]
        assert all(map(torch.equal, own, losses))
        assert len(own) == len(losses)
        for _, _, other in found:
            assert other.keys() == state.keys()
            assert all(torch.equal(other[name], state[name]) for name in state)
