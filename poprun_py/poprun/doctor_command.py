"""`poprun --doctor`: look at the machine and tell how it is."""

import os

from poprun.doctor import ReportFormat
from poprun.doctor.diagnosis import can_run, diagnose
from poprun.doctor.facts import examine
from poprun.doctor.findings_report import render_findings
from poprun.text import screen


def consult(report_format: ReportFormat) -> int:
    """Tell what poprun would use on this machine, and what is missing.

    Returns:
        1 when no job can run on it, else 0.
    """
    findings = diagnose(examine(os.environ))
    screen.show(render_findings(findings, report_format, width=screen.width(), has_color=screen.has_color()))
    return 0 if can_run(findings) else 1
