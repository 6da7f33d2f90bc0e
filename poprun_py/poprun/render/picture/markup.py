"""Elements of SVG and HTML as text."""

import re
from html import escape
from typing import Final

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may hold (XML 1.0, section 2.2): words of a command line may."""


def element(name: str, *children: str, **attributes: object) -> str:
    """``<name attributes>children</name>``, a `_` in whose names is a `-`, and none at their end.

    Attributes are escaped; children are markup already. An attribute that is None is left out.
    """
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(words)}>{''.join(children)}</{name}>" if children else f"<{name}{''.join(words)}/>"


def escaped(text: str) -> str:
    """``text`` so that it stands in a document as it is; what no document may hold becomes U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text)).replace("\n", "&#10;")
