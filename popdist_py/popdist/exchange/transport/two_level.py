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
    """Reductions over all members; every member makes the same calls in the same order."""

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
        self._places = [(peer, row) for peer, owned in enumerate(nodes) for row in range(len(owned))]
        self._pairs = node_additions([node for owned in nodes for node in owned], num_items)

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
        rows = [received[place] for place in self._places]
        total: Tensor = combine_in_place(combiner(step, received.dtype), rows, self._pairs)
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
    """The sum of one flat buffer, made while the program computes; all instances call it in the same order."""

    # Nobody waits in a circle: all begin their sums in one order, the channel's thread waits for its own host
    # before others, and for results only when it has added all that was sent. So who waits for a sum waits for
    # somebody who waits for an earlier one, or for nobody.

    def post_receives(self) -> None:
        """Post receives for what will come, if it goes by messages: all have agreed to send."""

    def send(self, own: Sequence[Tensor]) -> None:
        """Add ``own``, a buffer for each node of this instance, to those of the others; does not wait."""
        raise NotImplementedError

    def start_waiting(self) -> None:
        """Have the channel's thread wait for the end of the sum; called when the last one was sent."""

    def finish(self) -> None:
        """The thread has done so, on all instances: now the sum is there."""


class PostedSum(BucketAllReduce):
    """The sum of a flat buffer on CPUs, of messages whose receives are posted before they are sent."""

    def __init__(
        self,
        channel: Channel,
        instances: Sequence[int],
        nodes: Sequence[Sequence[Node]],
        num_items: int,
        into: Tensor,
    ) -> None:
        self._channel = channel
        self._own = instances.index(channel.instance_index)
        self._others = [(place, other) for place, other in enumerate(instances) if place != self._own]
        self._into = into
        # Short buffers, and those of two instances, are sent whole: one round of messages in place of two.
        self._is_whole = len(into) <= FEW or sum(map(len, nodes)) == _PAIR
        width = -(-len(into) // len(nodes))
        runs = [slice(k * width, (k + 1) * width) for k in range(len(nodes))]
        self._runs = [slice(None)] * len(nodes) if self._is_whole else runs
        self._total = into[self._runs[self._own]]
        self._places = [(place, row) for place, owned in enumerate(nodes) for row in range(len(owned))]
        self._pairs = node_additions([node for owned in nodes for node in owned], num_items)
        foreign = [place for place in self._places if place[0] != self._own]
        is_room_there = len(foreign) == 1
        self._received = {
            place: self._total if is_room_there else torch.empty_like(self._total) for place in foreign
        }
        self._arrivals: list[dist.Work] = []
        self._rest: list[dist.Work] = []

    def post_receives(self) -> None:
        """See :class:`BucketAllReduce`."""
        # gloo sends nothing before, and the request of a late receive would wait behind other data.
        with self._channel.posting():
            for place, other in self._others:
                for row in [row for (owner, _), row in self._received.items() if owner == place]:
                    self._arrivals += self._channel.receive(row, other, _SHARE_TAG)
                if not self._is_whole:
                    self._rest += self._channel.receive(self._into[self._runs[place]], other, _RESULT_TAG)

    def send(self, own: Sequence[Tensor]) -> None:
        """See :class:`BucketAllReduce`."""
        with self._channel.posting():
            self.post(own)
        self._channel.issue(lambda: self.combine(own), [*own, self._into])

    def post(self, own: Sequence[Tensor]) -> None:
        """Begin to send ``own``."""
        for place, other in self._others:
            for row in own:
                self._rest += self._channel.send(row[self._runs[place]], other, _SHARE_TAG)

    def combine(self, own: Sequence[Tensor]) -> None:
        """Add what has arrived, and send the result on; in the channel's thread."""
        _wait(self._arrivals)
        mine = self._runs[self._own]
        values = [own[row][mine] if it == self._own else self._received[it, row] for it, row in self._places]
        kept = {place for place, (it, _) in enumerate(self._places) if it == self._own}
        for left, right in self._pairs:  # two of one instance's own are never a pair: they would be one node
            target = values[right] if left in kept else values[left]
            values[left] = torch.add(values[left], values[right], out=target)
            kept.discard(left)
        if values[0].data_ptr() != self._total.data_ptr():
            self._total.copy_(values[0])
        for _, other in () if self._is_whole else self._others:
            self._rest += self._channel.send(self._total, other, _RESULT_TAG)

    def start_waiting(self) -> None:
        """See :class:`BucketAllReduce`."""
        self._channel.issue(lambda: partial(_wait, self._rest), [self._into])


class HostSum(BucketAllReduce):
    """The sum of a flat buffer on CPUs, in each host's memory first, then between the same places on the hosts."""

    def __init__(
        self,
        local_collectives: HostCollectives,  # of the program's thread
        of_channel: HostCollectives,  # of the same instances, for the channel's thread
        channel: Channel,
        nodes: Sequence[Sequence[Node]],  # those that the instances of each host bring together
        num_items: int,
        into: Tensor,  # a multiple of the host's instances long
    ) -> None:
        rank, size = local_collectives.rank, local_collectives.size
        self._local_collectives = local_collectives
        self._of_channel = of_channel
        self._channel = channel
        self._parts = into.chunk(size)
        self._part = self._parts[rank]
        self._mine = torch.empty_like(self._part)
        self._peers = PostedSum(channel, range(rank, size * len(nodes), size), nodes, num_items, self._part)

    def post_receives(self) -> None:
        """See :class:`BucketAllReduce`."""
        self._peers.post_receives()

    def send(self, own: Sequence[Tensor]) -> None:
        """See :class:`BucketAllReduce`."""
        self._channel.issue(lambda: self._add_here(own[0]), [*own, self._mine])

    def _add_here(self, own: Tensor) -> FollowUp:
        parts = own.chunk(len(self._parts))
        self._of_channel.reduce_scatter(self._mine, parts, sum_of(own.dtype))
        self._peers.post([self._mine])
        return partial(self._peers.combine, [self._mine])

    def start_waiting(self) -> None:
        """See :class:`BucketAllReduce`."""
        self._peers.start_waiting()

    def finish(self) -> None:
        """See :class:`BucketAllReduce`; the instances of the host give each other their parts."""
        self._local_collectives.all_gather(self._parts, self._part)


class QueuedSum(BucketAllReduce):
    """The sum of a flat buffer on GPUs, which is one collective after the other."""

    def __init__(self, channel: Channel, nodes: Sequence[Sequence[Node]], num_items: int, into: Tensor) -> None:
        self._channel = channel
        self._reduction = TwoLevelReduction(WaitingPeers(channel), nodes, num_items)
        self._into = into

    def send(self, own: Sequence[Tensor]) -> None:
        """See :class:`BucketAllReduce`."""
        op = sum_of(self._into.dtype)
        self._channel.issue(lambda: self._reduction.all_reduce(own, op, self._into), [*own, self._into])


def _wait(works: list[dist.Work]) -> None:
    """Wait for all of ``works`` and forget them."""
    for work in works:
        work.wait()
    works.clear()
