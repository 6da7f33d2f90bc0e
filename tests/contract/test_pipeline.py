"""Torch's schedules run over a replica of several instances, each of which has some of the stages.

Holds popdist.step.training.pipeline.
"""

import pytest

from tests.contract import pipeline_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.laws import laws_of
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize("pipeline", [2, 4])
def test_laws(forked_world: ForkedWorlds, pipeline: int) -> None:
    """Every law of pipeline_laws.py, on every instance: of two replicas with two stages, and of one with four."""
    counts = forked_world(
        pipeline_laws.run_all, num_instances=4, pipeline=pipeline, timeout_seconds=DEADLINE_SECONDS
    )
    assert counts == [len(laws_of(pipeline_laws))] * 4


def test_the_bits_do_not_depend_on_where_replicas_lie(forked_world: ForkedWorlds) -> None:
    """Two replicas of two stages with dropout, on one host and on two; nor on a sharded optimizer."""
    digests = [
        forked_world(
            pipeline_laws.digests_of_training,
            num_instances=4,
            pipeline=2,
            num_hosts=num_hosts,
            timeout_seconds=DEADLINE_SECONDS,
        )
        for num_hosts in (1, 2)
    ]
    assert digests[0] == digests[1]
    assert digests[0][:2] == digests[0][2:]  # the replicas have the same stages
    assert digests[0][0] != digests[0][1]
    assert all(plain == sharded for plain, sharded in digests[0])


def test_stages_are_cut_into_shards(forked_world: ForkedWorlds) -> None:
    """One replica of two stages with two shards each."""
    forked_world(
        pipeline_laws.gradients_of_shards,
        num_instances=4,
        tensor=2,
        pipeline=2,
        timeout_seconds=DEADLINE_SECONDS,
    )


def test_instances_with_several_whole_replicas(forked_world: ForkedWorlds) -> None:
    """The same call where a replica is not shared."""
    forked_world(pipeline_laws.whole_replicas, num_instances=2, num_replicas=4, timeout_seconds=DEADLINE_SECONDS)
