"""The signals that poprun has received while a job runs, and what each means to the job.

They are only noted here. SIGHUP, SIGUSR1 and SIGUSR2 are for programs that handle them; when no program handles
SIGHUP it means the end of the terminal, and of the job.
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
    """Collects the signals that poprun receives; ``descriptor`` becomes readable at each one."""

    def __init__(self) -> None:
        self.num_interrupts = 0  # times that Ctrl-C was pressed
        self.wants_stacks = False  # whether the user asked for stacks (SIGQUIT)
        self.is_terminated = False  # whether poprun was asked to end
        self.is_output_closed = False  # whether nobody reads poprun's output any more, or it cannot be written
        self.is_output_lost = False  # whether it cannot be written although somebody would read it
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
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup means it
                self._previous[signum] = signal.signal(signum, self._count)
        # A shell starts what runs in its background with SIGQUIT ignored; there it can still be sent by hand.
        self._previous[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        writer, self._writer = self._writer, -1  # a thread that still writes output may call below
        os.close(self.descriptor)
        os.close(writer)

    def drain(self) -> None:
        """Make the descriptor unreadable until the next signal."""
        while True:
            try:
                if len(os.read(self.descriptor, _READ_BYTES)) < _READ_BYTES:
                    return
            except BlockingIOError:
                return

    def note_closed_output(self, error: OSError) -> None:
        """Tell the loop, from any thread, why poprun's output cannot be written any more."""
        self.is_output_lost |= error.errno != errno.EPIPE
        self.is_output_closed = True
        with suppress(OSError):  # the loop has ended, or has much to read already
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
