"""The findings as a table for a person, or as JSON for a program. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.table import Table
from rich.text import Text

from poprun.doctor import ReportFormat
from poprun.doctor.diagnosis import Finding, State, can_run
from poprun.render.page import Page

VERSION: Final = 1
"""Of the form of the JSON."""

_STYLES: Final = {State.OK: "green", State.ABSENT: "dim", State.WARNING: "yellow", State.FAILS: "bold red"}


def render_findings(
    findings: Sequence[Finding], report_format: ReportFormat, *, width: int = 80, has_color: bool = False
) -> str:
    """``findings`` as text that ends with a line break; only the table heeds ``width`` and ``has_color``."""
    is_fit = can_run(tuple(findings))
    if report_format is ReportFormat.JSON:
        values = {"version": VERSION, "can_run": is_fit, "findings": [asdict(it) for it in findings]}
        return json.dumps(values, indent=2) + "\n"
    page = Page(width=width, has_color=has_color)
    page.print(_table(findings))
    page.print()
    page.print("jobs of this machine can run" if is_fit else "no job can run before that is mended")
    return page.text()


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, Text(finding.state, _STYLES[finding.state]), finding.found)
        if finding.remedy:
            table.add_row("", "", Text(f"→ {finding.remedy}", "cyan"))
    return table
