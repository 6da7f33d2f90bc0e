"""The exchange of norms of parameters of which several instances have a shard.

Such an instance has some nodes of the tree over the parameter's blocks. Once in a step all instances send what
they have, for all cut parameters in one message, and each finishes the same trees.
"""

import math
from collections.abc import Mapping, Sequence
from operator import add
from typing import Final

import torch
from torch import Tensor

from popdist.errors import OptimizerError, name_instances
from popdist.groups import Group, wait_for_first_error
from popdist.optim.pieces import BLOCK, NodeSums, Piece
from popdist.sharded.parameters import ShardedParameter
from popdist.tree import Node, aligned_nodes, finish

_NUM_SUMS: Final = 2
"""Sums of squares for each parameter: one of the weights, one of the tensor that is compared with them."""


class NormExchange:
    """Exchanges norms in the steps of one optimizer."""

    def __init__(self, group: Group, sharded: Sequence[ShardedParameter]) -> None:
        self._group = group
        self._cut = [parameter for parameter in sharded if sum(map(bool, parameter.ranges)) > 1]
        self._nodes = [
            [_nodes_of(parameter, elements) for elements in parameter.ranges] for parameter in self._cut
        ]
        self._is_over = True

    def begin_step(self) -> None:
        """Begin a step, whose exchange is still to be made."""
        self._is_over = not self._cut

    def run(self, own: NodeSums) -> Mapping[Tensor, Sequence[float]]:
        """Add up sums over pieces; every instance calls it once in a step."""
        if self._is_over:
            return {}
        received = self._gather([0.0, *self._numbers_of(own)])
        if failed := [i for i, row in zip(self._group.instances, received, strict=True) if row[0]]:
            wait_for_first_error()
            raise OptimizerError(
                f"{name_instances(failed)} failed in a step (see the error there), so norms of parameters are not "
                "known"
            )
        positions = [1] * len(received)
        totals: dict[Tensor, list[float]] = {}
        for parameter, nodes_of_all in zip(self._cut, self._nodes, strict=True):
            sums: list[dict[Node, float]] = []
            for _ in range(_NUM_SUMS):
                values: dict[Node, float] = {}
                for instance, nodes in enumerate(nodes_of_all):
                    start, positions[instance] = positions[instance], positions[instance] + len(nodes)
                    values |= zip(nodes, received[instance][start : positions[instance]], strict=True)
                sums.append(values)
            if parameter.shard in own:
                totals[parameter.shard] = [finish(values, _num_blocks(parameter), add) for values in sums]
        return totals

    def end_step(self) -> None:
        """Take part in the exchange if this instance failed before it, because the others wait."""
        if not self._is_over:
            self._gather([1.0])

    def _numbers_of(self, own: NodeSums) -> list[float]:
        """The numbers that this instance sends; zeros, which nobody reads, for parameters without a gradient."""
        mine = self._group.backend.instance_index
        numbers: list[float] = []
        for parameter, nodes_of_all in zip(self._cut, self._nodes, strict=True):
            none = [[0.0] * len(nodes_of_all[mine])] * _NUM_SUMS
            numbers += [number for values in own.get(parameter.shard, none) for number in values]
        return numbers

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        self._is_over = True
        width = 1 + max(
            _NUM_SUMS * sum(len(nodes[instance]) for nodes in self._nodes)
            for instance in range(len(self._group.instances))
        )
        device = self._cut[0].whole.device
        sent = torch.zeros(width, dtype=torch.float64)
        sent[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        with self._group.doing(f"the norms of {len(self._cut)} parameters"):
            rows: list[list[float]] = self._group.backend.all_gather(sent.to(device)).tolist()
        return rows


def pieces_of(sharded: Sequence[ShardedParameter]) -> dict[Tensor, Piece]:
    """The piece of the whole parameter that each shard of this instance is."""
    return {
        parameter.shard: Piece(position=position, elements=parameter.mine, num_elements=parameter.whole.numel())
        for position, parameter in enumerate(sharded)
        if parameter.mine
    }


def _num_blocks(parameter: ShardedParameter) -> int:
    return math.ceil(parameter.whole.numel() / BLOCK)


def _nodes_of(parameter: ShardedParameter, elements: range) -> list[Node]:
    if not elements:
        return []
    return aligned_nodes(elements.start // BLOCK, math.ceil(elements.stop / BLOCK), _num_blocks(parameter))
