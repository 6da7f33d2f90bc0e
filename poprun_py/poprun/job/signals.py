"""The signals that poprun has received while a job runs, each recorded as a request to the job's loop.

Signals are only recorded here. SIGHUP, SIGUSR1 and SIGUSR2 are passed on to programs that handle these signals. If
no program handles SIGHUP, the signal means that the terminal was closed, and ends the job.
"""

import errno
import os
import signal
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

_READ_BYTES = 4096


class ReceivedSignals:
    """The signals that poprun has received. Each signal also writes to a pipe, which wakes the job's main loop."""

    def __init__(self) -> None:
        self.num_interrupts = 0  # times that Ctrl-C was pressed
        self.wants_stacks = False  # whether the user asked for stacks (SIGQUIT)
        self.is_terminated = False  # whether poprun was asked to end
        self.is_output_closed = False  # whether nobody reads poprun's output any more, or it cannot be written
        self.is_output_lost = False  # whether the output cannot be written for another reason than a closed pipe
        self.passed_on: list[int] = []  # signals for the programs, in the order in which they came
        self.has_resized = False  # whether the terminal has another size
        self.is_suspended = False  # whether Ctrl-Z was pressed
        self.descriptor, self._writer = os.pipe()
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> Self:
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGCHLD,
            signal.SIGWINCH,
            signal.SIGTSTP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                self._previous[signum] = signal.signal(signum, self._count)
        # A shell ignores SIGQUIT for background processes, but a user can still send the signal by hand.
        self._previous[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        writer, self._writer = self._writer, -1  # a thread that writes output may still call note_closed_output
        os.close(self.descriptor)
        os.close(writer)

    def drain(self) -> None:
        """Read all bytes that signals have written to the pipe, so that only the next signal wakes the loop."""
        while True:
            try:
                if len(os.read(self.descriptor, _READ_BYTES)) < _READ_BYTES:
                    return
            except BlockingIOError:
                return

    def note_closed_output(self, error: OSError) -> None:
        """Record, from any thread, why poprun's output cannot be written any more, and wake the job's loop."""
        self.is_output_lost |= error.errno != errno.EPIPE
        self.is_output_closed = True
        with suppress(OSError):  # the loop has ended, or the pipe is full and wakes the loop anyway
            os.write(self._writer, b"\0")

    def _count(self, signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self.num_interrupts += 1
        elif signum == signal.SIGQUIT:
            self.wants_stacks = True
        elif signum == signal.SIGTERM:
            self.is_terminated = True
        elif signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            self.passed_on.append(signum)
        elif signum == signal.SIGWINCH:
            self.has_resized = True
        elif signum == signal.SIGTSTP:
            self.is_suspended = True
