"""Adding the partial sums of the instances: each adds a share of the numbers and tells the others its part.

So an instance sends and receives twice what it has, however many there are, as in a ring, and the order is that of
`popdist.tree`. With several hosts whose instances make up whole nodes of the tree, the instances of a host add in
its memory first, and what goes over the network is, for each of them, twice its share of one row.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from popdist.comm.backend import Backend
from popdist.groups import Group
from popdist.host_memory.host_collectives import HostCollectives
from popdist.layout import ReplicaLayout
from popdist.tree import Node, aligned_nodes, finish

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
