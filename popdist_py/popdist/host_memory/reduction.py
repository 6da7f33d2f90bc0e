"""Combining rows of shared memory in place: each rank a share of the elements, in blocks that fit its cache."""

from collections.abc import Callable, Sequence
from typing import Final, get_args

import torch
from torch import Tensor

from popdist.host_memory.additions import additions, blocks, share
from popdist.host_memory.combining import HALVES, KINDS, Op, combiner
from popdist.host_memory.flags import Flags, operation, purpose

_REDUCE: Final = {op: operation(f"reduction in place ({op})") for op in get_args(Op)}


class Reduction:
    """A reduction in place that can be run again and again; made by `HostGroup.reduction`."""

    def __init__(
        self,
        flags: Flags,
        rows: Sequence[Tensor],
        op: Op,
        *,
        outputs: Sequence[Tensor],
        pairs: Sequence[tuple[int, int]] | None,
        then: Callable[[Tensor], object] | None,
    ) -> None:
        num_elements, dtype = len(rows[0]), rows[0].dtype
        if {(row.shape, row.dtype) for row in rows} != {(rows[0].shape, dtype)} or rows[0].dim() != 1:
            raise ValueError("the rows of a reduction must be flat, and of one length and dtype")
        if any(row.shape != rows[0].shape for row in outputs):
            raise ValueError("the outputs of a reduction must be as long as its rows")
        self._flags = flags
        self._purpose = purpose(_REDUCE[op], kind=KINDS[dtype], count=num_elements)
        self._combine = combiner(op, dtype)
        self._pairs = additions(len(rows)) if pairs is None else tuple(pairs)
        self._divisor = len(rows) if op == "mean" else None
        self._then = then
        elements = share(num_elements, flags.rank, flags.size, rows[0].element_size())
        pieces = list(blocks(elements, rows[0].element_size()))
        is_half = dtype in HALVES
        targets = [out for out in outputs if is_half or not _is_same(out, rows[0])]
        self._pieces = [([row[it] for row in rows], [out[it] for out in targets]) for it in pieces]
        longest = max((piece.stop - piece.start for piece in pieces), default=0)
        self._wide = [torch.empty(longest, dtype=torch.float32) for _ in rows] if is_half else None

    def run(self, timeout_seconds: float | None = None) -> None:
        """Combine: a collective of the group.

        Raises:
            BackendError: If a rank was lost or did not come in time; the message names it.
            CollectiveError: If a rank is in another operation of this group.
        """
        self._flags.meet(self._purpose, timeout_seconds)
        for rows, outputs in self._pieces:
            if self._wide is None:
                total = self._add(rows)
            else:
                total = self._add(
                    [wide[: len(row)].copy_(row) for wide, row in zip(self._wide, rows, strict=True)]
                )
            for out in outputs:
                out.copy_(total)
        self._flags.meet(self._purpose, timeout_seconds)

    def _add(self, rows: Sequence[Tensor]) -> Tensor:
        combine = self._combine
        for left, right in self._pairs:
            combine(rows[left], rows[right], out=rows[left])
        total = rows[0]
        if self._divisor is not None:
            total.div_(self._divisor)
        if self._then is not None:
            self._then(total)
        return total


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.dtype == right.dtype
