"""Collectives of a group on several hosts.

Every host has as many ranks in a row, a power of two of them, and so they make up one node of the tree over the
ranks: what a host has added in its memory is a partial sum of the very tree that one host would follow. The ranks
that have the same place on their hosts, the *peers*, then exchange their share of the numbers, so that each rank
sends and receives twice ``1 / (ranks of a host)`` of them. Where the hosts are not like that, or their ranks may
not share memory, each rank counts as a host of its own.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from popdist.errors import BackendError
from popdist.host_memory.addition import HALVES, Combiner, Op
from popdist.host_memory.host_collectives import HostCollectives, QuickSum, never
from popdist.process_group.host_messages import HostMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Attributes:
        rank: Its number.
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
        """The rank's number on its host."""
        return self.rank % self.num_local

    @property
    def peers(self) -> range:
        """The ranks with the same number on their hosts, in the order of these."""
        return range(self.local, self.size, self.num_local)


Arrival = Callable[[], Tensor]
"""Waits for what is on its way: a row for each peer.

Raises BackendError if one was lost or did not come in time.
"""


class Peers:
    """A rank's peers, itself among them. All of them make the same calls in the same order.

    Args:
        place: Of this rank.
        messages: To all ranks.
    """

    def __init__(self, place: Place, messages: HostMessages) -> None:
        self._place = place
        self._messages = messages

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Send ``tensor``, of equal length everywhere, to all peers; what arrives is every peer's."""
        received = tensor.new_empty(self._place.num_hosts, *tensor.shape)
        received[self._place.host] = tensor
        return self._start([tensor] * self._place.num_hosts, received)

    def all_to_all(self, rows: Tensor) -> Arrival:
        """Send each peer its row of ``rows``; what arrives is what each has in its rows for this one."""
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


def in_turns(works: Iterable[Iterator[None]]) -> None:
    """Do works that yield whenever they have sent something: others go on while it travels.

    Each is begun before those before it go on, and every rank takes the same turns, so what they send to each
    other does not get mixed up.
    """
    begun: list[Iterator[None]] = []
    for work in works:
        begun = [it for it in (work, *begun) if _goes_on(it)]
    while begun:
        begun = [it for it in begun if _goes_on(it)]


_END = object()


def _goes_on(work: Iterator[None]) -> bool:
    return next(work, _END) is not _END


CHUNK_SIZE: Final = 1 << 20
"""Numbers that travel together: while they do, those before them are combined."""

FEW: Final = 1 << 13
"""Numbers of which every peer gets all of each host's: one round of messages costs more than they do."""


