"""The picture of a plan as an SVG or HTML file that loads nothing else.

An SVG is dark if the reader prefers dark pages. An HTML page explains each host and instance under the mouse or
the focus; the arrow keys move the focus.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.plan.render.picture.blocks import Block
from poprun.plan.render.picture.drawing import draw
from poprun.plan.render.picture.scene import make_scene
from poprun.plan.render.words import facts_of, size_of
from popsize.svg import cut, document, element, escaped, rect, text, text_width

_MARGIN: Final = 24
_LINE_HEIGHT: Final = 22

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The policy of the HTML page: the browser loads nothing from a network or from other files."""

_KEYS: Final = (
    "Point at a host or an instance to see what it is, or press <kbd>Tab</kbd> and then the arrow keys; "
    "<kbd>Esc</kbd> hides it."
)


def render_svg(plan: LaunchPlan) -> str:
    """Return the picture of ``plan`` as an SVG file, with a title and the program's command line."""
    drawing = draw(make_scene(plan), _with_title)
    title = f"poprun: {size_of(plan)}"
    width = max(drawing.size[0], text_width(title, 17)) + 2 * _MARGIN
    lines = [("title", 17, title)]
    if plan.program:
        lines.append(("line", 13, shlex.join(plan.program)))
    heading = [
        text(cut(words, width - 2 * _MARGIN, size), (_MARGIN, _MARGIN + 12 + row * _LINE_HEIGHT), size, name)
        for row, (name, size, words) in enumerate(lines)
    ]
    top = _MARGIN + len(heading) * _LINE_HEIGHT + 10
    paper = (width, top + drawing.size[1] + _MARGIN)
    style = element("style", "\n", picture_css())
    return document(title, paper, style, rect(paper, class_="paper"), *heading, drawing.at(_MARGIN, top))


def render_fragment(plan: LaunchPlan) -> str:
    """Return the picture of ``plan`` as an SVG element for an HTML page that contains `picture_css`."""
    return _picture(draw(make_scene(plan), _with_title), "img", size_of(plan))


def render_html(plan: LaunchPlan) -> str:
    """Return the picture of ``plan`` as an HTML page, in which the mouse or arrow keys show details."""
    title = f"poprun: {size_of(plan)}"
    picture = _picture(draw(make_scene(plan), _focusable), "group", title)
    body = [
        element("h1", escaped(title)),
        element(
            "dl", *(element("dt", name) + element("dd", escaped(value)) for name, value in facts_of(plan).items())
        ),
        element("p", _KEYS, id="keys"),
        element("main", picture.replace('tabindex="-1"', 'tabindex="0"', 1)),  # where Tab comes in
        '<div id="tip" role="tooltip" hidden></div>',
    ]
    return html_page(title, picture_css() + _file("page.css"), body, _file("page.js"))


def _picture(drawing: Block, role: str, label: str) -> str:
    """Return ``drawing`` as an SVG element for an HTML page, with a margin of one pixel for its outer lines."""
    width, height = drawing.size[0] + 2, drawing.size[1] + 2
    box = f"-1 -1 {width} {height}"
    children = drawing.children
    return element("svg", *children, role=role, aria_label=label, viewBox=box, width=width, height=height)


def html_page(title: str, css: str, body: Iterable[str], script: str) -> str:
    """Return an HTML page with ``body``, style sheet and script, which loads nothing from elsewhere."""
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        element("title", escaped(title)),
        element("style", "\n", css),
        *body,
        element("script", "\n", script),
        "</html>",
        "",
    ]
    return "\n".join(lines)


def _with_title(_class: str, words: str) -> tuple[Sequence[str], Mapping[str, object]]:
    """Return what explains an SVG group: a title element with ``words``, which viewers show, and no attributes."""
    return [element("title", escaped(words))], {}


def _focusable(class_: str, words: str) -> tuple[Sequence[str], Mapping[str, object]]:
    """Return what explains an SVG group: no elements, and attributes for its focus and label ``words``."""
    return [], {"tabindex": -1, "role": "group" if class_ == "host" else "img", "aria_label": words}


def picture_css() -> str:
    """Return the style sheet of plans' pictures: their colours for light and dark pages."""
    return _file("picture.css")


def _file(name: str) -> str:
    return files("poprun.plan.render.picture").joinpath(name).read_text(encoding="utf-8")
