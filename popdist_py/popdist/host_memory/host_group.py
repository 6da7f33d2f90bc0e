"""A host group: processes of one host that share memory, on which all collectives of a host are built.

::

    group = HostGroup.connect(store, rank, size, timeout_seconds=60)   # None on every rank: not one host
    block = group.allocate(num_bytes)                   # a row of shared memory for each rank, all mapped here
    block.mine                                          # this rank's row: a flat tensor of bytes
    block.of(rank)                                      # another's row, in place
    total = group.reduction([row.view(torch.float32) for row in block.rows])
    total.run()                                         # every row is now the sum of all rows
    group.barrier()
"""

import os
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Final, Self

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from popdist.errors import BackendError
from popdist.host_memory.addition import Op, Reduction
from popdist.host_memory.barriers import Barriers, Names, ProcessWatch, make_fence, operation, purpose
from popdist.host_memory.segments import (
    PAGE_BYTES,
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

_ALLOCATE: Final = operation("allocate")
_BARRIER: Final = 0


class HostGroup:
    """Processes of one host that share memory; made by :meth:`connect`.

    All calls but :meth:`close` and the attributes are collectives: every rank makes the same ones in the same
    order, from one thread at a time. A rank that is lost or late is an error on all others that names it, and ends
    the group: every later call raises the same. In a process that was forked from a rank every call raises.

    Attributes:
        rank: This process's number, from 0.
        size: Processes in the group, at least 1.
        barriers: Those of the processes, which every operation is made of.
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
        """Share memory with the other ranks, which all call this.

        Args:
            store: Where the ranks find each other; used by nobody else under its prefix.
            rank: This process.
            size: Ranks in the group.
            timeout_seconds: How long a lost or late rank is waited for, here and in every operation.
            names: What the ranks are called in errors; None means rank 0 and so on.

        It is None on every rank where they do not all share a host, or may not share memory. Raises BackendError
        if a rank did not come in time, or there is no memory for the group.
        """
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
        group.barrier()  # so a process that is watched is one that was there after the watch had begun
        return group

    @property
    def num_bytes(self) -> int:
        """How much memory this rank's rows take in all."""
        return self._segment.num_bytes

    def reserve(self, num_bytes: int) -> Reservation:
        """Memory of this rank that :meth:`allocate` can make known to the others later; no collective.

        It is given back when the last view of it is gone here, so the others may use it in operations of the group
        only. Raises BackendError if there is no room.
        """
        offset, length = self._segment.grow(num_bytes), whole_pages(num_bytes)
        window = map_window(self._segment.descriptor, offset, length)
        weakref.finalize(window, self._segment.release, offset, length).atexit = False
        return Reservation(offset=offset, row=as_tensor(window)[:num_bytes])

    def part(self, ranks: Sequence[int], page: Reservation, offsets: Sequence[int]) -> "HostGroup":
        """A group of some of the ranks, in the same memory; no collective, and waits for no rank.

        It counts ``ranks`` in their order, this one among them. Each has a page at its offset, which it has
        reserved and uses for nothing else. Raises OSError or ValueError if the process may map no more.
        """
        places = zip(ranks, offsets, strict=True)
        pages = [
            page.row if other == self.rank else self._map(other, offset, PAGE_BYTES) for other, offset in places
        ]
        found = {place: self._found[other] for place, other in enumerate(ranks) if other != self.rank}
        watch = ProcessWatch({place: theirs.pid for place, theirs in found.items()})
        barriers = self.barriers.of_part(ranks, [as_words(page) for page in pages], watch)
        return HostGroup(self._segment, found, barriers, barriers.rank, is_part=True)

    def allocate(self, num_bytes: int, reserved: Reservation | None = None) -> SharedBlock:
        """A row of ``num_bytes`` for each rank, mapped by all: new and all zero, or what this rank has reserved.

        Raises:
            BackendError: If some rank has no room for its row: every rank raises it, and the group goes on.
            CollectiveError: If the ranks are not in the same call, with the same length of at least 1.
        """
        trouble, rows = "", []
        try:
            offset = self._segment.grow(num_bytes) if reserved is None else reserved.offset
        except BackendError as error:
            offset, trouble = -1, str(error)
        self.barriers.post(offset + 1)
        self.barriers.wait(purpose(_ALLOCATE, count=num_bytes))
        offsets = [word - 1 for word in self.barriers.posted()]
        if not trouble and -1 not in offsets:
            try:
                rows = [
                    self._map(rank, offset, num_bytes) if reserved is None or rank != self.rank else reserved.row
                    for rank, offset in enumerate(offsets)
                ]
            except (OSError, ValueError) as error:
                trouble = f"cannot map {num_bytes} bytes of each rank: {error}"
        self.barriers.post(1 if rows else 0)
        self.barriers.wait(purpose(_ALLOCATE, count=num_bytes))
        if not all(said := self.barriers.posted()):
            if offset >= 0 and reserved is None:
                self._segment.release(offset, whole_pages(num_bytes))
            without = self.barriers.name([rank for rank, has_room in enumerate(said) if not has_room])
            raise BackendError(trouble or f"{without} found no room for {num_bytes} more bytes of shared memory")
        return SharedBlock(self._segment, offset, rows, self.rank)

    def _map(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        descriptor = self._segment.descriptor if rank == self.rank else self._found[rank].descriptor
        return as_tensor(map_window(descriptor, offset, whole_pages(num_bytes)))[:num_bytes]

    def open_file(self, rank: int, descriptor: int) -> int:
        """A descriptor of this process for a file in memory that another rank has open; no collective.

        Raises OSError if that is no file of popdist's, or ``/proc`` does not lead there.
        """
        return open_through_proc(self._found[rank].pid, descriptor)

    def reduction(
        self,
        rows: Sequence[Tensor],
        op: Op = "sum",
        *,
        outputs: Sequence[Tensor] | None = None,
        pairs: Sequence[tuple[int, int]] | None = None,
    ) -> Reduction:
        """Prepare to combine rows of shared memory in place, each rank a share of the elements; no collective.

        What is prepared can be run again and again: ``run()`` is the collective. It waits for all ranks, combines,
        and waits again, so that afterwards the result stands in every output. What stood in ``rows`` is lost.

        Args:
            rows: Flat contiguous tensors of one dtype and length in memory of this group's blocks: the same ones
                in the same order on every rank.
            op: "sum", "mean" (floating dtypes only), "min", "max" or "product", which combine half dtypes in
                float32; or "rounded sum", which rounds each partial sum. NaN wins in "min" and "max".
            outputs: Where the result goes, as ``rows``; may be of another floating dtype. None means ``rows``.
            pairs: In which order: row ``left`` becomes the result of both, and row 0 ends as the result of all.
                None means the tree of `popdist.tree` over the rows.

        Raises:
            ValueError: If the rows do not fit together.
        """
        return Reduction(self.barriers, rows, op, outputs=rows if outputs is None else outputs, pairs=pairs)

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait until every rank is here; afterwards each sees what all wrote into shared memory before.

        Args:
            timeout_seconds: How long to wait; None means as long as the group was made to.

        Raises:
            BackendError: If a rank was lost or did not come in time; the message names it.
            CollectiveError: If a rank is in another operation of this group.
        """
        self.barriers.wait(_BARRIER, timeout_seconds)

    def close(self) -> None:
        """Leave the group: the others see it, and nothing is held any more but what views of blocks still map.

        A part of a group leaves the segments to that one, which is closed later.
        """
        self.barriers.close()
        if self._is_part:
            return
        self._segment.close()
        while self._found:
            os.close(self._found.popitem()[1].descriptor)


_COUNTER_BYTES: Final = 64
"""A counter has a line of cache of its own."""


class ShortMessages:
    """The messages between the ranks of a group, of a multiple of 8 bytes; made by every rank at the same time.

    They need no barrier, and any set of ranks may exchange some. Two ranks count those that they exchange: the
    n-th of one is answered by the n-th of the other. Between them stand two places and a counter for each
    direction. A rank sends its next message to another only after it has read that one's answer to the last, even
    if it was not asked for yet: so both sides are at most one message apart, and what is sent never overwrites
    what is still to be read.
    """

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
