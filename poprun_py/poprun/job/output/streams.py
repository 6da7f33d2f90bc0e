"""The standard streams of the programs while a job runs: poprun opens, reads, feeds and closes the streams.

On several hosts instance 0 gets poprun's standard input as it comes, whether or not the program reads it, as with
ssh. The end of poprun's input is the end of the program's input.
"""

import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from poprun.errors import LaunchError, PlanError, describe_error
from poprun.launch.process.spawn import start_thread
from poprun.observe.account.job_identity import JobIdentity
from poprun.plan.plan import LaunchPlan
from poprun.text.screen import log

if TYPE_CHECKING:
    from poprun.job.output.log_files import LogFiles
    from poprun.job.output.relay import OnClosed, Relay

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2


class ProgramStreams:
    """The stdin, stdout and stderr of all instances of a job: pipes, sockets between hosts, or poprun's own."""

    def __init__(
        self, plan: LaunchPlan, environ: Mapping[str, str], identity: JobIdentity, *, shows_all: bool
    ) -> None:
        self._plan = plan
        self._shows_all = shows_all  # whether tracebacks are shown with all calls
        self._has_colours = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._null = os.open(os.devnull, os.O_RDWR)
        self._pipes: list[tuple[int, int, int]] = []
        self._input_socket: int | None = None
        self._logs = _open_logs(plan, identity)
        self._relay: Relay | None = None
        self._feed: InputFeed | None = None
        is_alone = plan.num_instances == 1 and not plan.is_tagged
        # whether the only program has poprun's own streams, so that debuggers and progress bars work as usual
        self.is_inherited = is_alone and self._logs is None and not plan.output.has_monitor

    def open(self, instance: int, sockets: Mapping[int, int]) -> list[int]:
        """Return descriptors for an instance's stdin, stdout and stderr; [] if the streams use ``sockets``."""
        if sockets:
            self._input_socket = sockets.get(_STDIN, self._input_socket)
            self._pipes += [(sockets[stream], instance, stream) for stream in sockets.keys() - {_STDIN}]
            return []
        stdin = _STDIN if instance == 0 else self._null
        if self.is_inherited:
            return [stdin, _STDOUT, _STDERR]
        return [stdin, self._open_pipe(instance, _STDOUT), self._open_pipe(instance, _STDERR)]

    def close(self, streams: list[int]) -> None:
        """Close ``streams``, the descriptors that :meth:`open` has returned, except poprun's own streams."""
        for descriptor in streams:
            if descriptor > _STDERR and descriptor != self._null:
                os.close(descriptor)

    @property
    def has_no_reader(self) -> bool:
        """Whether the only program writes to poprun's own stdout, and nobody reads this stdout any more."""
        poll = select.poll()
        poll.register(_STDOUT, 0)
        return self.is_inherited and any(events & select.POLLERR for _, events in poll.poll(0))

    def start(self, on_closed: "OnClosed") -> None:
        """Start the threads that pass output and input on; call ``on_closed`` if nobody reads the output."""
        if self._pipes:
            from poprun.job.output.relay import Relay, make_displays

            displays = make_displays(self._plan, on_closed, has_colours=self._has_colours)
            self._relay = Relay(self._plan, self._pipes, displays, self._logs, shows_all=self._shows_all)
            self._relay.start()
        if self._input_socket is not None:
            self._feed = InputFeed(_STDIN, self._input_socket)
            self._feed.start()

    def finish(self, timeout_seconds: float) -> None:
        """Read the rest of the programs' output, stop the threads, and close all open files."""
        if self._feed is not None:
            self._feed.end()
        if self._relay is not None:
            self._relay.finish(timeout_seconds)
        elif self._logs is not None:
            self._logs.close()
        os.close(self._null)

    def last_line(self, instance: int) -> str:
        """Return the last line that ``instance`` wrote to stderr, or else to a hidden stdout; "" without lines."""
        tail = [] if self._relay is None else self._relay.tails.of_failure(instance)
        return tail[-1] if tail else ""

    def tails(self, instances: Iterable[int]) -> dict[int, list[str]]:
        """Return {instance: its last lines on stderr, or, if it wrote none, on a stdout that is not shown}."""
        relay = self._relay
        return {} if relay is None else {index: relay.tails.of_failure(index) for index in instances}

    def last_lines(self) -> dict[int, list[str]]:
        """Return {instance: the last lines of its output}; {} if the job's report needs no lines."""
        if self._relay is None:
            return {}
        tails = {index: self._relay.tails.of_all(index) for index in range(self._plan.num_instances)}
        return {index: lines for index, lines in tails.items() if lines}

    def leave_out_interrupts(self) -> None:
        """Hide tracebacks of KeyboardInterrupt from now on, because the user has pressed Ctrl-C."""
        if self._relay is not None:
            self._relay.leave_out_interrupts()

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The ascending indices of the instances whose tracebacks of KeyboardInterrupt were hidden."""
        return () if self._relay is None else self._relay.interrupted

    def _open_pipe(self, instance: int, stream: int) -> int:
        try:
            reader, writer = os.pipe()
        except OSError as error:
            raise LaunchError(
                f"cannot open the output of instance {instance}: {describe_error(error.errno or 0)}"
            ) from None
        self._pipes.append((reader, instance, stream))
        return writer


def _open_logs(plan: LaunchPlan, identity: JobIdentity) -> "LogFiles | None":
    if plan.output.log_dir is None:
        return None
    from poprun.job.output.log_files import LogFiles

    log_dir = os.path.join(plan.working_directory, plan.output.log_dir)
    try:
        return LogFiles(log_dir, identity.job_id, identity.restart_count, plan.num_instances, log)
    except PlanError as error:
        if identity.restart_count == 0:
            raise
        log(f"warning: {error}; the job goes on without logs")
        return None


_READ_BYTES: Final = 64 * 1024
_BACKGROUND_MILLISECONDS: Final = 500
_JOIN_SECONDS: Final = 1.0


class InputFeed:
    """A thread that sends poprun's standard input over a socket to a program, until the input or program ends."""

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = socket.socket(fileno=target)
        self._target.setblocking(False)  # noqa: FBT003 - the method takes no keywords
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="poprun-input", daemon=True)

    def start(self) -> None:
        """Start the thread that sends poprun's input to a program. Raises OSError if no thread is possible."""
        start_thread(self._thread)

    def end(self) -> None:
        """Stop the thread that sends input to a program, and wait at most 1 s for the thread's end."""
        os.close(self._stop_writer)
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        os.close(self._stop_reader)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        with self._target, suppress(OSError):  # the instance has ended, or there is no standard input
            while data := self._read():
                while data and self._is_ready(self._target.fileno(), select.POLLOUT):
                    data = data[self._target.send(data) :]

    def _read(self) -> bytes:
        """Return the next bytes of poprun's standard input; b"" at the end of the input."""
        # SIGTTIN is blocked, so that a read fails and does not stop poprun while another program has the terminal
        while self._is_ready(self._source, select.POLLIN):
            try:
                return os.read(self._source, _READ_BYTES)
            except OSError as error:
                is_in_background = error.errno == errno.EIO and os.isatty(self._source)
                if not is_in_background or not self._is_ready(None, 0, _BACKGROUND_MILLISECONDS):
                    break
        return b""

    def _is_ready(self, descriptor: int | None, event: int, patience_milliseconds: int | None = None) -> bool:
        """Wait until poll(2) reports ``event`` at ``descriptor``, or time is over. Return False if the thread must
        end.
        """
        target = self._target.fileno()
        poll = select.poll()
        poll.register(self._stop_reader, 0)
        poll.register(target, select.POLLRDHUP)
        if descriptor is not None:
            poll.register(descriptor, event | (select.POLLRDHUP if descriptor == target else 0))
        events = dict(poll.poll(patience_milliseconds))
        return self._stop_reader not in events and not events.get(target, 0) & ~select.POLLOUT
