"""What the ranks with the same place on their hosts send each other."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from popdist.process_group.host_messages import Wires


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
        wires: To all ranks.
    """

    def __init__(self, place: Place, wires: Wires) -> None:
        self._place = place
        self._wires = wires

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
        wait = self._wires.start(dict(zip(peers, sent, strict=True)), dict(zip(peers, received, strict=True)))

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
