"""Blocks of SVG, and grids of equal blocks: each level of a picture is made of the blocks of the level below.

Colours are left to the style sheet, which knows dark from light.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

_ASPECT: Final = 1.5  # width over height that a grid comes near to
_SHORT_ROW: Final = 0.5  # how much a short last row counts, as a logarithm of the distance from the aspect
_CHARACTER: Final = 0.6  # width of a character over the size of its font, generously
_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may hold (XML 1.0, section 2.2): words of a command line may."""


@dataclass(frozen=True, slots=True)
class Block:
    """A group of SVG elements in a rectangle of so many pixels, whose upper left corner is their origin."""

    width: int
    height: int
    children: Sequence[str]
    attributes: Mapping[str, object] = field(default_factory=dict)

    def at(self, x: int, y: int) -> str:
        """The group as markup, with its corner at ``x`` and ``y``."""
        return element("g", *self.children, **self.attributes, transform=f"translate({x} {y})")


def grid(blocks: Sequence[Block], gap: int, max_width: int) -> Block:
    """Equal blocks in rows that are filled from the left, as wide as the aspect and ``max_width`` let them be."""
    size = (blocks[0].width, blocks[0].height)
    columns = _columns(len(blocks), size, gap, max_width)
    places = [place_in_grid(index, columns, size, gap) for index in range(len(blocks))]
    children = [block.at(*place) for block, place in zip(blocks, places, strict=True)]
    return Block(*size_of_grid(len(blocks), columns, size, gap), children)


def _columns(count: int, size: tuple[int, int], gap: int, max_width: int) -> int:
    """How many columns make a grid of about the usual aspect, if possible without a short last row."""
    width, height = size[0] + gap, size[1] + gap
    ideal = math.sqrt(count * _ASPECT * height / width)
    most = max(1, min(count, (max_width + gap) // width))
    return min(range(1, most + 1), key=lambda it: abs(math.log(it / ideal)) + _SHORT_ROW * bool(count % it))


def place_in_grid(index: int, columns: int, size: tuple[int, int], gap: int) -> tuple[int, int]:
    """The corner of the block ``index`` in a grid of blocks of ``size``."""
    row, column = divmod(index, columns)
    return column * (size[0] + gap), row * (size[1] + gap)


def size_of_grid(count: int, columns: int, size: tuple[int, int], gap: int) -> tuple[int, int]:
    """Width and height of a grid of ``count`` blocks of ``size``."""
    return columns * (size[0] + gap) - gap, -(-count // columns) * (size[1] + gap) - gap


def element(name: str, *children: str, **attributes: object) -> str:
    """``<name attributes>children</name>``: children are markup, and attributes of None are left out."""
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(words)}>{''.join(children)}</{name}>" if children else f"<{name}{''.join(words)}/>"


def escaped(text: str) -> str:
    """``text`` so that it stands in a document as it is; what no document may hold becomes U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text)).replace("\n", "&#10;")


def text(words: str, place: tuple[int, int], size: int, class_: str | None = None) -> str:
    """``words`` at ``place``, the left or the middle of their base line as the class says."""
    return element("text", escaped(words), class_=class_, x=place[0], y=place[1], font_size=size)


def middle(top: int, height: int, size: int) -> int:
    """The base line of a text of ``size`` in the middle of the ``height`` pixels below ``top``."""
    return top + (height + size * 7 // 10) // 2


def text_width(text: str, size: int) -> int:
    """Pixels that ``text`` may take."""
    return math.ceil(len(text) * size * _CHARACTER)


def cut(text: str, width: int, size: int) -> str:
    """``text``, shortened in its middle if it might be wider than ``width``."""
    most = max(3, int(width / (size * _CHARACTER)))
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"
