"""Weights that are cut over instances learn what whole ones do, and their bits depend on the mapping alone.

Holds popdist.ground.local_tensors, popdist.gradients.clipping and popdist.data.shard_randomness.
"""

from typing import Any

import pytest
import torch

from tests.contract import dtensor_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS
from tests.torch_names import HAS_FSDP_ON_CPU, needs_fsdp

WAYS = ("plain", "sequence", *(["fully sharded"] if HAS_FSDP_ON_CPU else []))


def assert_close(found: list[Any], expected: list[Any]) -> None:
    """Each norm, gradient and weight, to 1e-6."""
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@pytest.fixture
def whole(forked_world: ForkedWorlds) -> dict[str, Any]:
    """What one process comes to."""
    ((found),) = forked_world(dtensor_laws.run_ways, "whole", num_instances=1, timeout_seconds=DEADLINE_SECONDS)
    return dict(found)


@pytest.mark.parametrize(("num_instances", "tensor"), [(2, 2), (4, 1), (4, 2), (4, 4)])
def test_cut_weights_learn_what_one_process_does(
    forked_world: ForkedWorlds, whole: dict[str, Any], num_instances: int, tensor: int
) -> None:
    """Of a replica and of several, whose same parts are equal; and on two hosts with the same bits as on one."""
    found = forked_world(
        dtensor_laws.run_ways,
        *WAYS,
        num_instances=num_instances,
        tensor=tensor,
        timeout_seconds=DEADLINE_SECONDS,
    )

    for instance, ways in enumerate(found):
        for way, (steps, digest) in ways.items():
            assert_close(steps, whole["whole" + way.removeprefix(way.split(",")[0])][0])
            assert digest == found[instance % tensor][way][1]
    if (num_instances, tensor) == (4, 2):
        apart = forked_world(
            dtensor_laws.run_ways,
            *WAYS,
            num_instances=4,
            tensor=2,
            num_hosts=2,
            timeout_seconds=DEADLINE_SECONDS,
        )
        assert [{way: it[1] for way, it in ways.items()} for ways in apart] == [
            {way: it[1] for way, it in ways.items()} for ways in found
        ]


@needs_fsdp
@pytest.mark.parametrize("backend", ["popdist", "gloo"])
def test_fully_sharded_models_are_clipped_alone(
    forked_world: ForkedWorlds, whole: dict[str, Any], backend: str
) -> None:
    """Over all instances, and over copies of shards; ReplicatedModel refuses both by name."""
    found = forked_world(dtensor_laws.run_alone, backend, num_instances=4, timeout_seconds=DEADLINE_SECONDS)

    for instance in found:
        for steps in instance:
            assert_close([it[:] for it in steps], whole["whole"][0])


@needs_fsdp
def test_layers_are_cut_and_fully_sharded(forked_world: ForkedWorlds, whole: dict[str, Any]) -> None:
    """Over the instances of each replica, and over the replicas; what shards of a stage have alike counts once."""
    found = forked_world(dtensor_laws.run_crossed, num_instances=4, tensor=2, timeout_seconds=DEADLINE_SECONDS)

    for steps in found:
        assert_close(steps, whole["whole"][0])


def test_norms_where_the_program_makes_the_mesh(forked_world: ForkedWorlds) -> None:
    """Of two instances that share a replica, nobody knows how."""
    forked_world(dtensor_laws.clip_without_mesh, num_instances=2, timeout_seconds=DEADLINE_SECONDS)


def test_stages_and_shards_are_clipped_together(forked_world: ForkedWorlds) -> None:
    """By the norm that torch finds of all of them in one process; what instances have alike counts once."""
    found = forked_world(
        dtensor_laws.clip_stages, num_instances=4, tensor=2, pipeline=2, timeout_seconds=DEADLINE_SECONDS
    )

    for norms in found:
        for left, right in norms:
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9)


def test_weights_that_shards_should_have_alike_are_compared(forked_world: ForkedWorlds) -> None:
    """Of one replica."""
    forked_world(dtensor_laws.differ, num_instances=2, tensor=2, timeout_seconds=DEADLINE_SECONDS)


def test_what_cannot_be_shared_is_refused(forked_world: ForkedWorlds) -> None:
    """By name, on all instances; the next step works."""
    forked_world(dtensor_laws.run_refusals, num_instances=4, tensor=2, timeout_seconds=DEADLINE_SECONDS)


def test_parts_draw_their_own_numbers(forked_world: ForkedWorlds) -> None:
    """Those that instances of a replica have alike draw the same ones, other replicas draw others; all follow."""
    found = forked_world(dtensor_laws.draw, num_instances=4, tensor=2, timeout_seconds=DEADLINE_SECONDS)

    for drawn in found:
        assert all(torch.equal(drawn[name], drawn[f"{name} again"]) for name in drawn if "again" not in name)
        assert 0 < (drawn["cut"] == 0).sum() < drawn["cut"].numel()
        assert not torch.equal(drawn["plain"], drawn["plain, after all"])
    for name in ("plain", "copied", "plain, after all"):
        assert torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], found[2][name])
    for name in ("cut", "in its region", "generator"):
        assert not torch.equal(found[0][name], found[1][name])
        assert torch.equal(found[0][name], found[2][name]) is (name == "generator")
