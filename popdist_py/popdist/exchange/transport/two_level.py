"""The reduction between hosts: first in the memory of each host, then between the members with the same place.

The members are the instances of a job or the ranks of a group of torch's; those with the same place on their hosts
are *peers*. Each adds a part of its host's share and sends its peers the result: twice its share of one row, as in
a ring. An element is added in the order of the tree alone, so its bits depend on no host, row or chunk.
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
"""Numbers that travel together, up to twice as many where the last would be few.

It bounds the memory for what arrives; while a chunk travels, the next one is added in the memory of the host.
"""

FEW: Final = 1 << 13
"""Numbers that every peer gets from all hosts at once: one round of messages costs more than they do."""

Arrival = Callable[[], Tensor]
"""Waits for what is on its way: a row from each peer. Raises BackendError if one was lost or is late."""


class Peers(Protocol):
    """A member's peers, itself among them, which all send each other contiguous tensors by the same calls."""

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Send ``tensor`` to all peers; what arrives is every peer's."""

    def all_to_all(self, rows: Tensor) -> Arrival:
        """Send each peer its row of ``rows``; what arrives is what each has in its rows for this one."""


class Transport(Protocol):
    """A set of instances that send each other tensors and wait for them, such as a backend."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every instance's ``tensor``, stacked."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Row *j* goes to the *j*-th instance; row *i* of the result came from the *i*-th."""


class WaitingPeers:
    """The instances of a transport as peers, whose calls return when everything has arrived."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Every peer's ``tensor``."""
        received = self._transport.all_gather(tensor)
        return lambda: received

    def all_to_all(self, rows: Tensor) -> Arrival:
        """The row that each peer has for this one."""
        received = self._transport.all_to_all(rows)
        return lambda: received


