"""Functions that return SVG or HTML elements as text, and estimate the width of text.

Places and sizes are pairs of pixels, to the right and downwards. A style sheet can set the colours, because it can
distinguish dark from light mode.
"""

import math
import re
from html import escape
from typing import Final

NUM_HUES: Final = 8
"""The number of colours for devices and instances, which a style sheet defines as classes ``h0`` to ``h7``."""

_CHARACTER: Final = 0.6  # width of a wide character, divided by the size of its font
_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML forbids (XML 1.0, section 2.2), but a command line may contain."""


def document(title: str, size: tuple[int, int], *children: str, **attributes: object) -> str:
    """Return an SVG document with the given title, size in pixels, and elements ``children``."""
    place = {"viewBox": f"0 0 {size[0]} {size[1]}", "width": size[0], "height": size[1]}
    about = element("title", escaped(title))
    return element("svg", about, *children, xmlns="http://www.w3.org/2000/svg", **place, **attributes) + "\n"


def element(name: str, *children: str, **attributes: object) -> str:
    """Return the markup ``<name attributes>children</name>``; attributes whose value is None are omitted."""
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(words)}>{''.join(children)}</{name}>" if children else f"<{name}{''.join(words)}/>"


def escaped(text: str) -> str:
    """Return ``text`` escaped for XML; characters that XML forbids become U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text)).replace("\n", "&#10;")


def rect(
    size: tuple[int, int],
    place: tuple[int, int] | tuple[None, None] = (None, None),
    class_: str | None = None,
    **attributes: object,
) -> str:
    """Return an SVG rectangle of ``size`` whose upper left corner is at ``place``, by default at the origin."""
    width, height = size
    return element("rect", class_=class_, x=place[0], y=place[1], width=width, height=height, **attributes)


def text(words: str, place: tuple[int, int], size: int, class_: str | None = None, **attributes: object) -> str:
    """Return an SVG text at ``place``: the left end of its base line, or the middle if the style centres it."""
    return element("text", escaped(words), class_=class_, x=place[0], y=place[1], font_size=size, **attributes)


def middle(top: int, height: int, size: int) -> int:
    """Return the y position of the base line of a text of ``size``, centred in ``height`` pixels below ``top``."""
    return top + (height + size * 7 // 10) // 2


def text_width(text: str, size: int) -> int:
    """Return an upper limit for the width of ``text`` in pixels, in a font of ``size`` pixels."""
    return math.ceil(len(text) * size * _CHARACTER)


def cut(text: str, width: int, size: int) -> str:
    """Return ``text``; if it may be wider than ``width`` pixels, with its middle replaced by ``…``."""
    most = max(3, int(width / (size * _CHARACTER)))
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"
