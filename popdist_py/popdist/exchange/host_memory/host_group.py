"""A host group: processes of one host that share memory. All collectives within a host use a host group.

:meth:`HostGroup.allocate` makes a row of memory for each rank and maps all rows into all ranks; a
:meth:`HostGroup.reduction` makes every row the sum of all rows.
"""

import os
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Final, Self

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from popdist.errors import BackendError, Names
from popdist.exchange.host_memory.addition import Op, Reduction
from popdist.exchange.host_memory.barriers import MESSAGES, Barriers, ProcessWatch, make_fence, operation, purpose
from popdist.exchange.host_memory.segments import (
    PAGE_BYTES,
    TOKEN_OFFSET,
    PeerSegment,
    Reservation,
    Segment,
    SegmentExchange,
    SharedBlock,
    as_tensor,
    as_words,
    map_window,
    open_through_proc,
    whole_pages,
)

MOST_RANKS: Final = TOKEN_OFFSET // 8 - MESSAGES
"""Maximum number of ranks in a host group, because a rank's page of memory has a word for each rank."""

_ALLOCATE: Final = operation("allocate")
_BARRIER: Final = 0


class HostGroup:
    """Processes that share one host's memory. All ranks must call the same methods in the same order, except
    methods whose docstring says that they do not wait for other ranks.

    If a rank is lost or late, all other ranks raise an error that names the rank, and the group ends.
    """

    def __init__(
        self,
        segment: Segment,
        found: dict[int, PeerSegment],
        barriers: Barriers,
        rank: int,
        *,
        is_part: bool = False,
    ) -> None:
        self.rank = rank
        self.size = len(found) + 1
        self.barriers = barriers
        self._segment = segment
        self._found = found
        self._is_part = is_part

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        names: Names | None = None,
    ) -> Self | None:
        """Connect all ranks by shared memory; return None on all ranks if impossible. All ranks must call this."""
        if size > MOST_RANKS:
            return None
        names = names or Names(members=tuple(range(size)))
        exchange = SegmentExchange(store, rank, [names.of([other]) for other in range(size)], timeout_seconds)
        try:
            fence, segment = make_fence(), Segment()
        except BackendError:
            exchange.refuse()
            return None
        try:
            segment.grow(PAGE_BYTES)
            window = map_window(segment.descriptor, 0, PAGE_BYTES)
            found = exchange.run(segment, memoryview(window))
        except BaseException:
            segment.close()
            raise
        if found is None:
            segment.close()
            return None
        windows = {other: map_window(theirs.descriptor, 0, PAGE_BYTES) for other, theirs in found.items()} | {
            rank: window
        }
        barriers = Barriers(
            [memoryview(windows[other]).cast("Q") for other in range(size)],
            rank=rank,
            names=names,
            watch=ProcessWatch({other: theirs.pid for other, theirs in found.items()}),
            fence=fence,
            timeout_seconds=timeout_seconds,
        )
        group = cls(segment, found, barriers, rank)
        group.barrier()  # so that every watched process existed when the watch began
        return group

    @property
    def num_bytes(self) -> int:
        """Number of bytes of shared memory that this rank has reserved and not released."""
        return self._segment.num_bytes

    def reserve(self, num_bytes: int) -> Reservation:
        """Reserve ``num_bytes`` of this rank's shared memory until no tensor uses them. Waits for no rank."""
        offset, length = self._segment.grow(num_bytes), whole_pages(num_bytes)
        window = map_window(self._segment.descriptor, offset, length)
        weakref.finalize(window, self._segment.release, offset, length).atexit = False
        return Reservation(offset=offset, row=as_tensor(window)[:num_bytes])

    def part(self, ranks: Sequence[int], page: Reservation, offsets: Sequence[int]) -> "HostGroup":
        """Make a group of only ``ranks``; ``page`` and ``offsets`` are its barriers' memory. Waits for no rank."""
        places = zip(ranks, offsets, strict=True)
        pages = [
            page.row if other == self.rank else self.map(other, offset, PAGE_BYTES) for other, offset in places
        ]
        found = {place: self._found[other] for place, other in enumerate(ranks) if other != self.rank}
        watch = ProcessWatch({place: theirs.pid for place, theirs in found.items()})
        barriers = self.barriers.of_part(ranks, [as_words(page) for page in pages], watch)
        return HostGroup(self._segment, found, barriers, barriers.rank, is_part=True)

    def allocate(self, num_bytes: int, reserved: Reservation | None = None) -> SharedBlock:
        """Allocate ``num_bytes`` of zeros (a row) for each rank, and map each rank's row into all processes.

        If ``reserved`` is given, it is this rank's row. If a rank has no room for its row, every rank raises
        BackendError, and the group can still be used.
        """
        trouble, rows, reason = "", [], purpose(_ALLOCATE, count=num_bytes)
        try:
            offset = self._segment.grow(num_bytes) if reserved is None else reserved.offset
        except BackendError as error:
            offset, trouble = -1, str(error)
        offsets = [word - 1 for word in self.barriers.exchange(offset + 1, reason)]
        if not trouble and -1 not in offsets:
            try:
                rows = [
                    self.map(rank, offset, num_bytes) if reserved is None or rank != self.rank else reserved.row
                    for rank, offset in enumerate(offsets)
                ]
            except (OSError, ValueError) as error:
                trouble = f"cannot map {num_bytes} bytes of each rank: {error}"
        have_room = self.barriers.exchange(1 if rows else 0, reason)
        if not all(have_room):
            if offset >= 0 and reserved is None:
                self._segment.release(offset, whole_pages(num_bytes))
            without = self.barriers.name([rank for rank, has_room in enumerate(have_room) if not has_room])
            raise BackendError(trouble or f"{without} found no room for {num_bytes} more bytes of shared memory")
        return SharedBlock(self._segment, offset, rows, self.rank)

    def map(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        """Map the shared memory of ``rank`` at ``offset``, and return it as flat bytes. Waits for no rank."""
        descriptor = self._segment.descriptor if rank == self.rank else self._found[rank].descriptor
        return as_tensor(map_window(descriptor, offset, whole_pages(num_bytes)))[:num_bytes]

    def open_file(self, rank: int, descriptor: int) -> int:
        """Open the memory file that ``rank`` has open as ``descriptor``; return a descriptor or raise OSError."""
        return open_through_proc(self._found[rank].pid, descriptor)

    def reduction(
        self,
        rows: Sequence[Tensor],
        op: Op = "sum",
        *,
        outputs: Sequence[Tensor] | None = None,
        pairs: Sequence[tuple[int, int]] | None = None,
    ) -> Reduction:
        """Prepare a collective that combines ``rows``, each rank's shared memory, into ``outputs`` by ``op``.

        Each ``run()`` of the reduction is a collective: afterwards the result is in every output, and the contents
        of ``rows`` are lost. This method itself does not wait for other ranks.
        """
        return Reduction(self.barriers, rows, op, outputs=rows if outputs is None else outputs, pairs=pairs)

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait until all ranks are in this call; then each rank sees all that ranks wrote to shared memory."""
        self.barriers.wait(_BARRIER, timeout_seconds)

    def close(self) -> None:
        """Leave the group; the other ranks detect this. Shared memory stays mapped while a tensor uses it."""
        self.barriers.close()
        if self._is_part:  # the segments belong to the whole group, which is closed later
            return
        self._segment.close()
        while self._found:
            os.close(self._found.popitem()[1].descriptor)


_COUNTER_BYTES: Final = 64
"""Number of bytes for a counter of messages, so that each counter has its own cache line."""


class ShortMessages:
    """Short messages between ranks of a host, all of the same length; all ranks make this object together."""

    def __init__(self, group: HostGroup, num_bytes: int) -> None:
        # The n-th message of a rank is answered by the n-th message of the other rank. A rank sends its next
        # message when it has read the other's answer to the last, so two places and a counter for each direction
        # are enough.
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
        """Send ``message`` to ``ranks``; return for each rank the number of its answer, for :meth:`receive`."""
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

    def receive(self, rank: int, number: int, timeout_seconds: float) -> bytes | None:
        """Return message ``number`` of ``rank``; None if it is late. Raises BackendError if ``rank`` was lost."""
        return self._kept[rank].pop(number) if self._read_until(rank, number, timeout_seconds) else None

    def _read_until(self, rank: int, number: int, timeout_seconds: float) -> bool:
        """Read the messages of ``rank`` up to ``number``; return False if message ``number`` is late."""
        deadline = time.monotonic() + timeout_seconds
        while self._num_received[rank] < number:
            if not self._read_next(rank, deadline):
                return False
        return True

    def _read_next(self, rank: int, deadline: float) -> bool:
        counter, number = self._incoming_counters[rank], self._num_received[rank] + 1
        if counter[0] < number and not self._barriers.wait_for(
            [rank], lambda: counter[0] >= number, max(deadline - time.monotonic(), 0.0)
        ):
            return False
        self._barriers.fence()
        self._num_received[rank] = number
        self._kept[rank][number] = bytes(self._incoming[rank][number & 1])
        return True


def _halves(box: memoryview) -> tuple[memoryview, memoryview]:
    """Return the memory of two messages in ``box``, shared memory that begins with a counter of messages."""
    middle = (_COUNTER_BYTES + len(box)) // 2
    return box[_COUNTER_BYTES:middle], box[middle:]


def _view(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
