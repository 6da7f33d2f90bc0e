"""Adding the partial sums of the instances: each adds a share of the numbers and tells the others its part.

So an instance sends and receives twice what it has, however many there are, as in a ring, and the order is that of
`popdist.tree`. With several hosts whose instances make up whole nodes of the tree, the instances of a host add in
its memory first, and what goes over the network is, for each of them, twice its share of one row.
"""

from typing import Final

import torch
from torch import Tensor

from popdist.backends.base import Backend
from popdist.groups import Group
from popdist.host_memory.collectives import HostCollectives
from popdist.layout import ReplicaLayout
from popdist.tree import Node, aligned_nodes, finish

CHUNK_SIZE: Final = 1 << 20
"""Numbers of one partial sum that are exchanged at once: bounds what all instances' sums take in memory."""

FEW: Final = 1 << 13
"""Numbers of which every instance gets all partial sums at once: one round of messages costs more than they do."""


def add_instances(group: Group, layout: ReplicaLayout, own: list[Tensor]) -> None:
    """Make the first of ``own`` the sum over the partial sums of all instances, of which ``own`` are this one's.

    Raises:
        BackendError: If an instance was lost or did not come in time.
    """
    backend = group.backend
    nodes = [nodes_of(layout, instance) for instance in backend.instances]
    neighbours = None if own[0].is_cuda else backend.neighbours
    if neighbours is None or not is_whole(layout.num_local_replicas * neighbours.group.size):
        _add_among(backend, nodes, own, layout.num_replicas)
        return
    (row,) = own
    body = len(row) - len(row) % neighbours.group.size
    _add_by_hosts(backend, neighbours, layout, row[:body])
    if body < len(row):
        _add_among(backend, nodes, [row[body:]], layout.num_replicas)


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
    _add_among(peers, nodes, [mine], layout.num_replicas)
    neighbours.all_gather(shares, mine)


def _add_among(backend: Backend, nodes: list[list[Node]], own: list[Tensor], num_replicas: int) -> None:
    """The sum over the members of ``backend``, of whom each has the partial sums that ``nodes`` tells."""
    for start in range(0, len(own[0]), CHUNK_SIZE):
        chunk = [row[start : start + CHUNK_SIZE] for row in own]
        add = _add_all if len(chunk[0]) <= FEW else _add_shares
        add(backend, nodes, chunk, num_replicas)


def _add_all(backend: Backend, nodes: list[list[Node]], own: list[Tensor], num_replicas: int) -> None:
    sent = own[0].new_zeros(max(map(len, nodes)), len(own[0]))
    for row, partial in zip(sent, own, strict=False):
        row.copy_(partial)
    own[0].copy_(add_partials(backend.all_gather(sent), nodes, num_replicas))


def _add_shares(backend: Backend, nodes: list[list[Node]], own: list[Tensor], num_replicas: int) -> None:
    num_members, length = len(nodes), len(own[0])
    width = -(-length // num_members)
    sent = own[0].new_zeros(num_members, max(map(len, nodes)), width)
    for number, partial in enumerate(own):
        padded = partial.new_zeros(num_members * width)
        padded[:length] = partial
        sent[:, number] = padded.view(num_members, width)
    share = add_partials(backend.all_to_all(sent), nodes, num_replicas)
    own[0].copy_(backend.all_gather(share).view(-1)[:length])


def add_partials(received: Tensor, nodes: list[list[Node]], num_replicas: int) -> Tensor:
    """The sum of the partial sums that stand in ``received`` by member and place; it may change them."""
    partials = {
        node: received[member, place] for member, owned in enumerate(nodes) for place, node in enumerate(owned)
    }
    return finish(partials, num_replicas, Tensor.add_)
