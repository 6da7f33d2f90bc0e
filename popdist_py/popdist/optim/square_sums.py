"""Sums of squares over a parameter in one fixed order, of which pieces of it can be added apart.

The elements of a parameter, in the order of memory, are cut into blocks of 128, counted from its first one.
Squares are taken and added in float64. Within a block the upper half is added to the lower half until one number
is left; the blocks are added in the binary tree of `popdist.tree` over the block's number. So the bits depend on
no thread, and a piece that begins at a multiple of 128 elements is a few nodes of the tree.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from popdist import extensions
from popdist.optim.pieces import Piece
from popdist.tree import aligned_nodes, span

BLOCK: Final = 128
"""Elements of a block: shards of parameters are cut at multiples of it."""


extension: Final = partial(extensions.find, "popdist.optim._arithmetic")
"""Gives the part of this folder that is written in C, or None."""


def in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """``tensor`` without gaps and in the order in which ``parameter``, of the same shape, lies in memory.

    A parameter with gaps in its memory counts as if it were contiguous.
    """
    if tensor.is_contiguous() and parameter.is_contiguous():
        return tensor
    stride = torch.empty_like(parameter, device="meta", requires_grad=False).stride()
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def flat_in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements of :func:`in_order_of` as one row."""
    return flat(in_order_of(tensor, parameter))


def flat(dense: Tensor) -> Tensor:
    """The elements of a tensor without gaps in the order of its memory, as one row that shares its memory."""
    return dense.as_strided((dense.numel(),), (1,))


def square_sums(flats: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each row of numbers; of complex ones, of their absolute values."""
    arithmetic = extension()
    sums = [_square_sum(row, arithmetic) for row in flats]
    on_devices = [number for number in sums if isinstance(number, Tensor)]
    told = iter(torch.stack(on_devices).tolist() if on_devices else ())
    return [next(told) if isinstance(number, Tensor) else number for number in sums]


def node_sums(elements: Tensor, piece: Piece) -> list[float]:
    """The sums of squares of ``piece``, which has these elements, in the nodes of the tree that it covers."""
    start = piece.elements.start
    return square_sums([elements[run.start - start : run.stop - start] for run in runs_of_nodes(piece)])


def runs_of_nodes(piece: Piece) -> list[range]:
    """The elements of each node of the tree that ``piece`` covers, left to right."""
    num_blocks = math.ceil(piece.num_elements / BLOCK)
    first, last = piece.elements.start // BLOCK, math.ceil(piece.elements.stop / BLOCK)
    spans = [span(node, num_blocks) for node in aligned_nodes(first, last, num_blocks)]
    return [range(it.start * BLOCK, min(it.stop * BLOCK, piece.elements.stop)) for it in spans]


def _square_sum(row: Tensor, arithmetic: Any) -> float | Tensor:  # noqa: ANN401 - mypy knows no extension
    if not row.numel():
        return 0.0
    if arithmetic is None or row.device.type != "cpu" or row.is_complex():
        return _sum_by_torch(row)
    if row.dtype not in (torch.float32, torch.float64):
        row = row.to(torch.float32)  # exact
    total: float = arithmetic.square_sum(row.data_ptr(), row.numel(), row.dtype == torch.float64)
    return total


def _sum_by_torch(row: Tensor) -> Tensor:
    if row.is_complex():
        squares = torch.view_as_real(row).to(torch.float64).square().sum(1)
    else:
        squares = row.to(torch.float64).square()
    sums = torch.nn.functional.pad(squares, (0, -len(squares) % BLOCK)).view(-1, BLOCK)
    while sums.shape[1] > 1:
        width = sums.shape[1] // 2
        sums = sums[:, :width] + sums[:, width:]
    level = sums.view(-1)
    while len(level) > 1:
        pairs = level[: len(level) // 2 * 2].view(-1, 2)
        level = torch.cat([pairs[:, 0] + pairs[:, 1], level[2 * len(pairs) :]])
    return level[0]
