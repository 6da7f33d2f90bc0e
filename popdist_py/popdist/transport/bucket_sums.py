"""Sums of flat buffers over all instances, made while the program goes on computing.

On CPUs every instance posts its receives beforehand: gloo sends nothing before the receiver has, and that message
would wait behind the data that are on their way. Then an instance sends each other one its share of a buffer as
soon as the buffer is complete, and the channel's thread adds what arrives and sends everybody the result. Two
instances with one buffer each, and all where it is short, send the whole buffer instead: one round of messages in
place of two.

Instances of one host add in its memory first, in the channel's thread, each a part of the row; those with the same
place on their hosts go on with it. The parts are put together at the end, in the program's thread.

On GPUs the channel does the same reduction as everywhere (`popdist.transport.two_level`), in a stream of its own.

The additions are those of the tree (`popdist.tree`), so the bits are those of a sum that is made at once.

Nobody waits in a circle. All begin their sums in one order. The thread waits for its own host before it waits for
others, and for results only when it has added all that was sent (:meth:`BucketAllReduce.start_waiting`). So who
waits for a sum waits for somebody who waits for an earlier one, or for nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from popdist.host_memory.addition import Op, node_additions
from popdist.host_memory.host_collectives import HostCollectives
from popdist.transport import two_level
from popdist.transport.channel import Channel, FollowUp
from popdist.transport.two_level import TwoLevelReduction, WaitingPeers
from popdist.tree import Node

_SHARE_TAG: Final = 2
_RESULT_TAG: Final = 3

_PAIR: Final = 2


class BucketAllReduce(Protocol):
    """The sum of one flat buffer, again and again; all instances call its methods in the same order."""

    def post_receives(self) -> None:
        """Post receives for what will come: all have agreed to send."""

    def send(self, own: Sequence[Tensor]) -> None:
        """Add ``own``, a buffer for each node of this instance, to those of the others; does not wait."""

    def start_waiting(self) -> None:
        """Have the channel's thread wait for the end of the sum; called when the last one was sent."""

    def finish(self) -> None:
        """The thread has done so, on all instances: now the sum is there."""


class PostedSum:
    """The sum of a flat buffer on CPUs, of messages whose receives are posted before they are sent.

    Each of ``instances`` brings its ``nodes`` of the tree over ``num_items``; the sum goes into ``into``.
    """

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
        self._is_whole = len(into) <= two_level.FEW or sum(map(len, nodes)) == _PAIR
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

    def finish(self) -> None:
        """See :class:`BucketAllReduce`; nothing is left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The collectives of this host's instances, for two threads: the channel's and the program's."""

    of_channel: HostCollectives
    of_program: HostCollectives

    @property
    def size(self) -> int:
        """Instances of the host."""
        return self.of_channel.size

    @property
    def rank(self) -> int:
        """This instance's place among them."""
        return self.of_channel.rank


class HostSum:
    """The sum of a flat buffer on CPUs, in the memory of each host first.

    The instances of each host bring its ``nodes`` of the tree together. ``into`` is a multiple of the host's
    instances long.
    """

    def __init__(
        self,
        local_collectives: LocalRanks,
        channel: Channel,
        nodes: Sequence[Sequence[Node]],
        num_items: int,
        into: Tensor,
        op: Op,
    ) -> None:
        self._local_collectives = local_collectives
        self._channel = channel
        self._parts = into.chunk(local_collectives.size)
        part = self._parts[local_collectives.rank]
        self._mine = torch.empty_like(part)
        peers = range(local_collectives.rank, local_collectives.size * len(nodes), local_collectives.size)
        self._peers = PostedSum(channel, peers, nodes, num_items, part)
        self._op = op

    def post_receives(self) -> None:
        """See :class:`BucketAllReduce`."""
        self._peers.post_receives()

    def send(self, own: Sequence[Tensor]) -> None:
        """See :class:`BucketAllReduce`."""
        self._channel.issue(lambda: self._add_here(own[0]), [*own, self._mine])

    def _add_here(self, own: Tensor) -> FollowUp:
        parts = own.chunk(self._local_collectives.size)
        self._local_collectives.of_channel.reduce_scatter(self._mine, parts, self._op)
        self._peers.post([self._mine])
        return partial(self._peers.combine, [self._mine])

    def start_waiting(self) -> None:
        """See :class:`BucketAllReduce`."""
        self._peers.start_waiting()

    def finish(self) -> None:
        """See :class:`BucketAllReduce`; the instances of the host give each other their parts."""
        self._local_collectives.of_program.all_gather(self._parts, self._parts[self._local_collectives.rank])


class QueuedSum:
    """The sum of a flat buffer on GPUs, which is one collective after the other."""

    def __init__(
        self, channel: Channel, nodes: Sequence[Sequence[Node]], num_items: int, into: Tensor, op: Op
    ) -> None:
        self._channel = channel
        self._reduction = TwoLevelReduction(WaitingPeers(channel), nodes, num_items)
        self._into = into
        self._op = op

    def post_receives(self) -> None:
        """See :class:`BucketAllReduce`; NCCL needs no such word."""

    def send(self, own: Sequence[Tensor]) -> None:
        """See :class:`BucketAllReduce`."""
        self._channel.issue(lambda: self._reduction.all_reduce(own, self._op, self._into), [*own, self._into])

    def start_waiting(self) -> None:
        """See :class:`BucketAllReduce`; nothing is left to wait for."""

    def finish(self) -> None:
        """See :class:`BucketAllReduce`; as above."""


def _wait(works: list[dist.Work]) -> None:
    """Wait for all of ``works`` and forget them."""
    for work in works:
        work.wait()
    works.clear()
