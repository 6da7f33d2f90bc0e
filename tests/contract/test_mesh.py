"""Replicas that several instances share: a mesh of torch's, and numbers that are those of replicas."""

import re

import pytest

import popdist
from popdist.ground.contract import Contract
from popdist.ground.layout import Parallelism
from tests.contract import mesh_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("num_instances", "tensor", "pipeline"), [(2, 2, 1), (4, 2, 1), (4, 1, 2), (1, 1, 1), (2, 1, 1)]
)
def test_laws(forked_world: ForkedWorlds, num_instances: int, tensor: int, pipeline: int) -> None:
    """Every law of mesh_laws.py; replicas that nobody shares are a case of them."""
    forked_world.keep_laws(mesh_laws, num_instances=num_instances, tensor=tensor, pipeline=pipeline)


def test_copies_of_a_model_have_the_bits_of_one(forked_world: ForkedWorlds) -> None:
    """What all instances of a replica compute alike is what one instance for each replica computes."""
    alone, shared = (
        forked_world(mesh_laws.train_copies, num_instances=number, tensor=tensor, timeout_seconds=DEADLINE_SECONDS)
        for number, tensor in ((2, 1), (4, 2))
    )
    assert shared == alone * 2


def test_a_lost_instance_is_named_with_its_part(forked_world: ForkedWorlds) -> None:
    """In a step by those that hold the same part of other replicas; by all as the instance that it is."""
    first, second, third, _ = forked_world(
        mesh_laws.lose_one, num_instances=4, tensor=2, victim=3, timeout_seconds=DEADLINE_SECONDS
    )
    assert re.search(r"replica 0 \(stage 0, shard 1\), in .*replica 1 \(stage 0, shard 1\)", second[0])
    assert [len(first), len(second), len(third)] == [1, 2, 1]
    assert all(re.search(r"in barrier\(\): .*instance", it[-1]) for it in (first, second, third))


def test_a_mesh_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to start the program with, and what to write."""
    contract = Contract(num_instances=4, num_replicas=2, parallelism=Parallelism(instances_per_replica=2))
    for name, value in contract.to_env().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        popdist.ContractError, match=r"--instances-per-replica 2, .*--parallelism tensor=T.*, 2\), mesh"
    ):
        popdist.device_mesh()
