"""Messages of any length from one rank of a host group to another rank; no other rank takes part.

A sender copies a message into a buffer of its own memory and posts the buffer first, so that it waits for no rank.
The sender's page has the newest buffer for each rank, and each buffer has the place of the buffer before: a
receiver walks back to the last buffer that it knows. A buffer is used again when its message was received.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import Final

from torch import Tensor

from popdist.errors import BackendError
from popdist.exchange.host_memory.barriers import MESSAGES
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.host_memory.segments import PAGE_BYTES, as_words, whole_pages

# words at the beginning of a buffer; the receiver writes the last word, and the owner all other words
_NUM_BYTES: Final = 0
_PREVIOUS: Final = 1
_TAG: Final = 2
_LENGTH: Final = 3
_WRITTEN: Final = 4
_IS_RECEIVED: Final = 5
_HEADER_BYTES: Final = 64

# a rank's word: the number of the message, and the page of the segment at which the buffer begins
_PLACE_BITS: Final = 42
_PLACES: Final = (1 << _PLACE_BITS) - 1
_NUMBERS: Final = (1 << 64 - _PLACE_BITS) - 1

_PIECE_BYTES: Final = 1 << 20
"""Number of bytes of a piece; the receiver copies one piece while the sender copies the next piece."""

MOST_AHEAD_BYTES: Final = 1 << 26
"""Maximum number of bytes that a rank has sent and the receiver has not received, before the sender must wait."""

_MOST_KEPT_BYTES: Final = 1 << 27
"""Maximum number of bytes of free message buffers that are kept when another buffer is made."""

_MOST_TIMES_TOO_LARGE: Final = 8
_MOST_MAPPED: Final = 256


class _Buffer:
    """A buffer in shared memory for one message at a time."""

    def __init__(self, row: Tensor, place: int) -> None:
        self.place = place
        self.words = as_words(row[:_HEADER_BYTES])
        self.data = row[_HEADER_BYTES:]
        self.receiver = -1
        self.num_sent = 0


class Messages:
    """The messages of this rank to and from all ranks of its group, including itself; any thread may use them."""

    def __init__(self, group: HostGroup) -> None:
        self.barriers = group.barriers
        self._group = group
        self._newest = group.barriers.pages[group.rank][MESSAGES:]
        self._incoming = [page[MESSAGES + group.rank :] for page in group.barriers.pages]
        self._sending, self._receiving = RLock(), RLock()
        self._buffers: list[_Buffer] = []
        self._mapped: dict[tuple[int, int], _Buffer] = {}
        self._seen = [0] * group.size
        self._arrived: list[list[_Buffer]] = [[] for _ in range(group.size)]
        self._posted: list[Receipt] = []

    def send(self, data: Tensor, rank: int, tag: int) -> "Sent":
        """Send a copy of the flat bytes ``data`` to ``rank``. Raises BackendError if ``rank`` has gone."""
        barriers, length = self.barriers, len(data)
        with self._sending:
            barriers.check([rank])
            buffer, newest = self._free_buffer(length), self._newest[rank]
            words = buffer.words
            words[_PREVIOUS], words[_TAG], words[_LENGTH] = newest & _PLACES, tag, length
            words[_WRITTEN] = words[_IS_RECEIVED] = 0
            buffer.receiver = rank
            buffer.num_sent += 1
            barriers.fence()
            self._newest[rank] = ((newest >> _PLACE_BITS) + 1 & _NUMBERS) << _PLACE_BITS | buffer.place
            barriers.wake()
            for start in range(0, length, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, length)
                buffer.data[start:stop].copy_(data[start:stop])
                barriers.fence()
                words[_WRITTEN] = stop
            barriers.wake()
            return Sent(self, buffer)

    def receive(
        self, into: Tensor, sources: Sequence[int], tag: int, finish: Callable[[], None] = lambda: None
    ) -> "Receipt":
        """Request the next message with ``tag`` from one of ``sources``. When the message is there, it is copied
        into ``into``, and ``finish()`` is called.
        """
        self.barriers.raise_failure()
        receipt = Receipt(self, into, sources, tag, finish)
        with self._receiving:
            self._posted.append(receipt)
        return receipt

    def num_waiting_bytes(self, rank: int) -> int:
        """Return the number of bytes of all messages to ``rank`` that ``rank`` has not received so far."""
        with self._sending:
            buffers = [
                buffer for buffer in self._buffers if buffer.receiver == rank and not buffer.words[_IS_RECEIVED]
            ]
            return sum(buffer.words[_LENGTH] for buffer in buffers)

    def has_news(self, sources: Sequence[int]) -> bool:
        """Whether a message from one of ``sources`` has come since the last call of :meth:`advance`."""
        return any(self._incoming[source][0] != self._seen[source] for source in sources)

    def advance(self) -> None:
        """Receive the messages that have come, in the order in which the program has requested messages."""
        with self._receiving:
            for source in {source for receipt in self._posted for source in receipt.sources}:
                self._find_new(source)
            for receipt in list(self._posted):
                for source, buffer in [(it, buffer) for it in receipt.sources for buffer in self._arrived[it]]:
                    if buffer.words[_TAG] == receipt.tag:
                        self._posted.remove(receipt)
                        self._arrived[source].remove(buffer)
                        receipt.source = source
                        receipt.end(partial(self._copy, buffer, source, receipt.into))
                        break

    def wait(
        self, ranks: Sequence[int], is_done: Callable[[], bool], timeout_seconds: float | None = None
    ) -> bool:
        """Wait until ``is_done()``; return False after ``timeout_seconds``. If ``timeout_seconds`` is None, the
        group's timeout counts: after this time the group ends, with a BackendError.
        """
        barriers = self.barriers
        seconds = barriers.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            is_in_time = barriers.wait_for(ranks, is_done, seconds)
        except BackendError as error:
            barriers.fail(str(error))
            raise
        if not is_in_time and timeout_seconds is None:
            barriers.fail(f"{barriers.name(ranks)} did not come within the timeout of {seconds:g} seconds")
            barriers.raise_failure()
        return is_in_time

    def _free_buffer(self, length: int) -> _Buffer:
        """Return a message buffer that no rank reads, with room for ``length`` bytes."""
        needed = whole_pages(_HEADER_BYTES + length)
        free = {buffer: buffer.words[_NUM_BYTES] for buffer in self._buffers if buffer.words[_IS_RECEIVED]}
        fitting = [buffer for buffer, size in free.items() if needed <= size <= needed * _MOST_TIMES_TOO_LARGE]
        if fitting:
            return min(fitting, key=lambda buffer: free[buffer])
        if sum(free.values()) + needed > _MOST_KEPT_BYTES:
            self._buffers = [buffer for buffer in self._buffers if buffer not in free]
        reserved = self._group.reserve(needed)
        self._buffers.append(_Buffer(reserved.row, reserved.offset // PAGE_BYTES))
        self._buffers[-1].words[_NUM_BYTES] = needed
        return self._buffers[-1]

    def _find_new(self, source: int) -> None:
        """Find the messages that the rank ``source`` has sent to this rank since the last call."""
        newest, seen = self._incoming[source][0], self._seen[source]
        self.barriers.fence()
        num_new, place, buffers = (newest >> _PLACE_BITS) - (seen >> _PLACE_BITS) & _NUMBERS, newest & _PLACES, []
        for _ in range(num_new):
            buffers.append(self._map(source, place))
            place = buffers[-1].words[_PREVIOUS]
        self._arrived[source] += reversed(buffers)
        self._seen[source] = newest

    def _map(self, source: int, place: int) -> _Buffer:
        key, offset = (source, place), place * PAGE_BYTES
        if key not in self._mapped:
            if len(self._mapped) >= _MOST_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            num_bytes = as_words(self._group.map(source, offset, PAGE_BYTES))[_NUM_BYTES]
            self._mapped[key] = _Buffer(self._group.map(source, offset, num_bytes), place)
        return self._mapped[key]

    def _copy(self, buffer: _Buffer, source: int, into: Tensor) -> None:
        """Copy a message into ``into``, while the sending rank may still write the end of the message."""
        words, length, num_copied = buffer.words, buffer.words[_LENGTH], 0
        if length > len(into):
            words[_IS_RECEIVED] = 1
            name = self.barriers.name([source])
            raise BackendError(f"{name} has sent {length} bytes, and the tensor to receive them has {len(into)}")
        while num_copied < length:
            self.wait([source], partial(_has_more, words, num_copied))
            self.barriers.fence()
            stop = words[_WRITTEN]
            into[num_copied:stop].copy_(buffer.data[num_copied:stop])
            num_copied = stop
        self.barriers.fence()
        words[_IS_RECEIVED] = 1
        self.barriers.wake()


def _has_more(words: memoryview, num_copied: int) -> bool:
    return bool(words[_WRITTEN] > num_copied)


class Sent:
    """A message that this rank has sent, and whose data was copied, so that the sent tensor may change."""

    source = -1
    error = None

    def __init__(self, messages: Messages, buffer: _Buffer) -> None:
        self._messages = messages
        self._buffer, self._number = buffer, buffer.num_sent

    def is_done(self) -> bool:
        """Whether the sender may go on: the message was received, or few bytes wait at the receiver."""
        buffer = self._buffer
        is_received = buffer.num_sent != self._number or buffer.words[_IS_RECEIVED]
        return bool(is_received) or self._messages.num_waiting_bytes(buffer.receiver) <= MOST_AHEAD_BYTES

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the message was received or the sender may go on; return False after ``timeout_seconds``."""
        return self.is_done() or self._messages.wait([self._buffer.receiver], self.is_done, timeout_seconds)


class Receipt:
    """A request to receive one message; ``source`` is the rank that sent the message, -1 before it has come."""

    def __init__(
        self, messages: Messages, into: Tensor, sources: Sequence[int], tag: int, finish: Callable[[], None]
    ) -> None:
        self.into = into
        self.sources = sources
        self.tag = tag
        self.source = -1
        self.error: Exception | None = None
        self._messages = messages
        self._finish = finish
        self._has_ended = False

    def end(self, copy: Callable[[], None]) -> None:
        """End the request: call ``copy()`` and ``finish()``, and keep an error, which :meth:`wait` then raises."""
        try:
            copy()
            self._finish()
        except BackendError as error:
            self.error = error
        self._has_ended = True

    def is_done(self) -> bool:
        """Whether the message was received, or receiving the message has failed."""
        if not self._has_ended:
            self._messages.advance()
        return self._has_ended

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the message; return False after ``timeout_seconds``. Raises BackendError if none can come."""
        messages = self._messages
        is_in_time = self.is_done() or messages.wait(
            self.sources,
            lambda: self._has_ended or (messages.has_news(self.sources) and self.is_done()),
            timeout_seconds,
        )
        if self.error is not None:
            raise self.error
        return is_in_time
