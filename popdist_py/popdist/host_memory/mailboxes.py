"""Short messages of fixed length from each rank to each other one, which any set of ranks may exchange.

Between two ranks stand two places and a counter for each direction. A rank sends its next message to another only
after it has received that one's answer to the last: so both sides are at most one message apart, and what is sent
never overwrites what is still to be read.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import Tensor

from popdist.host_memory.group import HostGroup

_COUNTER_WORDS: Final = 8
"""A counter has a line of cache of its own."""

_WORD_BYTES: Final = 8


class Mailboxes:
    """The messages of a group; made by every rank at the same time.

    Args:
        group: The ranks.
        num_words: Length of a message, in signed 64-bit integers.
    """

    def __init__(self, group: HostGroup, num_words: int) -> None:
        self._flags = group.flags
        self._message = struct.Struct(f"={num_words}q")
        stride = (_COUNTER_WORDS + 2 * num_words) * _WORD_BYTES
        block = group.allocate(group.size * stride)
        places = [slice(other * stride, (other + 1) * stride) for other in range(group.size)]
        rows = [_view(row) for row in block.rows]
        self._outgoing = [rows[group.rank][place] for place in places]
        self._incoming = [row[places[group.rank]] for row in rows]
        self._outgoing_counters = [box.cast("Q") for box in self._outgoing]
        self._incoming_counters = [box.cast("Q") for box in self._incoming]
        self._num_received = [0] * group.size

    def send(self, ranks: Iterable[int], message: Sequence[int]) -> None:
        """Send to each of ``ranks``, without waiting for them.

        Raises:
            BackendError: If this rank has left.
        """
        self._flags.raise_failure()
        for rank in ranks:
            counter = self._outgoing_counters[rank]
            self._message.pack_into(self._outgoing[rank], self._start(counter[0] + 1), *message)
            self._flags.order()
            counter[0] += 1
        self._flags.ring()

    def receive(self, rank: int, timeout_seconds: float) -> list[int] | None:
        """The next message of ``rank``; None if none came in time, and then it can still be received.

        Raises:
            BackendError: If ``rank`` was lost or has left.
        """
        counter, number = self._incoming_counters[rank], self._num_received[rank] + 1
        if not self._flags.wait_for(rank, lambda: counter[0] >= number, timeout_seconds):
            return None
        self._flags.order()
        self._num_received[rank] = number
        return list(self._message.unpack_from(self._incoming[rank], self._start(number)))

    def _start(self, number: int) -> int:
        return _COUNTER_WORDS * _WORD_BYTES + (number & 1) * self._message.size


def _view(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
