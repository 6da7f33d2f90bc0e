"""The page of a job: one HTML text from a report as JSON has it, which needs neither a network nor other files.

Pure. Whatever programs printed stands in it as text. `sections` writes its parts, `charts` its curves, and
`time_shares` finds where the time went.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from poprun.page import sections
from poprun.render.picture.blocks import element, escaped
from poprun.render.picture.documents import POLICY


def render_page(job: Mapping[str, Any]) -> str:
    """The report ``job`` as an HTML document."""
    picture_css = files("poprun.render.picture").joinpath("picture.css").read_text(encoding="utf-8")
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        element("title", escaped(f"{sections.name_of(job)} · poprun")),
        element("style", "\n", _file("report.css"), ".picture {\n", picture_css, "}\n"),
        *sections.render_sections(job),
        element("script", "\n", _file("report.js")),
        "</html>",
        "",
    ]
    return "\n".join(lines)


def _file(name: str) -> str:
    return files("poprun.page").joinpath(name).read_text(encoding="utf-8")
