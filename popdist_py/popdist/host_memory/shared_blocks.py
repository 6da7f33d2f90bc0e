"""Rows of shared memory, as the processes of a group see them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from popdist.host_memory.segments import Segment, whole_pages


class SharedBlock:
    """A row of memory of each rank, mapped by all of them; made by :meth:`HostGroup.allocate`.

    Attributes:
        rows: Every rank's row, in rank order: flat uint8 tensors that begin at a page. Any view of one keeps it
            mapped. Nothing but :meth:`HostGroup.barrier` and the operations of the group tells a rank when another
            has finished writing.
        mine: This rank's row.
    """

    def __init__(self, segment: Segment, offset: int, rows: Sequence[Tensor], rank: int) -> None:
        self.rows = tuple(rows)
        self.mine = rows[rank]
        self._segment = segment
        self._offset = offset

    def of(self, rank: int) -> Tensor:
        """The row of ``rank``."""
        return self.rows[rank]

    def release(self) -> None:
        """Give this rank's memory back, when no rank reads it any more: it reads as zeros from now on.

        A block that is never released goes when the group is closed and the last view of it is gone.
        """
        self.releaser()

    @property
    def releaser(self) -> Callable[[], None]:
        """What does that, and does not keep the block mapped."""
        return partial(self._segment.release, self._offset, whole_pages(len(self.mine)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory of one rank; made by :meth:`HostGroup.reserve`.

    Attributes:
        offset: Where it is in the rank's segment.
        row: It: a flat uint8 tensor, all zero.
    """

    offset: int
    row: Tensor
