"""Which elements of which parameters belong to which instance.

The elements of a list of parameters, laid end to end, are cut into as many runs of about equal length as there are
instances. Cuts lie at multiples of :data:`ALIGNMENT` within a parameter: torch computes the last few elements of a
tensor with other instructions than the ones before them, and no element may change from one kind to the other by
being in a slice.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from popdist.errors import OptimizerError

Ranges: TypeAlias = tuple[range, ...]
"""For each instance the elements of a parameter that it has, in the order of memory; empty for none."""

ALIGNMENT: Final = 128
"""In elements: a multiple of what torch's loops take at once on any CPU."""


def deal_elements(sizes: Sequence[int], num_shares: int, *, may_cut: Sequence[bool]) -> list[list[range]]:
    """The elements of each parameter that each share has.

    Args:
        sizes: Elements of each parameter.
        num_shares: At least 1.
        may_cut: For each parameter, whether it may have elements in several shares.

    Returns:
        For each share one range for each parameter, empty where it has none of it. Together the shares have each
        element once; a share is longer than the others by less than ``ALIGNMENT``, or by a parameter that may not
        be cut.
    """
    shares: list[list[range]] = [[] for _ in range(num_shares)]
    total, start = sum(sizes), 0
    for size, can_cut in zip(sizes, may_cut, strict=True):
        cuts = [_cut(total * k // num_shares - start, size, can_cut=can_cut) for k in range(num_shares + 1)]
        for share, first, last in zip(shares, [0, *cuts[1:-1]], [*cuts[1:-1], size], strict=True):
            share.append(range(first, last))
        start += size
    return shares


def _cut(position: int, size: int, *, can_cut: bool) -> int:
    """Where a cut that should be at ``position`` of a parameter is made."""
    if position <= 0 or position >= size:
        return min(max(position, 0), size)
    if can_cut:
        return min((position + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT, size)
    return size if 2 * position >= size else 0


def may_be_cut(parameter: Tensor) -> bool:
    """Whether the bits of ``parameter`` stay the same when parts of it are computed apart.

    Several threads cut a tensor themselves, at places that depend on its size. Where numbers are rounded to half
    precision between two operations, which instructions an element sees shows in its bits.
    """
    is_wide = parameter.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return parameter.device.type != "cpu" or is_wide or torch.get_num_threads() == 1


def flat_view(tensor: Tensor, name: str) -> Tensor:
    """All elements of ``tensor`` in the order of its memory, as one row that shares its memory.

    Raises:
        OptimizerError: If its elements overlap or have gaps.
    """
    dense = torch.empty_like(tensor, device="meta", requires_grad=False)
    if dense.stride() != tensor.stride():
        raise OptimizerError(
            f"{name} has the strides {tensor.stride()}, which leave gaps or overlap: make it contiguous() first"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_like(tensor: Tensor, parameter: Tensor, name: str) -> Tensor:
    """The elements of ``tensor`` in the order in which ``parameter``, of the same shape, has them in memory."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return flat_view(tensor, name)