class SeveralHosts:
    """As `popdist.host_memory.host_collectives.HostCollectives`, for ranks that do not all share a host.

    Whatever goes wrong in a call ends the group: every rank raises BackendError with the reason that was found
    first, and every later call does so again.

    Args:
        place: Of this rank.
        messages: To all ranks.
        neighbours: The collectives of the ranks of this host; None where it has one.
    """

    def __init__(self, place: Place, messages: HostMessages, neighbours: HostCollectives | None) -> None:
        self.size = place.size
        self.quick_sum: QuickSum = never
        self._place = place
        self._messages = messages
        self._peers = Peers(place, messages)
        self._neighbours = neighbours

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Combine the tensors of all ranks, in place: the same bits on each of them."""
        with self._call():
            flat = tensor.contiguous().view(-1)
            in_turns(self._reduce(chunk, op) for chunk in flat.split(CHUNK_SIZE))
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
            if self._neighbours is not None:
                self._neighbours.broadcast(tensor, root % self._place.num_local)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """``outputs[rank]`` becomes a copy of the tensor of ``rank``, which has the same length everywhere."""
        place = self._place
        with self._call():
            mine = self._peers.all_gather(tensor)()
            if self._neighbours is None:
                rows = [mine]
            else:
                rows = [torch.empty_like(mine) for _ in range(place.num_local)]
                self._neighbours.all_gather([it.view(-1) for it in rows], mine.view(-1))
            for rank, output in enumerate(outputs):
                output.copy_(rows[rank % place.num_local][rank // place.num_local])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """``output`` becomes the combination of what all ranks have at this rank's place in ``tensors``."""
        place, step = self._place, _step(op)
        with self._call():
            by_local = [
                _widened(torch.cat([tensors[rank] for rank in range(local, place.size, place.num_local)]))
                for local in range(place.num_local)
            ]
            mine = by_local[place.local]
            if self._neighbours is not None:
                mine = torch.empty_like(mine)
                self._neighbours.reduce_scatter(mine, by_local, step)
            rows = mine.view(place.num_hosts, len(output))
            total = _combine(self._peers.all_to_all(rows)().unbind(), step)
            output.copy_(_divided(total, op, self.size))

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``outputs[rank]`` becomes what ``rank`` has at this rank's place in ``tensors``; lengths may differ."""
        rank = self._place.rank
        with self._call():
            outputs[rank].copy_(tensors[rank])
            self._messages.swap(dict(enumerate(tensors)), dict(enumerate(outputs)))

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks."""
        with self._call():
            if self._neighbours is not None:
                self._neighbours.barrier(timeout_seconds)
            self._peers.all_gather(torch.zeros(1, dtype=torch.uint8))()
            if self._neighbours is not None:
                self._neighbours.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """How long a lost or late rank is waited for from now on."""
        self._messages.timeout_seconds = timeout_seconds
        if self._neighbours is not None:
            self._neighbours.set_timeout(timeout_seconds)

    def close(self) -> None:
        """Leave: the other ranks see it."""
        self._messages.close()
        if self._neighbours is not None:
            self._neighbours.close()

    def break_off(self) -> None:
        """End a call that is going on in another thread, with an error."""
        self._messages.close()
        if self._neighbours is not None:
            self._neighbours.break_off()

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with self._messages.telling():
                yield
        except BackendError as error:
            if self._neighbours is not None:
                self._neighbours.group.flags.fail(str(error))
            raise

    def _reduce(self, chunk: Tensor, op: Op) -> Iterator[None]:
        """Combine a flat chunk, in place; pauses while something travels."""
        step = _step(op)
        row = _widened(chunk)
        reduce = self._reduce_whole if len(row) <= FEW else self._reduce_shares
        total = yield from reduce(row, step)
        chunk.copy_(_divided(total, op, self.size))

    def _reduce_whole(self, row: Tensor, step: Op) -> Generator[None, None, Tensor]:
        """Each rank combines all of it."""
        if self._neighbours is not None:
            self._neighbours.all_reduce(row, step)
        arrival = self._peers.all_gather(row)
        yield
        return _combine(arrival().unbind(), step)

    def _reduce_shares(self, row: Tensor, step: Op) -> Generator[None, None, Tensor]:
        """Each rank combines a share of what its host has, and a share of that for all hosts."""
        num_hosts, num_local = self._place.num_hosts, self._place.num_local
        width = -(-len(row) // self.size)
        padded = row.new_zeros(num_local, num_hosts, width)
        padded.view(-1)[: len(row)] = row
        mine = padded[self._place.local]
        if self._neighbours is not None:
            mine = torch.empty_like(mine)
            self._neighbours.reduce_scatter(mine.view(-1), [it.view(-1) for it in padded], step)
        arrival = self._peers.all_to_all(mine)
        yield
        arrival = self._peers.all_gather(_combine(arrival().unbind(), step))
        yield
        mine = arrival()
        if self._neighbours is None:
            return mine.view(-1)[: len(row)]
        self._neighbours.all_gather([it.view(-1) for it in padded], mine.view(-1))
        return padded.view(-1)[: len(row)]


def _step(op: Op) -> Op:
    """What is done with two partial results: a mean is divided once, at the end."""
    return "sum" if op == "mean" else op


def _widened(tensor: Tensor) -> Tensor:
    """Half types in float32, in which they are combined; everything else as it is."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def _combine(rows: Sequence[Tensor], step: Op) -> Tensor:
    """The hosts' rows in the order of the tree; there are at least two."""
    combine = Combiner(step, rows[0].dtype, len(rows))
    total = torch.empty_like(rows[0])
    combine(rows, total, combine.memory(total.shape))
    return total


def _divided(total: Tensor, op: Op, size: int) -> Tensor:
    return total.div_(size) if op == "mean" else total
