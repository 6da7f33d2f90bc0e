"""Messages of a fixed length from each rank of a host group to each other one, outside of meetings.

Any set of ranks may exchange messages. Two ranks count those that they exchange: the n-th of one is answered by
the n-th of the other. Between them stand two places and a counter for each direction. A rank sends its next
message to another only after it has taken that one's answer to the last, even if it was not asked for yet: so both
sides are at most one message apart, and what is sent never overwrites what is still to be read.
"""

import struct
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from torch import Tensor

from popdist.errors import BackendError
from popdist.host_memory.host_group import HostGroup

_COUNTER_WORDS: Final = 8
"""A counter has a line of cache of its own."""

_WORD_BYTES: Final = 8


class ShortMessages:
    """The messages between the ranks of a group; made by every rank at the same time.

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
        self._kept: list[dict[int, list[int]]] = [{} for _ in range(group.size)]

    def send(self, ranks: Collection[int], message: Sequence[int]) -> list[int]:
        """Send to each of ``ranks``, without waiting for their answers to this message.

        Returns:
            For each of ``ranks`` the number of the message, which is that of its answer.

        Raises:
            BackendError: If this rank or one of ``ranks`` has left, or does not answer the message before.
        """
        self._flags.raise_failure()
        for rank in ranks:
            if not self._take_until(rank, self._outgoing_counters[rank][0], self._flags.timeout_seconds):
                raise BackendError(
                    f"{self._flags.name([rank])} did not come within {self._flags.timeout_seconds:g} seconds"
                )
        numbers = []
        for rank in ranks:
            counter = self._outgoing_counters[rank]
            number = counter[0] + 1
            self._message.pack_into(self._outgoing[rank], self._start(number), *message)
            self._flags.order()
            counter[0] = number
            numbers.append(number)
        self._flags.wake()
        return numbers

    def receive(self, rank: int, number: int, timeout_seconds: float) -> list[int] | None:
        """A message of ``rank``, once; None if it did not come in time, and then it can still be received.

        Raises:
            BackendError: If ``rank`` was lost or has left.
        """
        return self._kept[rank].pop(number) if self._take_until(rank, number, timeout_seconds) else None

    def _take_until(self, rank: int, number: int, timeout_seconds: float) -> bool:
        """Take the messages of ``rank`` up to a number out of their places; False if it does not come in time."""
        if self._num_received[rank] >= number:
            return True
        deadline = time.monotonic() + timeout_seconds
        while self._num_received[rank] < number:
            if not self._take_next(rank, max(deadline - time.monotonic(), 0.0)):
                return False
        return True

    def _take_next(self, rank: int, timeout_seconds: float) -> bool:
        counter, number = self._incoming_counters[rank], self._num_received[rank] + 1
        if not self._flags.wait_for(rank, lambda: counter[0] >= number, timeout_seconds):
            return False
        self._flags.order()
        self._num_received[rank] = number
        self._kept[rank][number] = list(self._message.unpack_from(self._incoming[rank], self._start(number)))
        return True

    def _start(self, number: int) -> int:
        return _COUNTER_WORDS * _WORD_BYTES + (number & 1) * self._message.size


def _view(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
