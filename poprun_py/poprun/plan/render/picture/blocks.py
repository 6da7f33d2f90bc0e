"""Blocks, which are groups of SVG elements with a size, and grids of equal blocks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from popsize.svg import element

_ASPECT: Final = 1.5  # width over height that a grid comes near to
_SHORT_ROW: Final = 0.5  # how much a short last row counts, as a logarithm of the distance from the aspect


@dataclass(frozen=True, slots=True)
class Block:
    """A group of SVG elements with a size in pixels; the origin is the group's upper left corner."""

    size: tuple[int, int]
    children: Sequence[str]
    attributes: Mapping[str, object] = field(default_factory=dict)

    def at(self, x: int, y: int) -> str:
        """Return the SVG markup of the block with its upper left corner at ``x`` and ``y``."""
        return element("g", *self.children, **self.attributes, transform=f"translate({x} {y})")


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of equal cells, filled row by row from the left; it computes the place of each cell."""

    num_cells: int
    num_columns: int
    cell: tuple[int, int]
    gap: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the whole grid in pixels."""
        (width, height), num_rows = self.cell, -(-self.num_cells // self.num_columns)
        return self.num_columns * (width + self.gap) - self.gap, num_rows * (height + self.gap) - self.gap

    def place(self, index: int) -> tuple[int, int]:
        """Return x and y of the upper left corner of the cell with the index ``index``, in pixels."""
        row, column = divmod(index, self.num_columns)
        return column * (self.cell[0] + self.gap), row * (self.cell[1] + self.gap)


def grid(blocks: Sequence[Block], gap: int, max_width: int) -> Block:
    """Return equal ``blocks`` in a grid, about 1.5 times as wide as high, at most ``max_width`` pixels wide."""
    count, cell = len(blocks), blocks[0].size
    width, height = cell[0] + gap, cell[1] + gap
    ideal = math.sqrt(count * _ASPECT * height / width)
    columns = range(1, max(1, min(count, (max_width + gap) // width)) + 1)
    best = min(columns, key=lambda it: abs(math.log(it / ideal)) + _SHORT_ROW * bool(count % it))
    cells = Grid(count, best, cell, gap)
    return Block(cells.size, [block.at(*cells.place(index)) for index, block in enumerate(blocks)])
