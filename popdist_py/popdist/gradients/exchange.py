"""Adding the partial sums of the instances: each adds a share of the numbers and tells the others its part.

So an instance sends and receives twice what it has, however many there are, as in a ring, and the order is that of
`popdist.tree`. With several hosts whose instances make up whole nodes of the tree, the instances of a host add in
its memory first, and what goes over the network is, for each of them, twice its share of one row.

The order is that of `popdist.gradients.exchange`, and so are the bits; what is spared is telling everybody all of
the sum, which is half of what goes over the network.

An instance adds what it can of the tree over all replicas, the instances exchange those partial sums, and each
finishes the same tree: so the bits of the sum do not depend on how the replicas are dealt to instances.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from popdist.comm.backend import Backend
from popdist.gradients.rows import Rows, add_rows
from popdist.gradients.shards import in_rounds
from popdist.groups import Group
from popdist.host_memory.host_collectives import HostCollectives
from popdist.layout import ReplicaLayout
from popdist.tree import Node, TreeSum, aligned_nodes, finish

CHUNK_SIZE: Final = 1 << 20
"""Numbers of one partial sum that are exchanged at once, up to twice as many where the last would be few.

Bounds what all instances' sums take in memory.
"""

FEW: Final = 1 << 13
"""Numbers of which every instance gets all partial sums at once: one round of messages costs more than they do."""


class Sending(Protocol):
    """A set of instances that send each other tensors."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every instance's ``tensor``, stacked."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Row *j* goes to the *j*-th instance; row *i* of the result came from the *i*-th."""


def add_instances(group: Group, layout: ReplicaLayout, own: list[Tensor]) -> None:
    """Make the first of ``own`` the sum over the partial sums of all instances, of which ``own`` are this one's.

    Raises:
        BackendError: If an instance was lost or did not come in time.
    """
    backend = group.backend
    nodes = [nodes_of(layout, instance) for instance in backend.instances]
    neighbours = None if own[0].is_cuda else backend.neighbours
    if neighbours is None or not is_whole(layout.num_local_replicas * neighbours.group.size):
        add_among(backend, nodes, own, layout.num_replicas, into=own[0])
        return
    (row,) = own
    body = len(row) - len(row) % neighbours.group.size
    _add_by_hosts(backend, neighbours, layout, row[:body])
    if body < len(row):
        add_among(backend, nodes, [row[body:]], layout.num_replicas, into=row[body:])


def nodes_of(layout: ReplicaLayout, instance: int) -> list[Node]:
    """The partial sums that ``instance`` can make of its own replicas."""
    replicas = layout.replicas_of(instance)
    return aligned_nodes(replicas.start, replicas.stop, layout.num_replicas)


def is_whole(num_replicas: int) -> bool:
    """Whether every block of so many neighbouring replicas is one node of the tree."""
    return num_replicas & (num_replicas - 1) == 0


def _add_by_hosts(backend: Backend, neighbours: HostCollectives, layout: ReplicaLayout, row: Tensor) -> None:
    """Inside each host, then between the instances that have the same place on their hosts, then back."""
    num_local, place = neighbours.group.size, neighbours.group.rank
    shares = row.view(num_local, -1).unbind()
    mine = torch.empty_like(shares[0])
    neighbours.reduce_scatter(mine, shares, "sum")
    peers = backend.subgroup(tuple(range(place, layout.num_instances, num_local)))
    block = layout.num_local_replicas * num_local
    nodes = [
        aligned_nodes(first, first + block, layout.num_replicas) for first in range(0, layout.num_replicas, block)
    ]
    add_among(peers, nodes, [mine], layout.num_replicas, into=mine)
    neighbours.all_gather(shares, mine)


def add_among(
    sending: Sending, nodes: list[list[Node]], own: Sequence[Tensor], num_replicas: int, into: Tensor
) -> None:
    """The sum over the members of ``sending``, of whom each has the partial sums that ``nodes`` tells.

    Args:
        sending: All call this together.
        nodes: For each member, which partial sums it has.
        own: Those of this one: rows of equal length.
        num_replicas: In the whole tree.
        into: Where the sum goes; may be one of ``own``.

    Raises:
        BackendError, RuntimeError: If an instance was lost or did not come in time.
    """
    size = -(-len(into) // max(1, len(into) // CHUNK_SIZE))
    for start in range(0, len(into), max(1, size)):
        chunk = [row[start : start + size] for row in own]
        add = _add_all if len(chunk[0]) <= FEW else _add_shares
        into[start : start + size] = add(sending, nodes, chunk, num_replicas)


def _add_all(sending: Sending, nodes: list[list[Node]], own: list[Tensor], num_replicas: int) -> Tensor:
    sent = own[0].new_zeros(max(map(len, nodes)), len(own[0]))
    for row, partial in zip(sent, own, strict=False):
        row.copy_(partial)
    return add_partials(sending.all_gather(sent), nodes, num_replicas)


def _add_shares(sending: Sending, nodes: list[list[Node]], own: list[Tensor], num_replicas: int) -> Tensor:
    num_members, length = len(nodes), len(own[0])
    width = -(-length // num_members)
    sent = own[0].new_zeros(num_members, max(map(len, nodes)), width)
    for number, partial in enumerate(own):
        padded = partial.new_zeros(num_members * width)
        padded[:length] = partial
        sent[:, number] = padded.view(num_members, width)
    share = add_partials(sending.all_to_all(sent), nodes, num_replicas)
    return sending.all_gather(share).view(-1)[:length]


def add_partials(received: Tensor, nodes: list[list[Node]], num_replicas: int) -> Tensor:
    """The sum of the partial sums that stand in ``received`` by member and place; it may change them."""
    partials = {
        node: received[member, place] for member, owned in enumerate(nodes) for place, node in enumerate(owned)
    }
    return finish(partials, num_replicas, Tensor.add_)


NEAR: Final = 16
"""Runs with fewer numbers than this between them go as one: between slots there are fewer, and nobody's."""


