"""Elements of SVG as text, and how wide a text may be; elements of HTML are written alike.

Places and sizes are pairs of pixels, to the right and downwards. A style sheet may give the colours, as it knows
dark from light.
"""

import math
import re
from html import escape
from typing import Final

NUM_HUES: Final = 8
"""How many colours a style sheet of pictures has: the classes ``h0`` to ``h7``."""

_CHARACTER: Final = 0.6  # width of a character over the size of its font, generously
_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may hold (XML 1.0, section 2.2): words of a command line may."""


def document(title: str, size: tuple[int, int], *children: str, **attributes: object) -> str:
    """Return an SVG document of ``size``; children are markup."""
    place = {"viewBox": f"0 0 {size[0]} {size[1]}", "width": size[0], "height": size[1]}
    about = element("title", escaped(title))
    return element("svg", about, *children, xmlns="http://www.w3.org/2000/svg", **place, **attributes) + "\n"


def element(name: str, *children: str, **attributes: object) -> str:
    """Return ``<name attributes>children</name>``: children are markup, and attributes of None are left out."""
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(words)}>{''.join(children)}</{name}>" if children else f"<{name}{''.join(words)}/>"


def escaped(text: str) -> str:
    """Return ``text`` so that it stands in a document as it is; what no document may hold becomes U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text)).replace("\n", "&#10;")


def rect(
    size: tuple[int, int],
    place: tuple[int, int] | tuple[None, None] = (None, None),
    class_: str | None = None,
    **attributes: object,
) -> str:
    """Return a rectangle of ``size`` whose upper left corner is at ``place``, else at the origin."""
    width, height = size
    return element("rect", class_=class_, x=place[0], y=place[1], width=width, height=height, **attributes)


def text(words: str, place: tuple[int, int], size: int, class_: str | None = None, **attributes: object) -> str:
    """Return ``words`` at ``place``, the left or the middle of their base line as a style says."""
    return element("text", escaped(words), class_=class_, x=place[0], y=place[1], font_size=size, **attributes)


def middle(top: int, height: int, size: int) -> int:
    """Return the base line of a text of ``size`` in the middle of the ``height`` pixels below ``top``."""
    return top + (height + size * 7 // 10) // 2


def text_width(text: str, size: int) -> int:
    """Return the pixels that ``text`` may take."""
    return math.ceil(len(text) * size * _CHARACTER)


def cut(text: str, width: int, size: int) -> str:
    """Return ``text``, shortened in its middle if it might be wider than ``width``."""
    most = max(3, int(width / (size * _CHARACTER)))
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"
