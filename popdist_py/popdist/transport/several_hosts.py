"""Collectives of a group of torch's on several hosts: in the memory of each host, and by messages between them.

Every host has as many ranks in a row, a power of two of them, so they make up one node of the tree over the ranks,
and reductions are those of `popdist.transport.two_level`. Where the hosts are not like that, or their ranks
may not share memory, each rank counts as a host of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from popdist.errors import BackendError
from popdist.host_memory.addition import Op
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.in_place import MayMove
from popdist.transport.host_messages import HostMessages
from popdist.transport.two_level import Arrival, TwoLevelReduction
from popdist.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of a rank among the hosts of its group.

    Attributes:
        rank: The rank.
        num_hosts: Hosts of the group.
        num_local: Ranks of each host.
    """

    rank: int
    num_hosts: int
    num_local: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.num_hosts * self.num_local

    @property
    def host(self) -> int:
        """The rank's host."""
        return self.rank // self.num_local

    @property
    def local(self) -> int:
        """The rank's number among those of its host."""
        return self.rank % self.num_local

    @property
    def peers(self) -> range:
        """The ranks with the same number on their hosts, in the order of these."""
        return range(self.local, self.size, self.num_local)


class MessagePeers:
    """The peers of a rank, which send each other messages; see `popdist.transport.two_level.Peers`."""

    def __init__(self, place: RankPlace, messages: HostMessages) -> None:
        self._place = place
        self._messages = messages

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Send ``tensor`` to all peers."""
        received = tensor.new_empty(self._place.num_hosts, *tensor.shape)
        received[self._place.host] = tensor
        return self._start([tensor] * self._place.num_hosts, received)

    def all_to_all(self, rows: Tensor) -> Arrival:
        """Send each peer its row of ``rows``."""
        received = torch.empty_like(rows)
        received[self._place.host] = rows[self._place.host]
        return self._start(rows, received)

    def _start(self, sent: Iterable[Tensor], received: Tensor) -> Arrival:
        peers = self._place.peers
        wait = self._messages.start(dict(zip(peers, sent, strict=True)), dict(zip(peers, received, strict=True)))

        def arrive() -> Tensor:
            wait()
            return received

        return arrive


class SeveralHosts:
    """The collectives of `popdist.host_memory.host_collectives`, for ranks that do not all share a host.

    Whatever goes wrong in a call ends the group: every rank raises BackendError with the reason that was found
    first, and every later call does so again.
    """

    def __init__(
        self, place: RankPlace, messages: HostMessages, local_collectives: HostCollectives | None
    ) -> None:
        self.rank, self.size = place.rank, place.size
        self._place = place
        self._messages = messages
        self._peers = MessagePeers(place, messages)
        self._local_collectives = local_collectives
        hosts = [[Node(0, host)] for host in range(place.num_hosts)]
        self._reduction = TwoLevelReduction(self._peers, hosts, place.num_hosts, local_collectives)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", may_move: MayMove | None = None) -> None:
        """Combine the tensors of all ranks, in place: the same bits on each of them. No tensor is moved."""
        del may_move
        with self._call():
            flat = tensor.contiguous().view(-1)
            self._reduction.all_reduce([flat], op)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """Combine the tensors of all ranks into that of rank ``root``; the others stay as they are."""
        result = tensor if self._place.rank == root else tensor.clone()
        self.all_reduce(result, op)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor of every rank with that of rank ``root``."""
        peers, rank = self._place.peers, self._place.rank
        with self._call():
            if rank == root:
                self._messages.swap(dict.fromkeys(peers, tensor), {})
            elif root in peers:
                self._messages.swap({}, {root: tensor})
            if self._local_collectives is not None:
                self._local_collectives.broadcast(tensor, root % self._place.num_local)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """``outputs[rank]`` becomes a copy of the tensor of ``rank``, which has the same length everywhere."""
        place = self._place
        with self._call():
            mine = self._peers.all_gather(tensor)()
            if self._local_collectives is None:
                rows = [mine]
            else:
                rows = [torch.empty_like(mine) for _ in range(place.num_local)]
                self._local_collectives.all_gather([row.view(-1) for row in rows], mine.view(-1))
            for rank, output in enumerate(outputs):
                output.copy_(rows[rank % place.num_local][rank // place.num_local])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """``output`` becomes the combination of what all ranks have at this rank's place in ``tensors``."""
        with self._call():
            shares = self._reduction.empty_shares(output, len(output))
            for rank, tensor in enumerate(tensors):
                self._reduction.share_of(shares, rank).copy_(tensor)
            output.copy_(self._reduction.reduce_scatter(shares, op))

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``outputs[rank]`` becomes what ``rank`` has at this rank's place in ``tensors``; lengths may differ."""
        rank = self._place.rank
        with self._call():
            outputs[rank].copy_(tensors[rank])
            self._messages.swap(dict(enumerate(tensors)), dict(enumerate(outputs)))

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks."""
        with self._call():
            if self._local_collectives is not None:
                self._local_collectives.barrier(timeout_seconds)
            self._peers.all_gather(torch.zeros(1, dtype=torch.uint8))()
            if self._local_collectives is not None:
                self._local_collectives.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set how long a lost or late rank is waited for from now on."""
        self._messages.timeout_seconds = timeout_seconds
        if self._local_collectives is not None:
            self._local_collectives.set_timeout(timeout_seconds)

    def close(self) -> None:
        """Leave: the other ranks see it."""
        self._messages.close()
        if self._local_collectives is not None:
            self._local_collectives.close()

    def abort(self) -> None:
        """End a call that is going on in another thread, with an error."""
        self._messages.close()
        if self._local_collectives is not None:
            self._local_collectives.abort()

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with self._messages.collective():
                yield
        except BackendError as error:
            if self._local_collectives is not None:
                self._local_collectives.group.barriers.fail(str(error))
            raise
