"""Adding rows over the replicas of the whole job, in the one order of `popdist.tree`.

An instance adds what it can of the tree over all replicas, the instances exchange those partial sums, and each
finishes the same tree: so the bits of the sum do not depend on how the replicas are dealt to instances.
"""

from popdist.gradients.exchange import add_instances
from popdist.gradients.rows import Rows, add_rows
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.tree import TreeSum, finish


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
