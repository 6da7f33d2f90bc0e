"""Where everything in a picture stands and how large it is, in pixels.

Equal boxes stand in a grid of rows, and grids stand in frames. The more there is to see the smaller everything is,
but never illegible.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from poprun.render.picture.scene import Framing, Scene, framing
from poprun.render.words import domains_of, numbered, stands_for

MAX_WIDTH: Final = 1500
"""Of a picture whose parts allow it: it fits a screen of 1,600 pixels."""

_ASPECT: Final = 1.5
"""Width over height that a picture comes near to."""

_CHARACTER: Final = 0.6
"""Width of a character over the size of its font, generously."""

_MIN_NAME: Final = 8
"""Characters of a host's name that every host has room for."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal boxes in rows.

    Attributes:
        total: How many there are.
        columns: How many stand in a row.
        width: Of each.
        height: Of each.
        gap: Between them.
    """

    total: int
    columns: int
    width: int
    height: int
    gap: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the whole grid."""
        rows = -(-self.total // self.columns)
        return self.columns * (self.width + self.gap) - self.gap, rows * (self.height + self.gap) - self.gap

    @property
    def waste(self) -> float:
        """The share of the grid that is empty, because the last row is not full."""
        return -self.total % self.columns / self.total

    def place(self, index: int) -> tuple[int, int]:
        """Where box ``index`` begins."""
        row, column = divmod(index, self.columns)
        return column * (self.width + self.gap), row * (self.height + self.gap)

    def frames(self) -> Iterator["PlacedFrame"]:
        """No frames: these boxes have none."""
        yield from ()


@dataclass(frozen=True, slots=True)
class PlacedFrame:
    """One frame of a picture.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameStyle:
    """One kind of frame.

    Attributes:
        kind: Its class: ``ild`` or ``machine``.
        count: How many stand in each frame of the next kind.
        padding: Between the frame and what stands in it.
        heading: Between the upper edge of the frame and what stands in it.
        gap: Between frames.
    """

    kind: str
    count: int
    padding: int
    heading: int
    gap: int


@dataclass(frozen=True, slots=True)
class FramedGrid:
    """A grid of equal frames, each with equal boxes or frames in it. It answers as a :class:`Grid` of all boxes.

    Attributes:
        style: What the frames are.
        inner: What stands in each frame.
        outer: The frames.
    """

    style: FrameStyle
    inner: "Nest"
    outer: Grid

    @property
    def total(self) -> int:
        """How many boxes there are."""
        return self.outer.total * self.inner.total

    @property
    def width(self) -> int:
        """Width of a box."""
        return self.inner.width

    @property
    def height(self) -> int:
        """Height of a box."""
        return self.inner.height

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of all frames together."""
        return self.outer.size

    @property
    def waste(self) -> float:
        """The share that is empty, because last rows are not full."""
        return self.outer.waste + self.inner.waste

    def place(self, index: int) -> tuple[int, int]:
        """Where box ``index`` begins."""
        number, inside = divmod(index, self.inner.total)
        return self._inside(number, self.inner.place(inside))

    def frames(self) -> Iterator[PlacedFrame]:
        """Every frame, before those that stand in it."""
        inner = list(self.inner.frames())
        for number in range(self.outer.total):
            size = (self.outer.width, self.outer.height)
            yield PlacedFrame(self.style.kind, number, self.outer.place(number), size)
            for frame in inner:
                index = number * len(inner) + frame.index
                yield PlacedFrame(frame.kind, index, self._inside(number, frame.place), frame.size)

    def _inside(self, number: int, place: tuple[int, int]) -> tuple[int, int]:
        x, y = self.outer.place(number)
        return x + self.style.padding + place[0], y + self.style.heading + place[1]


Nest = Grid | FramedGrid
"""Boxes in rows, with frames around some or without."""


def _nested(
    box: tuple[int, int], gap: int, styles: Sequence[FrameStyle], num_boxes: int, columns: Sequence[int]
) -> Nest:
    """``num_boxes`` boxes in the frames of ``styles``, the innermost kind first.

    Args:
        box: Width and height of a box.
        gap: Between boxes.
        styles: The frames, each kind around those before it.
        num_boxes: Boxes in a frame of the first kind, or in all.
        columns: How many stand in a row: boxes, then frames of each kind.
    """
    nest: Nest = Grid(num_boxes, columns[0], *box, gap)
    for style, number in zip(styles, columns[1:], strict=True):
        width, height = nest.size
        size = (width + 2 * style.padding, height + style.heading + style.padding)
        nest = FramedGrid(style, nest, Grid(style.count, number, *size, style.gap))
    return nest


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """The sizes of the smallest parts.

    Attributes:
        text: Of the font.
        chip_width: Of a virtual IPU.
        chip_height: Of a virtual IPU.
        bar: Height of a replica.
        space: Between the parts of an instance; twice that between instances.
        max_bars: Replicas of an instance up to which each has a bar of its own.
        is_wordy: Whether labels have words, however wide that makes an instance.
    """

    text: int
    chip_width: int
    chip_height: int
    bar: int
    space: int
    max_bars: int
    is_wordy: bool = False

    @property
    def heading(self) -> int:
        """Height of a host's name with what is around it."""
        return self.text + 2 * self.space + 6


_SIZES: Final = (
    (32, PartSizes(text=13, chip_width=52, chip_height=36, bar=22, space=6, max_bars=8, is_wordy=True)),
    (256, PartSizes(text=12, chip_width=37, chip_height=23, bar=18, space=4, max_bars=4)),
    (math.inf, PartSizes(text=11, chip_width=32, chip_height=17, bar=15, space=2, max_bars=2)),
)
"""Each with the number of shown virtual IPUs up to which it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What all hosts, instances and replicas of a picture have in common.

    Attributes:
        sizes: The sizes of the smallest parts.
        chips: The virtual IPUs of an instance.
        num_bars: Bars of an instance: one for each replica, or one for all.
        has_words: Whether labels have words, or numbers only.
        framing: What is framed.
        boxes: The instances of a host.
        cards: The hosts.
    """

    sizes: PartSizes
    chips: Grid
    num_bars: int
    has_words: bool
    framing: Framing
    boxes: Nest
    cards: Nest


def measure(scene: Scene) -> Measures:
    """The sizes for ``scene``: it comes near to ``_ASPECT`` and is no wider than ``MAX_WIDTH`` if possible."""
    sizes = next(sizes for most, sizes in _SIZES if scene.num_ipus <= most)
    num_chips = len(scene.first_instance.ipus)
    chips = Grid(num_chips, _chip_columns(num_chips), sizes.chip_width, sizes.chip_height, sizes.space)
    num_replicas = scene.plan.layout.num_local_replicas
    num_bars = num_replicas if num_replicas <= sizes.max_bars else 1
    has_words = sizes.is_wordy or _widest_label(scene, sizes, has_words=True) <= chips.size[0]
    box = _box(sizes, chips, num_bars, _widest_label(scene, sizes, has_words=has_words))
    framed = framing(scene)
    boxes, cards = min(_layouts(scene, sizes, framed, box), key=_penalty)
    return Measures(
        sizes=sizes,
        chips=chips,
        num_bars=num_bars,
        has_words=has_words,
        framing=framed,
        boxes=boxes,
        cards=cards,
    )


def text_width(text: str, size: int) -> int:
    """Pixels that ``text`` may take."""
    return math.ceil(len(text) * size * _CHARACTER)


def cut(text: str, width: int, size: int) -> str:
    """``text``, shortened in its middle if it might be wider than ``width``."""
    most = max(3, int(width / (size * _CHARACTER)))
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def label(noun: str, numbers: Sequence[int], *, has_words: bool) -> str:
    """What is written on an instance or a replica."""
    return numbered(noun, numbers).removeprefix("" if has_words else noun).removeprefix("s").strip()


def _chip_columns(num_chips: int) -> int:
    """How many virtual IPUs stand in a row: four, as in an IPU-Machine, or a multiple."""
    if num_chips <= 4:  # noqa: PLR2004 - see above
        return num_chips
    return 4 if num_chips <= 16 else 8 if num_chips <= 64 else 16  # noqa: PLR2004 - see above


def _widest_label(scene: Scene, sizes: PartSizes, *, has_words: bool) -> int:
    """Width of the widest label of an instance: those with the highest numbers."""
    last = scene.plan.instance(scene.plan.num_instances - 1)
    replicas = last.replicas[-1:] if len(last.replicas) <= sizes.max_bars else last.replicas
    labels = [label("instance", [last.index], has_words=has_words)]
    labels += [label("replica", replicas, has_words=has_words)]
    labels += [stands_for(last)[:24]] if sizes.is_wordy else []
    return max(text_width(text, sizes.text) for text in labels) + sizes.space


def _box(sizes: PartSizes, chips: Grid, num_bars: int, widest: int) -> tuple[int, int]:
    """Width and height of an instance: its label, its virtual IPUs, its replicas, and what it stands for."""
    num_parts = num_bars + 3 + sizes.is_wordy
    text = sizes.text * (2 if sizes.is_wordy else 1)
    return (
        max(chips.size[0], widest) + 2 * sizes.space,
        text + chips.size[1] + num_bars * sizes.bar + num_parts * sizes.space,
    )


def _layouts(scene: Scene, sizes: PartSizes, framed: Framing, box: tuple[int, int]) -> Iterator[tuple[Nest, Nest]]:
    """Every way to put instances into rows in a host that has room for its name, and hosts into rows."""
    space = sizes.space
    domains = "" if framed.has_domains else domains_of(scene.plan, range(scene.plan.num_instances_per_host))
    name = text_width("m" * _MIN_NAME, sizes.text + 2) + text_width(domains, sizes.text)
    num_boxes, num_cards = len(scene.first_host.instances), len(scene.hosts)
    in_hosts, around_hosts = _styles(sizes, framed, num_boxes, num_cards)
    for style in in_hosts:
        num_boxes //= style.count
    for style in around_hosts:
        num_cards //= style.count
    counts = [num_boxes, *(style.count for style in in_hosts)]
    around = [num_cards, *(style.count for style in around_hosts)]
    least = 1 if framed.instances_per_machine == 1 else 2  # an IPU-Machine is wide, not high
    for columns in product(range(least, counts[0] + 1), *(range(1, count + 1) for count in counts[1:])):
        boxes = _nested(box, 2 * space, in_hosts, num_boxes, columns)
        width, height = boxes.size
        card = (max(width, name) + 4 * space, height + sizes.heading + 2 * space)
        for places in product(*(range(1, count + 1) for count in around)):
            yield boxes, _nested(card, 4 * space, around_hosts, num_cards, places)


def _styles(
    sizes: PartSizes, framed: Framing, num_boxes: int, num_cards: int
) -> tuple[list[FrameStyle], list[FrameStyle]]:
    """The frames around instances of a host, and those around hosts, the innermost first."""
    space, top = sizes.space, sizes.text + 2 * sizes.space
    in_hosts, around_hosts = [], []
    if framed.instances_per_machine > 1:
        count = num_boxes // framed.domains_per_host // framed.instances_per_machine
        in_hosts.append(FrameStyle(kind="machine", count=count, padding=space, heading=space, gap=2 * space))
    if framed.domains_per_host > 1:
        count = framed.domains_per_host
        in_hosts.append(FrameStyle(kind="ild", count=count, padding=2 * space, heading=top, gap=2 * space))
    if framed.hosts_per_domain > 1:
        count, heading = num_cards // framed.hosts_per_domain, top + space
        around_hosts.append(FrameStyle(kind="ild", count=count, padding=3 * space, heading=heading, gap=4 * space))
    return in_hosts, around_hosts


def _penalty(nests: tuple[Nest, Nest]) -> float:
    """How far a layout is from what a picture should be; the least is best."""
    boxes, cards = nests
    width, height = cards.size
    excess = max(0, width - MAX_WIDTH) / 10
    is_ragged = bool(boxes.waste)
    return abs(math.log(width / height / _ASPECT)) + 3 * boxes.waste + is_ragged + cards.waste + excess
