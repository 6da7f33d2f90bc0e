"""Sums of gradients that wait in a store, against the tree over all of them.

Holds popdist.phases.phased_sums.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.ground.layout import ReplicaLayout
from popdist.ground.tree import Node, TreeSum, aligned_nodes, finish
from popdist.phases.phase_memory import MemoryPlace
from popdist.phases.phased_sums import PieceGradient, PieceSum, held_weights, merges_of

SIZE = 5
PLACE = MemoryPlace("sum", 0)


class Plane:
    """Where a sum waits."""

    held: Tensor | None = None


class Memory:
    """The room from which sums go to their planes."""

    def __init__(self, gradient: PieceGradient) -> None:
        self._room = gradient.make()

    def room(self, place: MemoryPlace) -> Tensor:
        """The room, from which another sum is gone."""
        assert place == PLACE
        return self._room.fill_(255)

    def load(self, place: MemoryPlace, plane: Plane) -> Tensor:
        """The sum, which is not read twice."""
        held, plane.held = plane.held, None
        assert held is not None
        return self.room(place).copy_(held)

    def write_behind(self, place: MemoryPlace, plane: Plane) -> None:
        """A copy."""
        assert place == PLACE
        plane.held = self._room.clone()


def sums_of(layout: ReplicaLayout, instance: int, accumulation: int, filled: set[int]) -> list[Tensor]:
    """The nodes that an instance makes of gradients that follow from their place in the job."""
    parameter = Parameter(torch.zeros(SIZE))
    gradient = PieceGradient([("it", parameter)])
    merges, num_planes = merges_of(layout, instance, accumulation)
    first = instance * len(merges)
    planes: Any = [Plane() for _ in range(num_planes)]
    memory: Any = Memory(gradient)
    own = PieceSum(gradient, merges, lambda it: weight_at(first + it) / 3.0, PLACE, planes, memory)
    mine = sorted(filled & {*range(len(merges))})
    for number in mine[:-1]:
        parameter.grad = gradient_at(first + number)
        own.push(number, number + 1)
    if mine:
        parameter.grad = gradient_at(first + mine[-1])
    return [gradient.gradient(it).slots[0] for it in own.total(mine[-1] if mine else -1)]


def gradient_at(place: int) -> Tensor:
    """A gradient whose sums depend on their order."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(place)) * 10.0 ** (place % 7)


def weight_at(place: int) -> float:
    """What a micro batch counts."""
    return float(1 + place % 4)


@pytest.mark.parametrize("has_gaps", [False, True])
def test_sums_are_those_of_the_tree(has_gaps: bool) -> None:  # noqa: FBT001 - of pytest
    """For each dealing of replicas, and where micro batches have no samples."""
    for num_replicas, accumulation in product((1, 2, 3, 6, 8), (1, 2, 3, 5)):
        total: TreeSum[Tensor] = TreeSum(num_replicas, torch.add)
        for replica in range(num_replicas):
            own: TreeSum[Tensor] = TreeSum(accumulation, torch.add)
            for step in range(accumulation):
                place = replica * accumulation + step
                is_empty = has_gaps and place % 2
                own.push(torch.zeros(SIZE) if is_empty else gradient_at(place) * (weight_at(place) / 3.0))
            total.push(own.total)
        for num_instances in (it for it in (1, 2, 3) if not num_replicas % it):
            layout = ReplicaLayout(num_replicas=num_replicas, num_instances=num_instances)
            nodes: dict[Node, Tensor] = {}
            number = num_replicas // num_instances * accumulation
            for instance in range(num_instances):
                block = layout.replicas_of(instance)
                filled = {it for it in range(number) if not (has_gaps and (instance * number + it) % 2)}
                found = sums_of(layout, instance, accumulation, filled)
                nodes |= dict(zip(aligned_nodes(block.start, block.stop, num_replicas), found, strict=True))
            assert torch.equal(finish(nodes, num_replicas, torch.add), total.total)


def test_weights_are_added_as_gradients_are() -> None:
    """One number for each node."""
    layout = ReplicaLayout(num_replicas=6, num_instances=2)

    *_, nodes = held_weights(layout, 0, 2, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert nodes == [(0.1 + 0.2) + (0.3 + 0.4), 0.5 + 0.6]
    assert [*held_weights(layout, 1, 1, [1.0, 2.0, 3.0])] == [[1.0], [1.0, 2.0], [1.0, 2.0 + 3.0]]
