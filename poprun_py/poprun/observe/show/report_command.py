"""The program `poprun-report`, which prints and compares the reports of jobs."""

import os
import sys

import click

from popdist.ground.contract import VERSION
from poprun.observe.account.job_record import MOST_BYTES, JobRecord, read_report
from poprun.observe.show.compare import compare as compare_jobs
from poprun.observe.show.report_words import render_comparison, render_report
from poprun.observe.show.trace.time_table import TABLE_FILE, read_table, render_table
from poprun.text.input_files import read_text
from poprun.text.screen import has_color, log, print_out, run_click, width

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


@click.group(context_settings=_SETTINGS)
@click.version_option(VERSION, message="poprun-report %(version)s")
def report() -> None:
    """Read the reports and traces that poprun wrote of jobs."""


def main() -> None:
    """Run `poprun-report` with the arguments of this process, and exit with its exit code."""
    sys.exit(run_click(report, "poprun-report"))


@report.command()
@click.argument("file", metavar="REPORT")
def show(file: str) -> None:
    """Show a report: how the job ended, who was at fault, where the time went.

    REPORT is a file that `poprun --report FILE.json` wrote, or - for standard input.
    """
    print_out(render_report(_read(file), width=width(), has_color=has_color()))


@report.command()
@click.argument("before", metavar="FIRST")
@click.argument("after", metavar="SECOND")
@click.option("--fail-on-worse", is_flag=True, help="Exit with 1 if SECOND is slower, or takes more memory.")
def compare(before: str, after: str, *, fail_on_worse: bool) -> None:
    """Say what became slower or better from one report to another, and where.

    A difference is shown if it is larger than the noise of both runs. Exit code 0: both reports could be compared.
    """
    comparison = compare_jobs(_read(before), _read(after))
    for warning in comparison.warnings:
        log(f"warning: {warning}")
    print_out(render_comparison(comparison, width=width(), has_color=has_color()))
    if fail_on_worse and comparison.is_worse:
        click.get_current_context().exit(1)


@report.command()
@click.argument("folder", metavar="DIR")
def trace(folder: str) -> None:
    """Show how each instance of a trace spent its time, and which instances came last.

    DIR is the folder that was given to `poprun --trace DIR`.
    """
    table = read_table(
        read_text(os.path.join(folder, TABLE_FILE), "the table of poprun --trace,", MOST_BYTES), folder
    )
    print_out(render_table(table, width=width(), has_color=has_color()))


def _read(file: str) -> JobRecord:
    return read_report(read_text(file, "the report", MOST_BYTES), file)
