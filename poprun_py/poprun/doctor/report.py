"""The findings as a table for a person, or as JSON for a program. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poprun.doctor import ReportFormat
from poprun.doctor.diagnosis import Finding, State, can_run

VERSION: Final = 1
"""Of the form of the JSON."""

MIN_WIDTH: Final = 60

_STYLES: Final = {State.OK: "green", State.ABSENT: "dim", State.WARNING: "yellow", State.FAILS: "bold red"}


def render_findings(
    findings: Sequence[Finding], report_format: ReportFormat, *, width: int = 80, has_color: bool = False
) -> str:
    """``findings`` as text that ends with a line break; only the table heeds ``width`` and ``has_color``."""
    is_fit = can_run(tuple(findings))
    if report_format is ReportFormat.JSON:
        values = {"version": VERSION, "can_run": is_fit, "findings": [asdict(it) for it in findings]}
        return json.dumps(values, indent=2) + "\n"
    screen = Console(
        file=StringIO(),
        width=max(width, MIN_WIDTH),
        force_terminal=has_color,
        color_system="standard" if has_color else None,
        no_color=not has_color,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    with screen.capture() as capture:
        screen.print(_table(findings))
        screen.print()
        screen.print("jobs of this machine can run" if is_fit else "no job can run before that is mended")
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


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
