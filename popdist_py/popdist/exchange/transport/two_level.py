"""The reduction over several hosts: first in the memory of each host, then between members of different hosts.

The *members* are the instances of a job or the ranks of a torch group; members with the same index on different
hosts are *peers*. Each member adds a part of its host's share, and sends the result to its peers, as in a ring.
The tree alone gives the order of additions, so a sum's bits do not depend on hosts, rows or chunks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from popdist.exchange.host_memory.addition import (
    Op,
    combine_in_place,
    combiner,
    is_widened,
    node_additions,
    sum_of,
)
from popdist.exchange.host_memory.host_collectives import HostCollectives
from popdist.exchange.transport.channel import Channel, FollowUp
from popdist.ground.tree import Node

CHUNK_SIZE: Final = 1 << 20
"""Number of elements of a chunk, the part of a tensor that is sent at once; some chunks have up to twice as many.

Chunks bound the memory for received tensors. While a chunk is sent, the next chunk is added in the host's memory.
"""

FEW: Final = 1 << 13
"""Largest number of elements that every peer gets from all hosts at once, in one round of messages, not two."""

Arrival = Callable[[], Tensor]
"""A function that waits for a row from each peer, and returns all rows. Raises BackendError if one is late."""


class Peers(Protocol):
    """Members (instances or ranks) with equal indices on different hosts, which send each other tensors."""

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Start sending ``tensor`` to all peers; return a function that waits for and returns their tensors."""

    def all_to_all(self, rows: Tensor) -> Arrival:
        """Start sending each peer its row; return a function that waits for and returns the peers' rows."""


class Transport(Protocol):
    """A set of instances, such as a backend, whose collectives return when all tensors have arrived."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ``tensor`` of every instance, stacked in instance order."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send ``tensor[j]`` to the *j*-th instance; return a tensor whose row *i* is from the *i*-th instance."""


class WaitingPeers:
    """The instances of ``transport``, such as a backend, as peers; calls wait until all tensors have come."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Gather ``tensor`` from all peers, and wait; return a function that returns the gathered tensors."""
        received = self._transport.all_gather(tensor)
        return lambda: received

    def all_to_all(self, rows: Tensor) -> Arrival:
        """Send each peer its row of ``rows``, and wait; return a function that returns the received rows."""
        received = self._transport.all_to_all(rows)
        return lambda: received


