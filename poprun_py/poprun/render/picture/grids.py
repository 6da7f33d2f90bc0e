"""Where equal boxes stand: in rows, and in rows within frames."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal boxes in rows.

    Attributes:
        count: How many there are.
        columns: How many stand in a row.
        width: Of each.
        height: Of each.
        gap: Between them.
    """

    count: int
    columns: int
    width: int
    height: int
    gap: int

    @property
    def total(self) -> int:
        """How many there are."""
        return self.count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of all of it."""
        rows = -(-self.count // self.columns)
        return self.columns * (self.width + self.gap) - self.gap, rows * (self.height + self.gap) - self.gap

    @property
    def waste(self) -> float:
        """The share of it that is empty, because the last row is not full."""
        return -self.count % self.columns / self.count

    def place(self, index: int) -> tuple[int, int]:
        """Where box ``index`` begins."""
        row, column = divmod(index, self.columns)
        return column * (self.width + self.gap), row * (self.height + self.gap)

    def frames(self) -> Iterator["Frame"]:
        """None: these boxes have no frames."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a picture.

    Attributes:
        kind: Its class: ``ild`` or ``machine``.
        index: Its number among those of its kind.
        place: Where it begins.
        size: Its width and height.
    """

    kind: str
    index: int
    place: tuple[int, int]
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Framed:
    """Equal boxes in equal frames.

    Attributes:
        kind: What the frames are.
        inner: What stands in each frame.
        outer: The frames.
        padding: Between a frame and what stands in it.
        heading: Between its upper edge and what stands in it.
    """

    kind: str
    inner: "Nest"
    outer: Grid
    padding: int
    heading: int

    @property
    def total(self) -> int:
        """How many boxes there are."""
        return self.outer.count * self.inner.total

    @property
    def width(self) -> int:
        """Of a box."""
        return self.inner.width

    @property
    def height(self) -> int:
        """Of a box."""
        return self.inner.height

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of all of it."""
        return self.outer.size

    @property
    def waste(self) -> float:
        """The share that is empty, because last rows are not full."""
        return self.outer.waste + self.inner.waste

    def place(self, index: int) -> tuple[int, int]:
        """Where box ``index`` begins."""
        number, inside = divmod(index, self.inner.total)
        (x, y), (dx, dy) = self.outer.place(number), self.inner.place(inside)
        return x + self.padding + dx, y + self.heading + dy

    def frames(self) -> Iterator[Frame]:
        """Every frame, before those that stand in it."""
        inner = list(self.inner.frames())
        num_inner = len({(frame.kind, frame.index) for frame in inner})
        for number in range(self.outer.count):
            x, y = self.outer.place(number)
            yield Frame(self.kind, number, (x, y), (self.outer.width, self.outer.height))
            for frame in inner:
                dx, dy = frame.place
                place = (x + self.padding + dx, y + self.heading + dy)
                yield Frame(frame.kind, number * num_inner + frame.index, place, frame.size)


Nest = Grid | Framed
"""Boxes in rows, with frames around some or without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameStyle:
    """One kind of frame.

    Attributes:
        kind: Its class.
        count: How many there are.
        padding: Between it and what stands in it.
        heading: Between its upper edge and what stands in it.
        gap: Between frames.
    """

    kind: str
    count: int
    padding: int
    heading: int
    gap: int


def nested(
    box: tuple[int, int], gap: int, styles: Sequence[FrameStyle], num_boxes: int, columns: Sequence[int]
) -> Nest:
    """``num_boxes`` boxes in the frames of ``styles``, the innermost kind first.

    Args:
        box: Width and height of a box.
        gap: Between boxes.
        styles: The frames, each kind around those before it; ``count`` of them in each of the next kind.
        num_boxes: Boxes in a frame of the first kind, or in all.
        columns: How many stand in a row: boxes, then frames of each kind.
    """
    nest: Nest = Grid(num_boxes, columns[0], *box, gap)
    for style, number in zip(styles, columns[1:], strict=True):
        width, height = nest.size
        size = (width + 2 * style.padding, height + style.heading + style.padding)
        nest = Framed(style.kind, nest, Grid(style.count, number, *size, style.gap), style.padding, style.heading)
    return nest
