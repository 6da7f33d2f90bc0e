"""Gradients in memory that all instances of a host map, and their sum, which is made there."""

from typing import Self

import torch
from torch import Tensor

from popdist.errors import BackendError
from popdist.host_memory.group import HostGroup, SharedBlock
from popdist.layout import ReplicaLayout
from popdist.training.flat_gradients import FlatGradients, GradientRows
from popdist.training.reduction import nodes_of
from popdist.training.rows import Rows
from popdist.tree import finish


class SharedRows:
    """Room for the parts of the job's sum that the instances make; each is mapped by all.

    Args:
        host: The instances, all of one host.
        layout: Which replicas each of them owns.
        gradients: The same on all instances.
        block: Room for the parts of each.

    Attributes:
        mine: This instance's parts, as `popdist.training.reduction.nodes_of` names them.
    """

    def __init__(
        self, host: HostGroup, layout: ReplicaLayout, gradients: FlatGradients, block: SharedBlock
    ) -> None:
        nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        parts = [
            [_rows_in(block.of(instance), gradients, position) for position, _ in enumerate(owned)]
            for instance, owned in enumerate(nodes)
        ]
        every_part = [part for owned in parts for part in owned]
        numbers = {node: number for number, node in enumerate(node for owned in nodes for node in owned)}
        pairs: list[tuple[int, int]] = []

        def add(left: int, right: int) -> int:
            pairs.append((left, right))
            return left

        finish(numbers, layout.num_replicas, add)
        self.mine = [gradients.make_rows(part) for part in parts[host.rank]]
        self._over = 1.0
        self._reductions = [
            host.reduction(
                [part[kind] for part in every_part],
                outputs=[owned[0][kind] for owned in parts],
                pairs=pairs,
                then=self._divide,
            )
            for kind in range(len(gradients.kinds))
        ]

    @classmethod
    def allocate(cls, host: HostGroup, layout: ReplicaLayout, gradients: FlatGradients) -> Self | None:
        """Shared room for ``gradients``; None, on every instance, where there is not enough. All call it."""
        num_parts = max(len(nodes_of(layout, instance)) for instance in range(layout.num_instances))
        try:
            block = host.allocate(num_parts * _num_bytes(gradients))
        except BackendError:
            return None
        return cls(host, layout, gradients, block)

    def reduce(self, over: float) -> GradientRows:
        """The sum of all parts divided by ``over``, in the memory of this instance's first one; all call it.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        self._over = over
        for reduction in self._reductions:
            reduction.run()
        return self.mine[0]

    def _divide(self, piece: Tensor) -> None:
        if self._over != 1:
            piece.div_(self._over)


def _num_bytes(gradients: FlatGradients) -> int:
    return sum(_room(it.size, it.dtype) for it in gradients.kinds)


def _room(size: int, dtype: torch.dtype) -> int:
    """Bytes of a row, rounded up so that the next one begins at a line of cache."""
    return -(-size * dtype.itemsize // 64) * 64


def _rows_in(memory: Tensor, gradients: FlatGradients, position: int) -> Rows:
    """The rows of an instance's part at ``position`` of its ``memory``."""
    start, rows = position * _num_bytes(gradients), []
    for kind in gradients.kinds:
        rows.append(memory[start : start + kind.size * kind.dtype.itemsize].view(kind.dtype))
        start += _room(kind.size, kind.dtype)
    return rows