class TwoLevelReduction:
    """Reductions over members (instances or ranks), first in each host, then between hosts. All make equal calls.

    Attributes:
        places: For each node of the tree, the peer that sends the node, and the node's index in the peer's rows.
        pairs: The additions of the tree, each as two indices into ``places``.
    """

    def __init__(
        self,
        peers: Peers,
        nodes: Sequence[Sequence[Node]],  # for each peer, in order: the nodes that its host sends
        num_items: int,  # of the whole tree
        local_collectives: HostCollectives | None = None,
    ) -> None:
        self._peers = peers
        self._local_collectives = local_collectives
        self._num_hosts = len(nodes)
        self._num_local, self._local = (
            (1, 0) if local_collectives is None else (local_collectives.size, local_collectives.group.rank)
        )
        self._size = self._num_hosts * self._num_local
        self._num_rows = max(map(len, nodes))
        self.places = [(peer, row) for peer, owned in enumerate(nodes) for row in range(len(owned))]
        self.pairs = node_additions([node for owned in nodes for node in owned], num_items)

    def all_reduce(self, rows: Sequence[Tensor], op: Op = "sum", into: Tensor | None = None) -> None:
        """Combine the ``rows`` of all members by ``op`` into ``into``, or into the first row if ``into`` is None.
        Each member has one row for each of its nodes in the tree of additions. The rows are overwritten.
        """
        out = rows[0] if into is None else into
        length = len(out)
        width = -(-length // (max(1, length // CHUNK_SIZE) * self._size)) * self._size
        starts = range(0, max(1, length), max(1, width))
        in_turns(
            self._reduce([row[start : start + width] for row in rows], op, out[start : start + width])
            for start in starts
        )

    def empty_shares(self, like: Tensor, width: int, op: Op = "sum") -> Tensor:
        """Return a tensor of zeros to fill for :meth:`reduce_scatter`, with the dimensions: the receiver's index
        on its host, the receiver's host, the sender's tree node, and the element.
        """
        dtype = torch.float32 if is_widened(op, like.dtype) else like.dtype
        return like.new_zeros(self._num_local, self._num_hosts, self._num_rows, width, dtype=dtype)

    def share_of(self, shares: Tensor, member: int) -> Tensor:
        """Return the part of ``shares`` that is for the member with number ``member``, counted over all hosts."""
        return shares[member % self._num_local, member // self._num_local]

    def reduce_scatter(self, shares: Tensor, op: Op = "sum") -> Tensor:
        """Combine the parts of all members' tensors ``shares`` that are for this member; return the result."""
        return self._divided(self._start_scatter(shares, _step(op))(), op)

    def _reduce(self, rows: Sequence[Tensor], op: Op, out: Tensor) -> Iterator[bool]:
        """Reduce ``rows``, one chunk of each row, into ``out``. Yield True whenever data was sent and is awaited,
        so that the generators of several chunks can run in turns.
        """
        wide = [row.float() if is_widened(op, row.dtype) else row for row in rows]
        step, length = _step(op), len(out)
        if length <= FEW:
            if self._local_collectives is not None:
                self._local_collectives.all_reduce(wide[0], step)
            arrival = self._peers.all_gather(self._spread(wide, 1, 1)[0, 0])
            yield True
            total = self._combine(arrival(), step)
        else:
            shares = self._spread(wide, self._num_local, self._num_hosts)
            arrival = self._start_scatter(shares, step)
            yield True
            arrival = self._peers.all_gather(arrival())
            yield True
            total = arrival().view(-1)
            if self._local_collectives is not None:
                self._local_collectives.all_gather(_parts(shares), total)
                total = shares.view(-1)
        total = self._divided(total[:length], op)
        if total.data_ptr() != out.data_ptr():
            out.copy_(total)

    def _spread(self, rows: Sequence[Tensor], num_local: int, num_hosts: int) -> Tensor:
        """Cut each row into parts for all members, padded with zeros; return the parts, as a view if possible."""
        length = len(rows[0])
        width = -(-length // (num_local * num_hosts))
        shape = (num_local, num_hosts, self._num_rows, width)
        if self._num_rows == 1 and length == num_local * num_hosts * width:
            return rows[0].view(shape)
        shares = rows[0].new_zeros(shape)
        for number, row in enumerate(rows):
            padded = row.new_zeros(num_local * num_hosts * width)
            padded[:length] = row
            shares[:, :, number] = padded.view(num_local, num_hosts, width)
        return shares

    def _start_scatter(self, shares: Tensor, step: Op) -> Arrival:
        """Start to combine all members' ``shares``; return a function that waits for this member's part."""
        share = shares[self._local]
        if self._local_collectives is not None:
            share = torch.empty_like(share)
            self._local_collectives.reduce_scatter(share.view(-1), _parts(shares), step)
        arrival = self._peers.all_to_all(share)
        return lambda: self._combine(arrival(), step)

    def _combine(self, received: Tensor, step: Op) -> Tensor:
        """Combine the rows ``received`` from peers in place, in the addition tree's order; return the result."""
        rows = [received[place] for place in self.places]
        total: Tensor = combine_in_place(combiner(step, received.dtype), rows, self.pairs)
        return total

    def _divided(self, total: Tensor, op: Op) -> Tensor:
        return total.div_(self._size) if op == "mean" else total


def _parts(shares: Tensor) -> Sequence[Tensor]:
    """Return the tensor ``shares`` as a list of flat tensors, one for each member of this host."""
    return shares.view(len(shares), -1).unbind()


def _step(op: Op) -> Op:
    """Return the operation that combines partial results of ``op``: a sum for a mean, which is divided later."""
    return "sum" if op == "mean" else op


def in_turns(works: Iterable[Iterator[bool]]) -> None:
    """Run the generators ``works`` in turns: each yields True when it waits for data, and then the others run."""
    begun: list[Iterator[bool]] = []  # every member takes the same turns, so that messages do not mix
    for work in works:
        begun = [other for other in (work, *begun) if next(other, False)]
    while begun:
        begun = [other for other in begun if next(other, False)]


_SHARE_TAG: Final = 2
_RESULT_TAG: Final = 3

_PAIR: Final = 2


class BucketAllReduce:
    """The sum of one flat buffer of gradients over all instances, made by a channel while the program computes.

    All instances make the same sums in the same order. On CPUs a sum consists of messages; receives are first.
    With ``local_collectives`` each host first adds in its memory. On accelerators a sum is a collective.
    """

    # There is no deadlock: all instances begin their sums in the same order. The channel's thread waits for its
    # own host before other hosts, and for results only after adding all that was sent. So a thread that waits for
    # a sum waits for a thread that waits for an earlier sum or does not wait.

    def __init__(
        self,
        channel: Channel,
        nodes: Sequence[Sequence[Node]],  # the nodes of each instance, or of each host together
        num_items: int,
        into: Tensor,  # a multiple of the host's instances long
        local_collectives: HostCollectives | None = None,  # of the program's thread
    ) -> None:
        self._channel = channel
        self._local_collectives = local_collectives
        rank, size = (0, 1) if local_collectives is None else (local_collectives.rank, local_collectives.size)
        self._parts = into.chunk(size)
        self._into = self._parts[rank]
        instances = range(rank, size * len(nodes), size)
        self._own = instances.index(channel.instance_index)
        self._others = [(place, other) for place, other in enumerate(instances) if place != self._own]
        # Short buffers, and buffers of two instances, are sent whole: one round of messages in place of two.
        self._is_whole = len(self._into) <= FEW or sum(map(len, nodes)) == _PAIR
        width = -(-len(self._into) // len(nodes))
        self._runs = [
            slice(None) if self._is_whole else slice(k * width, (k + 1) * width) for k in range(len(nodes))
        ]
        self._reduction = TwoLevelReduction(WaitingPeers(channel), nodes, num_items)
        total = self._into[self._runs[self._own]]
        foreign = [place for place in self._reduction.places if place[0] != self._own] if into.is_cpu else []
        is_room_there = len(foreign) == 1
        self._received = {it: total if is_room_there else torch.empty_like(total) for it in foreign}
        self._mine = [] if local_collectives is None else [torch.empty_like(self._into)]
        self._arrivals: list[dist.Work] = []
        self._rest: list[dist.Work] = []

    def post_receives(self) -> None:
        """Start to receive this sum's messages, after all instances agreed to make the sum. CPU tensors only."""
        if not self._into.is_cpu:
            return
        # gloo sends nothing before a receive is posted, and a late receive's request would wait behind other data.
        with self._channel.posting():
            for place, other in self._others:
                for row in [row for (owner, _), row in self._received.items() if owner == place]:
                    self._arrivals += self._channel.receive(row, other, _SHARE_TAG)
                if not self._is_whole:
                    self._rest += self._channel.receive(self._into[self._runs[place]], other, _RESULT_TAG)

    def send(self, own: Sequence[Tensor]) -> None:
        """Send ``own``, a buffer for each tree node of this instance, to be added to other instances' buffers."""
        if not self._into.is_cpu:
            op = sum_of(self._into.dtype)
            self._channel.issue(lambda: self._reduction.all_reduce(own, op, self._into), [*own, self._into])
        elif self._local_collectives is not None:
            self._channel.issue(lambda: self._add_here(own[0]), [*own, *self._mine])
        else:
            with self._channel.posting():
                self._post(own)
            self._channel.issue(lambda: self._combine(own), [*own, self._into])

    def _add_here(self, own: Tensor) -> FollowUp | None:
        """Add one part of this host's buffers, and send the sum to other hosts. Runs in the channel's thread."""
        local = self._channel.local_collectives
        if local is None:
            return None
        local.reduce_scatter(self._mine[0], own.chunk(len(self._parts)), sum_of(own.dtype))
        self._post(self._mine)
        return partial(self._combine, self._mine)

    def _post(self, own: Sequence[Tensor]) -> None:
        """Start to send each peer its part of ``own``, the buffers of this instance, one for each tree node."""
        for place, other in self._others:
            for row in own:
                self._rest += self._channel.send(row[self._runs[place]], other, _SHARE_TAG)

    def _combine(self, own: Sequence[Tensor]) -> None:
        """Add the buffers ``own`` and the buffers received from other instances in tree order, and send the sum to
        these instances if they do not compute the whole sum too. Runs in the channel's thread.
        """
        _wait(self._arrivals)
        run = self._runs[self._own]
        total, places = self._into[run], self._reduction.places
        values = [own[row][run] if it == self._own else self._received[it, row] for it, row in places]
        kept = {place for place, (it, _) in enumerate(places) if it == self._own}
        for left, right in self._reduction.pairs:  # two nodes of one instance are never a pair, but one node
            target = values[right] if left in kept else values[left]
            values[left] = torch.add(values[left], values[right], out=target)
            kept.discard(left)
        if values[0].data_ptr() != total.data_ptr():
            total.copy_(values[0])
        for _, other in () if self._is_whole else self._others:
            self._rest += self._channel.send(total, other, _RESULT_TAG)

    def start_waiting(self) -> None:
        """Make the channel's thread wait for this sum's messages; called when all sums of the step were sent."""
        if self._into.is_cpu:
            self._channel.issue(lambda: partial(_wait, self._rest), [self._into])

    def finish(self) -> None:
        """Gather the sum, of which each instance of this host has added a part, after the channel's work."""
        if self._local_collectives is not None:
            self._local_collectives.all_gather(self._parts, self._into)


def _wait(works: list[dist.Work]) -> None:
    """Wait until torch's ``works`` (sends and receives) have ended, and clear the list."""
    for work in works:
        work.wait()
    works.clear()
