"""The HTML page about a job, made from the job's record, which loads nothing from a network or another file."""

from importlib.resources import files

from poprun.observe.account.job_record import JobRecord
from poprun.observe.show.page import sections
from poprun.plan.render.picture.documents import html_page


def render_page(job: JobRecord) -> str:
    """Return the HTML page about a job: how it ended, where its time went, its curves and its plan."""
    picture_css = files("poprun.plan.render.picture").joinpath("picture.css").read_text(encoding="utf-8")
    css = f"{_file('report.css')}.picture {{\n{picture_css}}}\n"
    return html_page(f"{sections.name_of(job)} · poprun", css, sections.render_sections(job), _file("report.js"))


def _file(name: str) -> str:
    return files("poprun.observe.show.page").joinpath(name).read_text(encoding="utf-8")
