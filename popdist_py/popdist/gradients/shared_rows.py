"""Gradients in memory that all instances of a host map, and their sum, which is made there."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from popdist.gradients.exchange import nodes_of
from popdist.gradients.flat_gradients import FlatGradients, GradientRows
from popdist.gradients.rows import Rows
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.shared_blocks import SharedBlock
from popdist.layout import ReplicaLayout
from popdist.tree import finish

if TYPE_CHECKING:
    from popdist.host_memory.row_reduction import Reduction


class SharedRows:
    """Room for the parts of the job's sum that the instances make.

    Args:
        host: The instances, all of one host.
        layout: Which replicas each of them owns.
        gradients: The same on all instances when they are added.
        room: This instance's memory, of :func:`num_bytes_of` bytes.

    Attributes:
        mine: This instance's parts, as `popdist.gradients.replica_tree.nodes_of` names them.
    """

    def __init__(self, host: HostGroup, layout: ReplicaLayout, gradients: FlatGradients, room: Tensor) -> None:
        self._host = host
        self._layout = layout
        self._gradients = gradients
        self.mine = [
            gradients.make_rows(_rows_in(room, gradients, position))
            for position, _ in enumerate(nodes_of(layout, host.rank))
        ]
        self._reductions: list[Reduction] = []

    def connect(self, block: SharedBlock) -> None:
        """From now on all instances' rooms, which are those of ``block``, are added."""
        nodes = [nodes_of(self._layout, instance) for instance in range(self._layout.num_instances)]
        parts = [
            [_rows_in(block.of(instance), self._gradients, position) for position, _ in enumerate(owned)]
            for instance, owned in enumerate(nodes)
        ]
        every_part = [part for owned in parts for part in owned]
        numbers = {node: number for number, node in enumerate(node for owned in nodes for node in owned)}
        pairs: list[tuple[int, int]] = []

        def add(left: int, right: int) -> int:
            pairs.append((left, right))
            return left

        finish(numbers, self._layout.num_replicas, add)
        self._reductions = [
            self._host.reduction(
                [part[kind] for part in every_part],
                outputs=[owned[0][kind] for owned in parts],
                pairs=pairs,
            )
            for kind in range(len(self._gradients.kinds))
        ]

    def reduce(self, over: float) -> GradientRows:
        """The sum of all parts divided by ``over``, in the memory of this instance's first one; all call it.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        for reduction in self._reductions:
            reduction.run(over=over)
        return self.mine[0]


def num_bytes_of(layout: ReplicaLayout, gradients: FlatGradients) -> int:
    """How much room each instance needs: the same for all."""
    num_parts = max(len(nodes_of(layout, instance)) for instance in range(layout.num_instances))
    return num_parts * _part_bytes(gradients)


def _part_bytes(gradients: FlatGradients) -> int:
    return sum(_room(it.size, it.dtype) for it in gradients.kinds)


def _room(size: int, dtype: torch.dtype) -> int:
    """Bytes of a row, rounded up so that the next one begins at a line of cache."""
    return -(-size * dtype.itemsize // 64) * 64


def _rows_in(memory: Tensor, gradients: FlatGradients, position: int) -> Rows:
    """The rows of an instance's part at ``position`` of its ``memory``."""
    start, rows = position * _part_bytes(gradients), []
    for kind in gradients.kinds:
        rows.append(memory[start : start + kind.size * kind.dtype.itemsize].view(kind.dtype))
        start += _room(kind.size, kind.dtype)
    return rows
