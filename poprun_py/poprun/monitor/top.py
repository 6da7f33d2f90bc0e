"""The `poprun-top` program: a live view of a running job of this machine."""

import shlex
import signal
import sys
from collections import deque
from typing import Final

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from popdist.contract import VERSION
from poprun.messages.control import ProtocolError
from poprun.messages.view import JobView
from poprun.monitor.job_table import Rate, describe_seconds, rates, render
from poprun.monitor.jobs import RunningJob, running_jobs, watch
from poprun.text.screen import visible, write_any_letter

_REDRAWS_PER_SECOND: Final = 4
_VIEWS_OF_A_RATE: Final = 8
_INTERRUPTED: Final = 130


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.argument("job", required=False)
@click.version_option(VERSION, message="poprun-top %(version)s")
def command(job: str | None) -> None:
    """Show a running job: its instances, how far and how fast they are, and what they use.

    JOB is the process id of its poprun, or its job id; it can be left out where there is one job only. On a
    terminal the view is live, and Ctrl-C leaves it; the job goes on. Elsewhere it is printed once.
    """
    views = {job.pid: view for job in running_jobs() if (view := _first_view(job)) is not None}
    chosen = [running for running in running_jobs() if running.pid in views and _is_meant(views[running.pid], job)]
    if len(chosen) == 1:
        _show(chosen[0])
    elif not chosen:
        raise click.ClickException("no job is running here" if job is None else f"no job {job} is running here")
    else:
        click.echo("several jobs are running; name one:")
        for running in chosen:
            view = views[running.pid]
            program = visible(" ".join(shlex.join(view.program).split()))
            click.echo(f"  {running.pid}  {view.job_id}  {describe_seconds(view.seconds):>8}  {program:.60}")
        raise SystemExit(2)


def main() -> None:
    """Run `poprun-top` with the words of this process and end it."""
    write_any_letter()
    try:
        command.main(prog_name="poprun-top", standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except OSError as error:  # there is no /proc
        sys.exit(f"poprun-top: no jobs can be found: {error.filename}: {error.strerror}")


def attach(pid: int) -> None:
    """Draw the job of the poprun with process id ``pid`` until it ends; the terminal's Ctrl-C is that poprun's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_any_letter()
    for job in running_jobs():
        if job.pid == pid:
            _draw(job, Console(stderr=True), is_transient=True)


def _is_meant(view: JobView, job: str | None) -> bool:
    return job is None or job in (str(view.pid), view.job_id)


def _first_view(job: RunningJob) -> JobView | None:
    try:
        return next(watch(job), None)
    except (OSError, ProtocolError):
        return None


def _show(job: RunningJob) -> None:
    console = Console()
    if console.is_terminal:
        _draw(job, console, is_transient=False)
        return
    view = _first_view(job)
    if view is not None:
        console.print(render(view, [Rate()] * len(view.instances), sys.maxsize))


def _draw(job: RunningJob, console: Console, *, is_transient: bool) -> None:
    recent: deque[JobView] = deque(maxlen=_VIEWS_OF_A_RATE)
    with Live(
        console=console, auto_refresh=False, transient=is_transient, refresh_per_second=_REDRAWS_PER_SECOND
    ) as live:
        try:
            for view in watch(job):
                before = recent[0] if recent else None
                live.update(render(view, rates(before, view), console.height), refresh=True)
                recent.append(view)
        except (OSError, ProtocolError) as error:
            console.print(Text(visible(f"poprun-top: {error}")))
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    attach(int(sys.argv[1]))