def joined(runs: Sequence[range]) -> list[range]:
    """``runs`` of numbers in a row, ascending; those that are near each other as one."""
    found: list[range] = []
    for run in sorted((it for it in runs if it), key=lambda it: it.start):
        if found and run.start - found[-1].stop < NEAR:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def scatter_sum(
    group: Group, layout: ReplicaLayout, own: Sequence[Tensor], wanted: Sequence[Sequence[range]]
) -> None:
    """Make what this instance wants of the first of ``own`` the sum over the partial sums of all instances.

    What stands elsewhere in it is nothing in particular afterwards.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
        own: This instance's partial sums, as `popdist.gradients.exchange.nodes_of` names them.
        wanted: For each instance the runs of numbers that it wants, without overlap.

    Raises:
        BackendError: If an instance was lost or did not come in time.
    """
    backend = group.backend
    neighbours = None if own[0].is_cuda else backend.neighbours
    if neighbours is not None and not is_whole(layout.num_local_replicas * neighbours.group.size):
        neighbours = None
    rounds = [in_rounds(runs, max(1, CHUNK_SIZE // len(wanted))) for runs in wanted]
    add = _Among(backend, layout) if neighbours is None else _ByHosts(backend, neighbours, layout)
    for number in range(max(map(len, rounds))):
        runs = [it[number] if number < len(it) else [] for it in rounds]
        mine = runs[backend.instance_index]
        total = add(own, runs, max(sum(map(len, it)) for it in runs))
        lengths = [len(it) for it in mine]
        for run, part in zip(mine, total[: sum(lengths)].split(lengths), strict=True):
            own[0][run.start : run.stop] = part


class _Among:
    """Everybody sends to everybody."""

    def __init__(self, backend: Backend, layout: ReplicaLayout) -> None:
        self._backend = backend
        self._num_replicas = layout.num_replicas
        self._nodes = [nodes_of(layout, instance) for instance in backend.instances]

    def __call__(self, own: Sequence[Tensor], runs: Sequence[Sequence[range]], width: int) -> Tensor:
        sent = own[0].new_zeros(len(runs), max(map(len, self._nodes)), width)
        for number, row in enumerate(own):
            for into, wanted in zip(sent[:, number], runs, strict=True):
                _take(row, wanted, into)
        return add_partials(self._backend.all_to_all(sent), self._nodes, self._num_replicas)


class _ByHosts:
    """In the memory of each host first, then between the instances that have the same place on their hosts."""

    def __init__(self, backend: Backend, neighbours: HostCollectives, layout: ReplicaLayout) -> None:
        self._neighbours = neighbours
        self._num_replicas = layout.num_replicas
        self._num_local = neighbours.group.size
        self._peers = backend.subgroup(backend.instances[neighbours.group.rank :: self._num_local])
        block = layout.num_local_replicas * self._num_local
        self._nodes: list[list[Node]] = [
            aligned_nodes(first, first + block, layout.num_replicas)
            for first in range(0, layout.num_replicas, block)
        ]

    def __call__(self, own: Sequence[Tensor], runs: Sequence[Sequence[range]], width: int) -> Tensor:
        (row,) = own
        places = row.new_zeros(self._num_local, len(self._nodes), width)
        for instance, wanted in enumerate(runs):
            _take(row, wanted, places[instance % self._num_local, instance // self._num_local])
        mine = row.new_empty(len(self._nodes), 1, width)
        self._neighbours.reduce_scatter(mine.view(-1), places.view(self._num_local, -1).unbind(), "sum")
        return add_partials(self._peers.all_to_all(mine), self._nodes, self._num_replicas)


def _take(row: Tensor, runs: Sequence[range], into: Tensor) -> None:
    """Copy ``runs`` of ``row`` to the beginning of ``into``."""
    if runs:
        torch.cat([row[it.start : it.stop] for it in runs], out=into[: sum(map(len, runs))])


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
