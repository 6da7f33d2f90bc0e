"""The program `poprun-top`: a live view of a running job on this machine."""

import os
import re
import shlex
import signal
import socket
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from popdist.ground.contract import VERSION
from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import (
    RECEIVE_BYTES,
    VIEW_EVENT,
    LineReader,
    abstract_address,
    decode,
    encode,
    peer_process,
    peer_user,
)
from poprun.launch.messages.view import JobView
from poprun.observe.show.monitor.job_table import Rate, rates, render
from poprun.text.ranges import describe_seconds
from poprun.text.screen import print_out, run_click, visible, write_any_letter

_VIEWS_OF_A_RATE: Final = 8
_MOVES: Final = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}
"""The keys that move the choice in the list of jobs, each with a number of rows."""

_KEY: Final = re.compile(r"\x1b[\[O].|.", re.DOTALL)
_SOCKETS: Final = "/proc/net/unix"
_NAME: Final = re.compile(r"@(poprun-\d+-[0-9a-f]{32})$", re.MULTILINE)
_CONNECT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A running job of this user, to whose poprun a monitor can connect."""

    pid: int  # process id of the job's poprun, in this pid namespace
    address: str  # name of the job's control socket


def running_jobs() -> list[RunningJob]:
    """Return this user's running jobs here, sorted by process id. Raise ClickException if /proc is missing."""
    try:
        text = Path(_SOCKETS).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.ClickException(f"no jobs can be found: {_SOCKETS}: {error.strerror}") from None
    jobs = []
    for address in set(_NAME.findall(text)):
        with suppress(OSError), _connected(address) as connection:
            jobs.append(RunningJob(pid=peer_process(connection), address=address))
    return sorted((job for job in jobs if job.pid), key=lambda job: job.pid)


@contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    """A context with a connection to the job at ``address``. Raises OSError if no job of this user listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(abstract_address(address))
        if peer_user(connection) != os.getuid():
            raise PermissionError(f"the job at {address} is another user's")
        yield connection


def watch(job: RunningJob) -> Iterator[JobView]:
    """Yield each state that a running job sends, until it ends. Raise OSError or ProtocolError if that fails."""
    with _connected(job.address) as connection:
        connection.sendall(encode({"event": VIEW_EVENT}))
        connection.settimeout(_SILENCE_SECONDS)
        reader = LineReader()
        while data := _receive(connection):
            for line in reader.feed(data)[0]:
                yield replace(JobView.from_message(decode(line)), pid=job.pid)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(RECEIVE_BYTES)
    except ConnectionResetError:  # poprun ended before it had read everything that was sent to it
        return b""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.argument("job", required=False)
@click.version_option(VERSION, message="poprun-top %(version)s")
def command(job: str | None) -> None:
    r"""Show a running job: its instances, how far and how fast they are, and what they use.

    JOB is the process id of its poprun, or its job id. Without it, the one running job is shown; if several jobs
    run, a terminal lets you choose one. On a terminal the view is live, Ctrl-C leaves it, and Ctrl-\ shows where
    all programs stand; the job goes on. Elsewhere the view is printed once.
    """
    views = {running: view for running in running_jobs() if (view := _first_view(running)) is not None}
    chosen = [running for running, view in views.items() if job is None or job in (str(view.pid), view.job_id)]
    if len(chosen) == 1:
        _show(chosen[0])
    elif not chosen:
        raise click.ClickException("no job is running here" if job is None else f"no job {job} is running here")
    elif sys.stdin.isatty() and sys.stdout.isatty():
        if (place := _choose([_row(running, views[running]) for running in chosen])) is not None:
            _show(chosen[place])
    else:
        rows = (f"  {_row(running, views[running])}" for running in chosen)
        print_out("\n".join(("several jobs are running; name one:", *rows, "")))
        click.get_current_context().exit(2)


def _row(running: RunningJob, view: JobView) -> str:
    program = visible(" ".join(shlex.join(view.program).split()))
    return f"{running.pid}  {view.job_id}  {describe_seconds(int(view.seconds)):>9}  {program:.60}"


def _choose(rows: Sequence[str]) -> int | None:
    """Return the index of the row that the user chooses with arrow keys and Enter; None if the user quits."""
    title = "several jobs are running; choose with the arrow keys and Enter, leave with q"
    place = 0
    with _keys() as keys, Live(auto_refresh=False, transient=True) as live, suppress(KeyboardInterrupt):
        while True:
            lines = [f"{'>' if number == place else ' '} {row}" for number, row in enumerate(rows)]
            live.update(Text("\n".join((title, *lines))), refresh=True)
            key = next(keys, "q")
            if key in ("\n", "q"):
                return place if key == "\n" else None
            place = (place + _MOVES.get(key, 0)) % len(rows)
    return None


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """A context with an iterator over the keys that the user presses, which the terminal does not print."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        reads = iter(lambda: os.read(terminal, 64).decode(errors="replace"), "")
        yield (key for text in reads for key in _KEY.findall(text))
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def main() -> None:
    """Run `poprun-top` with the arguments of this process, and exit with its exit code."""
    sys.exit(run_click(command, "poprun-top"))


def attach(pid: int) -> None:
    """Draw the job of the poprun process ``pid`` until it ends; ignore Ctrl-C, which poprun itself handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_any_letter()
    for job in running_jobs():
        if job.pid == pid:
            _draw(job, Console(stderr=True), is_transient=True)


def _first_view(job: RunningJob) -> JobView | None:
    try:
        return next(watch(job), None)
    except (OSError, ProtocolError):
        return None


def _show(job: RunningJob) -> None:
    console = Console()
    if console.is_terminal:
        # the stacks come with a view
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(job.pid, signal.SIGQUIT))
        _draw(job, console, is_transient=False)
        return
    view = _first_view(job)
    if view is not None:
        console.print(render(view, [Rate()] * len(view.instances), sys.maxsize, console.width))


def draw_views(views: Iterable[JobView], console: Console, *, is_transient: bool) -> None:
    """Draw each state of a job from ``views`` in the last lines of a terminal, in place of the state before."""
    recent: deque[JobView] = deque(maxlen=_VIEWS_OF_A_RATE)
    size = console.size
    live = Live(console=console, auto_refresh=False, transient=is_transient)
    with live, suppress(KeyboardInterrupt):
        for view in views:
            if size != console.size:  # the drawing has more or fewer lines now than rich has counted
                size = console.size
                console.clear()
            if view.said:
                console.print(Text(visible(view.said, keeps="\n")), soft_wrap=True)
            speeds = rates(recent[0] if recent else None, view)
            live.update(render(view, speeds, console.height - 1, console.width), refresh=True)
            recent.append(view)


def _draw(job: RunningJob, console: Console, *, is_transient: bool) -> None:
    try:
        draw_views(watch(job), console, is_transient=is_transient)
    except (OSError, ProtocolError) as error:
        console.print(Text(visible(f"poprun-top: {error}")))


if __name__ == "__main__":
    attach(int(sys.argv[1]))
