"""Adding rows over the replicas of the whole job, in the one order of `popdist.tree`.

An instance adds what it can of the tree over all replicas, the instances exchange those partial sums, and each
finishes the same tree: so the bits of the sum do not depend on how the replicas are dealt to instances.
"""

from typing import Final

from torch import Tensor

from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.training.rows import Rows, add_rows
from popdist.tree import Node, TreeSum, aligned_nodes, finish

CHUNK_SIZE: Final = 1 << 20
"""Numbers of one partial sum that are exchanged at once: bounds what all instances' sums take in memory."""


class ReplicaTree:
    """The sum of rows over all replicas of the job, while this instance's replicas bring theirs.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
    """

    def __init__(self, group: Group, layout: ReplicaLayout) -> None:
        self._group = group
        self._layout = layout
        first = layout.replicas_of(group.backend.instance_index).start
        self._tree: TreeSum[Rows] = TreeSum(layout.num_replicas, add_rows, start=first)

    def push(self, rows: Rows) -> None:
        """Take the rows of the next local replica, which then belong to this object."""
        self._tree.push(rows)

    def finish(self) -> Rows:
        """The sum over all replicas, the same on every instance, when every local replica has brought its rows.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        own = self._tree.nodes
        if self._layout.num_instances == 1:
            return finish(own, self._layout.num_replicas, add_rows)
        for row_of_nodes in zip(*(rows for rows in own.values()), strict=True):
            add_instances(self._group, self._layout, list(row_of_nodes))
        return next(iter(own.values()))


def add_instances(group: Group, layout: ReplicaLayout, own: list[Tensor]) -> None:
    """Make the first of ``own`` the sum over the partial sums of all instances, of which ``own`` are this one's.

    Raises:
        BackendError: If an instance was lost or did not come in time.
    """
    nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
    most_nodes, total = max(map(len, nodes)), own[0]
    for start in range(0, len(total), CHUNK_SIZE):
        chunk = total[start : start + CHUNK_SIZE]
        sent = chunk.new_zeros(most_nodes, len(chunk))
        for row, partial in zip(sent, own, strict=False):
            row.copy_(partial[start : start + CHUNK_SIZE])
        received = group.backend.all_gather(sent)
        partials = {
            node: received[instance, index]
            for instance, owned in enumerate(nodes)
            for index, node in enumerate(owned)
        }
        chunk.copy_(finish(partials, layout.num_replicas, Tensor.add_))


def nodes_of(layout: ReplicaLayout, instance: int) -> list[Node]:
    """The partial sums that ``instance`` can make of its own replicas."""
    replicas = layout.replicas_of(instance)
    return aligned_nodes(replicas.start, replicas.stop, layout.num_replicas)
