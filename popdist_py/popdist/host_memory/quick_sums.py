"""Sums of small tensors in C, where the extension ``_quick`` was built; without it Python does the same."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import torch

from popdist.host_memory import extension
from popdist.host_memory.addition_order import additions
from popdist.host_memory.combination import KINDS
from popdist.host_memory.extension import as_numbers
from popdist.host_memory.flags import purpose
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.slots import Slots

DTYPES: Final = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What the extension adds, in its order."""

MOST_RANKS: Final = 64

_NUM_LOOKS: Final = 400
"""At the others' counters, before Python waits for them."""


QuickSum = Callable[[list[torch.Tensor]], bool]
"""Whether the one tensor of the list has become the sum over the ranks; if not, nothing has happened.

Raises as all collectives do.
"""


def never(_tensors: Any) -> bool:  # noqa: ANN401 - whatever it is
    """What adds nothing."""
    return False


def alone(_tensors: Any) -> bool:  # noqa: ANN401 - as above
    """The sum over one rank, whatever it is."""
    return True


def make_quick_sum(group: HostGroup, slots: Slots, operation: int) -> QuickSum:
    """What adds small tensors of a group of at least two ranks.

    Args:
        group: The ranks.
        slots: Theirs.
        operation: The sum's number.
    """
    found, flags = extension.extension(), group.flags
    if found is None or group.size > MOST_RANKS:
        return never
    pairs = chain.from_iterable(additions(group.size))
    purposes = [purpose(operation, kind=KINDS[dtype]) for dtype in DTYPES]
    num_looks = 1 if flags.is_crowded else _NUM_LOOKS
    numbers = map(as_numbers, (flags.addresses, pairs, purposes))
    try:
        quick = found.Quick(torch.Tensor, flags, group.rank, group.size, num_looks, *numbers)
    except (AttributeError, ValueError):  # a torch whose tensors speak another DLPack
        return never

    def lay(rows: Sequence[torch.Tensor], slot_bytes: int, most_bytes: int) -> None:
        quick.lay(as_numbers(row.data_ptr() for row in rows), slot_bytes, most_bytes, rows)

    slots.tell(lay)
    reduce: QuickSum = quick.reduce
    return reduce
