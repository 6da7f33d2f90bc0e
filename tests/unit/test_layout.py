"""Replicas are dealt to instances in contiguous blocks of the same size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.layout import Parallelism, ReplicaLayout


@st.composite
def layouts(draw: st.DrawFn) -> ReplicaLayout:
    """Any layout."""
    num_instances = draw(st.integers(1, 50))
    return ReplicaLayout(num_instances=num_instances, num_replicas=num_instances * draw(st.integers(1, 50)))


@given(layouts())
def test_every_replica_belongs_to_one_instance(layout: ReplicaLayout) -> None:
    """The blocks of all instances, one after the other, are all replicas in order."""
    blocks = [layout.replicas_of(instance) for instance in range(layout.num_instances)]
    assert [replica for block in blocks for replica in block] == list(range(layout.num_replicas))
    assert {len(block) for block in blocks} == {layout.num_local_replicas}


@pytest.mark.parametrize(
    ("num_instances", "num_replicas", "words"),
    [
        (0, 1, "at least 1"),
        (1, 0, "at least 1"),
        (-2, 4, "at least 1"),
        (4, 6, "does not divide"),
        (4, 2, "divide"),
    ],
)
def test_what_is_no_layout_is_refused(num_instances: int, num_replicas: int, words: str) -> None:
    """Counts below 1 and uneven splits are errors."""
    with pytest.raises(ValueError, match=words):
        ReplicaLayout(num_instances=num_instances, num_replicas=num_replicas)


@pytest.mark.parametrize("number", [-1, 2])
def test_there_is_no_number_outside(number: int) -> None:
    """An instance that is not there is an error, not an empty block."""
    layout = ReplicaLayout(num_instances=2, num_replicas=2)
    with pytest.raises(ValueError, match="is not one of 0 to 1"):
        layout.replicas_of(number)


def test_places_in_words() -> None:
    """Instances of one replica, stage or shard have that in common; without a mesh there are only parts."""
    mesh = Parallelism(instances_per_replica=6, tensor=3, pipeline=2)

    assert mesh.describe([10]) == "replica 1, stage 1, shard 1"
    assert [mesh.describe(some) for some in ([0, 1, 2], [1, 4], [2, 8], [0, 10])] == [
        *("replica 0, stage 0", "replica 0, shard 1", "stage 0, shard 2", "")
    ]
    assert Parallelism(instances_per_replica=2).describe([3]) == "replica 1, part 1"
    assert [mesh.stage_of(10), Parallelism(instances_per_replica=2).stage_of(3)] == [range(9, 12), range(2, 4)]
    assert Parallelism().describe([3]) == ""
