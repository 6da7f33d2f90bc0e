"""The page of a job: one HTML text from a report as JSON has it, which needs neither a network nor other files.

Pure. Whatever programs printed stands in it as text. `sections` writes its parts, `charts` its curves, and
`time_shares` finds where the time went.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from poprun.observe.show.page import sections
from poprun.plan.render.picture.documents import html_page


def render_page(job: Mapping[str, Any]) -> str:
    """The report ``job`` as an HTML document."""
    picture_css = files("poprun.plan.render.picture").joinpath("picture.css").read_text(encoding="utf-8")
    css = f"{_file('report.css')}.picture {{\n{picture_css}}}\n"
    return html_page(f"{sections.name_of(job)} · poprun", css, sections.render_sections(job), _file("report.js"))


def _file(name: str) -> str:
    return files("poprun.observe.show.page").joinpath(name).read_text(encoding="utf-8")