class TwoLevelReduction:
    """Reductions over all members; every member makes the same calls in the same order.

    Attributes:
        places: For each node the peer that brings it, and which of the peer's rows it is.
        pairs: The additions of the tree, each as the places of two nodes.
    """

    def __init__(
        self,
        peers: Peers,
        nodes: Sequence[Sequence[Node]],  # for each peer, in their order: those that its host brings
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
        """Combine flat rows of all members, one for each node and used up, into ``into`` or the first."""
        out = rows[0] if into is None else into
        length = len(out)
        width = -(-length // (max(1, length // CHUNK_SIZE) * self._size)) * self._size
        starts = range(0, max(1, length), max(1, width))
        in_turns(
            self._reduce([row[start : start + width] for row in rows], op, out[start : start + width])
            for start in starts
        )

    def empty_shares(self, like: Tensor, width: int, op: Op = "sum") -> Tensor:
        """Zeros for :meth:`reduce_scatter`: by receiver's place on its host, host, sender's node, number."""
        dtype = torch.float32 if is_widened(op, like.dtype) else like.dtype
        return like.new_zeros(self._num_local, self._num_hosts, self._num_rows, width, dtype=dtype)

    def share_of(self, shares: Tensor, member: int) -> Tensor:
        """The rows of ``shares`` that are for a member, counted over all hosts."""
        return shares[member % self._num_local, member // self._num_local]

    def reduce_scatter(self, shares: Tensor, op: Op = "sum") -> Tensor:
        """The combination of all members' ``shares`` for this one, which :meth:`empty_shares` made."""
        return self._divided(self._start_scatter(shares, _step(op))(), op)

    def _reduce(self, rows: Sequence[Tensor], op: Op, out: Tensor) -> Iterator[bool]:
        """Reduce a chunk into ``out``; pauses while something travels."""
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
        """The rows of this member, cut into as many shares; in their own memory where they fit."""
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
        """Combine the shares of this host's members in its memory, and send the peers theirs."""
        mine = shares[self._local]
        if self._local_collectives is not None:
            mine = torch.empty_like(mine)
            self._local_collectives.reduce_scatter(mine.view(-1), _parts(shares), step)
        arrival = self._peers.all_to_all(mine)
        return lambda: self._combine(arrival(), step)

    def _combine(self, received: Tensor, step: Op) -> Tensor:
        """The peers' rows in the order of the tree, in their memory."""
        rows = [received[place] for place in self.places]
        total: Tensor = combine_in_place(combiner(step, received.dtype), rows, self.pairs)
        return total

    def _divided(self, total: Tensor, op: Op) -> Tensor:
        return total.div_(self._size) if op == "mean" else total


def _parts(shares: Tensor) -> Sequence[Tensor]:
    """The shares for each member of the host, as flat tensors."""
    return shares.view(len(shares), -1).unbind()


def _step(op: Op) -> Op:
    """The operation on two partial results: a mean is a sum that is divided once, at the end."""
    return "sum" if op == "mean" else op


def in_turns(works: Iterable[Iterator[bool]]) -> None:
    """Do works that yield True whenever they have sent something: others go on while it travels."""
    begun: list[Iterator[bool]] = []  # every member takes the same turns, so what they send is not mixed up
    for work in works:
        begun = [other for other in (work, *begun) if next(other, False)]
    while begun:
        begun = [other for other in begun if next(other, False)]


_SHARE_TAG: Final = 2
_RESULT_TAG: Final = 3

_PAIR: Final = 2


class BucketAllReduce:
    """The sum of one flat buffer, made while the program computes; all instances call it in the same order.

    On CPUs it is made of messages, whose receives are posted before they are sent; with ``local_collectives`` each
    host adds in its memory first. On GPUs it is one collective after the other.
    """

    # Nobody waits in a circle: all begin their sums in one order, the channel's thread waits for its own host
    # before others, and for results only when it has added all that was sent. So who waits for a sum waits for
    # somebody who waits for an earlier one, or for nobody.

    def __init__(
        self,
        channel: Channel,
        nodes: Sequence[Sequence[Node]],  # those of each instance, or of each host together
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
        # Short buffers, and those of two instances, are sent whole: one round of messages in place of two.
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
        """Post receives for what will come, if it goes by messages: all have agreed to send."""
        if not self._into.is_cpu:
            return
        # gloo sends nothing before, and the request of a late receive would wait behind other data.
        with self._channel.posting():
            for place, other in self._others:
                for row in [row for (owner, _), row in self._received.items() if owner == place]:
                    self._arrivals += self._channel.receive(row, other, _SHARE_TAG)
                if not self._is_whole:
                    self._rest += self._channel.receive(self._into[self._runs[place]], other, _RESULT_TAG)

    def send(self, own: Sequence[Tensor]) -> None:
        """Add ``own``, a buffer for each node of this instance, to those of the others; does not wait."""
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
        """Add the part of this instance in the memory of the host, and send it; in the channel's thread."""
        local = self._channel.local_collectives
        if local is None:
            return None
        local.reduce_scatter(self._mine[0], own.chunk(len(self._parts)), sum_of(own.dtype))
        self._post(self._mine)
        return partial(self._combine, self._mine)

    def _post(self, own: Sequence[Tensor]) -> None:
        """Begin to send ``own``."""
        for place, other in self._others:
            for row in own:
                self._rest += self._channel.send(row[self._runs[place]], other, _SHARE_TAG)

    def _combine(self, own: Sequence[Tensor]) -> None:
        """Add what has arrived, and send the result on; in the channel's thread."""
        _wait(self._arrivals)
        run = self._runs[self._own]
        total, places = self._into[run], self._reduction.places
        values = [own[row][run] if it == self._own else self._received[it, row] for it, row in places]
        kept = {place for place, (it, _) in enumerate(places) if it == self._own}
        for left, right in self._reduction.pairs:  # two of one instance's own are never a pair: they are one node
            target = values[right] if left in kept else values[left]
            values[left] = torch.add(values[left], values[right], out=target)
            kept.discard(left)
        if values[0].data_ptr() != total.data_ptr():
            total.copy_(values[0])
        for _, other in () if self._is_whole else self._others:
            self._rest += self._channel.send(total, other, _RESULT_TAG)

    def start_waiting(self) -> None:
        """Have the channel's thread wait for the end of the sum; called when the last one was sent."""
        if self._into.is_cpu:
            self._channel.issue(lambda: partial(_wait, self._rest), [self._into])

    def finish(self) -> None:
        """Have the instances of a host give each other their parts, when all threads are done."""
        if self._local_collectives is not None:
            self._local_collectives.all_gather(self._parts, self._into)


def _wait(works: list[dist.Work]) -> None:
    """Wait for all of ``works`` and forget them."""
    for work in works:
        work.wait()
    works.clear()
