"""Where ranks lay down what the others shall read: two slots for each rank, used in turn.

What is said for meeting n stands in the slot of n's parity (see `popdist.host_memory.flags`), so one meeting for
each piece of data is enough: while a slow rank still reads one slot, a fast one fills the other.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from popdist.host_memory.host_group import HostGroup

FIRST_BYTES: Final = 1 << 16
"""Size of a slot until something larger is sent."""

LARGEST_BYTES: Final = 1 << 20
"""Size of a slot from then on; what is larger goes in pieces, which stay in the caches on their way."""

_PAIR: Final = 2
_SHARED_BYTES: Final = 1 << 16

Hearer = Callable[[Sequence[Tensor], int, int], None]


class Slots:
    """The slots of a group; every rank makes them, and lets them grow, at the same time.

    Attributes:
        num_bytes: Size of each.
    """

    def __init__(self, group: HostGroup) -> None:
        self.num_bytes = FIRST_BYTES
        self._group = group
        self._block = group.allocate(2 * FIRST_BYTES)
        self._hearers: list[Hearer] = []
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def tell(self, hear: Hearer) -> None:
        """Tell ``hear`` every rank's memory, :attr:`num_bytes` and :attr:`whole_bytes`, now and when they grow."""
        self._hearers.append(hear)
        hear(self._block.rows, self.num_bytes, self.whole_bytes)

    def fit(self, num_bytes: int) -> None:
        """Make the slots larger if ``num_bytes`` do not fit; what does not fit the largest goes in pieces.

        Raises:
            BackendError: If a rank has no room: every rank raises it, and the slots stay as they are.
        """
        if num_bytes > self.num_bytes < LARGEST_BYTES:
            block = self._group.allocate(2 * LARGEST_BYTES)
            self._block.release()
            self._block, self.num_bytes = block, LARGEST_BYTES
            self._views.clear()
            for hear in self._hearers:
                hear(block.rows, self.num_bytes, self.whole_bytes)

    @property
    def whole_bytes(self) -> int:
        """Up to this size each rank adds all by itself, in one meeting: of three and more not what is large."""
        return self.num_bytes if self._group.size == _PAIR else _SHARED_BYTES

    def at(self, number: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's slot for meeting ``number``, in rank order: flat tensors of ``dtype``."""
        key = (number & 1, dtype)
        if key not in self._views:
            start = key[0] * self.num_bytes
            self._views[key] = [row[start : start + self.num_bytes].view(dtype) for row in self._block.rows]
        return self._views[key]
