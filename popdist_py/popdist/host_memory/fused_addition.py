"""Rows added in one pass, in C, where that can be done."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from popdist.host_memory import extension
from popdist.host_memory.addition_order import additions
from popdist.host_memory.extension import as_numbers

NUMS_ROWS: Final = (2, 4)
DTYPES: Final = (torch.float32, torch.float64)


def fused_sum(
    rows: Sequence[Tensor], outputs: Sequence[Tensor], pairs: Sequence[tuple[int, int]], elements: range
) -> Callable[[float], None] | None:
    """What adds ``elements`` of flat rows of one dtype and length, into all of them, divided by what it is given.

    Args:
        rows: Which must outlive what is returned.
        outputs: Where the sum is wanted.
        pairs: In which order the rows are added.
        elements: A part of each row.

    Returns:
        None where the extension is missing, or makes no such sum.
    """
    dtype, found = rows[0].dtype, extension.extension()
    is_usual = tuple(pairs) == additions(len(rows)) and _places(outputs) == _places(rows)
    if found is None or dtype not in DTYPES or len(rows) not in NUMS_ROWS or not is_usual:
        return None
    starts = as_numbers(row.data_ptr() + elements.start * dtype.itemsize for row in rows)
    return partial(found.add_rows, starts, len(elements), dtype is torch.float64)


def _places(rows: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(row.data_ptr(), row.dtype) for row in rows]
