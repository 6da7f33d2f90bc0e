"""Messages of a fixed length from each rank of a host group to each other one, outside of barriers.

Any set of ranks may exchange messages. Two ranks count those that they exchange: the n-th of one is answered by
the n-th of the other. Between them stand two places and a counter for each direction. A rank sends its next
message to another only after it has read that one's answer to the last, even if it was not asked for yet: so both
sides are at most one message apart, and what is sent never overwrites what is still to be read.
"""

import time
from collections.abc import Collection
from typing import Any, Final

from torch import Tensor

from popdist.errors import BackendError
from popdist.host_memory.host_group import HostGroup

_COUNTER_BYTES: Final = 64
"""A counter has a line of cache of its own."""


class ShortMessages:
    """The messages between the ranks of a group, of a multiple of 8 bytes; made by every rank at the same time."""

    def __init__(self, group: HostGroup, num_bytes: int) -> None:
        self._barriers = group.barriers
        stride = _COUNTER_BYTES + 2 * num_bytes
        block = group.allocate(group.size * stride)
        places = [slice(other * stride, (other + 1) * stride) for other in range(group.size)]
        rows = [_view(row) for row in block.rows]
        outgoing = [rows[group.rank][place] for place in places]
        incoming = [row[places[group.rank]] for row in rows]
        self._outgoing = [_halves(box) for box in outgoing]
        self._incoming = [_halves(box) for box in incoming]
        self._outgoing_counters = [box.cast("Q") for box in outgoing]
        self._incoming_counters = [box.cast("Q") for box in incoming]
        self._num_received = [0] * group.size
        self._kept: list[dict[int, bytes]] = [{} for _ in range(group.size)]

    def send(self, ranks: Collection[int], message: bytes) -> list[int]:
        """Send to each of ``ranks``, and wait for no answer; for each the number of the message and its answer.

        Raises BackendError if this rank or one of ``ranks`` has left, or does not answer the message before.
        """
        barriers = self._barriers
        barriers.raise_failure()
        for rank in ranks:
            number = self._outgoing_counters[rank][0]
            if self._num_received[rank] < number and not self._read_until(rank, number, barriers.timeout_seconds):
                raise BackendError(
                    f"{barriers.name([rank])} did not come within {barriers.timeout_seconds:g} seconds"
                )
        numbers = []
        for rank in ranks:
            counter = self._outgoing_counters[rank]
            number = counter[0] + 1
            self._outgoing[rank][number & 1][:] = message
            barriers.fence()
            counter[0] = number
            numbers.append(number)
        barriers.wake()
        return numbers

    def receive_if_there(self, rank: int, number: int) -> bytes | None:
        """The next message of ``rank``, once, if it is there already; or None."""
        if self._num_received[rank] != number - 1 or self._incoming_counters[rank][0] < number:
            return None
        self._barriers.fence()
        self._num_received[rank] = number
        return bytes(self._incoming[rank][number & 1])

    def receive(self, rank: int, number: int, timeout_seconds: float) -> bytes | None:
        """A message of ``rank``, once; None if it did not come in time, and then it can still be received.

        Raises BackendError if ``rank`` was lost or has left.
        """
        return self._kept[rank].pop(number) if self._read_until(rank, number, timeout_seconds) else None

    def _read_until(self, rank: int, number: int, timeout_seconds: float) -> bool:
        """Read the messages of ``rank`` up to ``number``; False if that one does not come in time."""
        deadline = time.monotonic() + timeout_seconds
        while self._num_received[rank] < number:
            if not self._read_next(rank, deadline):
                return False
        return True

    def _read_next(self, rank: int, deadline: float) -> bool:
        counter, number = self._incoming_counters[rank], self._num_received[rank] + 1
        if counter[0] < number and not self._barriers.wait_for(
            rank, lambda: counter[0] >= number, max(deadline - time.monotonic(), 0.0)
        ):
            return False
        self._barriers.fence()
        self._num_received[rank] = number
        self._kept[rank][number] = bytes(self._incoming[rank][number & 1])
        return True


def _halves(box: memoryview) -> tuple[memoryview, memoryview]:
    """The two places for messages, behind the counter."""
    middle = (_COUNTER_BYTES + len(box)) // 2
    return box[_COUNTER_BYTES:middle], box[middle:]


def _view(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
