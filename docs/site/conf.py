"""Settings of the site that ``scripts/docs`` builds: the pages stay where they are, and README.md is the first."""

from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "poprun and popdist"
project_copyright = "the authors of poprun, Apache 2.0"
html_title = project
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"sidebar_hide_name": False}

root_doc = "README"
exclude_patterns = [".*", "build", "dist", "scripts", "*_py", "examples", "docs/site/navigation.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
default_role = "code"


def setup(app: Sphinx) -> None:
    """Connect the two functions below."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_index)


def add_navigation(_: Sphinx, docname: str, source: list[str]) -> None:
    """Add the table of contents to the first page, where GitHub would show its directives as text."""
    if docname == root_doc:
        source[0] += (HERE / "navigation.md").read_text(encoding="utf-8")


def add_index(app: Sphinx, _: Exception | None) -> None:
    """Write an ``index.html`` that leads to the first page."""
    forward = (
        f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>\n'
    )
    (app.outdir / "index.html").write_text(forward, encoding="utf-8")
