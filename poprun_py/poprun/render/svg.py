"""A plan as a picture in SVG: one file that needs nothing else, dark where the reader prefers that."""

import shlex
from importlib.resources import files
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.render.picture.drawing import draw, element, escaped
from poprun.render.picture.measures import cut, text_width
from poprun.render.picture.scene import make_scene
from poprun.render.words import size_of

MARGIN: Final = 24
_LINE: Final = 22


def render_svg(plan: LaunchPlan) -> str:
    """``plan`` as an SVG document."""
    drawing = draw(make_scene(plan), _group)
    heading = [("title", 17, f"poprun: {size_of(plan)}")]
    width = max(drawing.width, text_width(heading[0][2], 17)) + 2 * MARGIN
    if plan.program:
        heading.append(("line", 13, shlex.join(plan.program)))
    texts = [
        element(
            "text",
            escaped(cut(text, width - 2 * MARGIN, size)),
            class_=name,
            x=MARGIN,
            y=MARGIN + 12 + index * _LINE,
            font_size=size,
        )
        for index, (name, size, text) in enumerate(heading)
    ]
    top = MARGIN + len(heading) * _LINE + 10
    height = top + drawing.height + MARGIN
    return (
        element(
            "svg",
            element("title", escaped(heading[0][2])),
            element("style", "\n", style()),
            element("rect", class_="paper", width=width, height=height),
            *texts,
            element("g", drawing.elements, transform=f"translate({MARGIN} {top})"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            width=width,
            height=height,
        )
        + "\n"
    )


def style() -> str:
    """The colours of a picture, as a style sheet."""
    return files("poprun.render.picture").joinpath("picture.css").read_text(encoding="utf-8")


def _group(name: str, words: str, place: tuple[int, int], elements: list[str]) -> str:
    transform = f"translate({place[0]} {place[1]})"
    return element("g", element("title", escaped(words)), *elements, "\n", class_=name, transform=transform)
