"""The end of an agent's process tree: first a request to end, then a kill at a deadline.

After a good end of the program, its other processes have more time. Standard library only: each shim loads this
module in a bare interpreter.
"""

from __future__ import annotations

import os
import time

from poprun.launch.process.process_tree import ProcessKey, own_tree, send, terminate, words_of

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from poprun.launch.messages.control import Message
else:
    import _signal as signal  # the module signal would load enum and more

_GRACE_SECONDS = 5.0
_LEFTOVER_SECONDS = 1.0
_MOST_LETTERS = 100


class TreeEnding:
    """The state of the end of a program's processes: whether they were asked to end, and when they are killed."""

    def __init__(self) -> None:
        self.grace_seconds = _GRACE_SECONDS  # time that the program has to end after the request
        self.was_stopped = False  # whether the program was asked to end, or must not begin
        self.is_patient = False  # whether the other processes of a program that ended well may end by themselves
        self._has_signal = False
        self._is_given_up = False
        self._deadline_seconds: float | None = None
        self._report_at_seconds = 0.0
        self._news: list[Message] = []

    @property
    def has_begun(self) -> bool:
        """Whether the end of the program's process tree has begun: a deadline for killing processes is set."""
        return self._deadline_seconds is not None

    def note_signal(self, *_: object) -> None:
        """Record, as a signal handler, that SIGTERM arrived; :meth:`obey_signal` then asks the program to end."""
        self._has_signal = True

    def obey_signal(self, program: int | None) -> None:
        """Ask the process ``program`` to end if SIGTERM has arrived and the program was not asked before."""
        if self._has_signal and not self.was_stopped:
            self.stop(program)

    def give_up(self) -> None:
        """Record that no process has to be ended, because the program could not be started."""
        self._is_given_up = True

    def stop(self, program: int | None) -> None:
        """Ask the process ``program`` to end (SIGTERM); after the grace time its whole process tree is killed."""
        # its children run until it has ended, because a program that saves its state needs its DataLoader workers
        self.was_stopped = True
        if self.is_patient:
            self._end_leftovers_now()
        self._begin(self.grace_seconds)
        if program is not None:
            os.kill(program, signal.SIGTERM)
            os.killpg(program, signal.SIGCONT)

    def end_leftovers(self, *, after_good_end: bool) -> None:
        """End the processes that an ended program left: now, or after a grace time if the program ended well."""
        self.is_patient = after_good_end and not self.was_stopped
        if self.is_patient:
            self._begin(self.grace_seconds)
            self._report_at_seconds = time.monotonic() + min(_LEFTOVER_SECONDS, self.grace_seconds / 2)
        else:
            terminate(own_tree())
            self._begin(_LEFTOVER_SECONDS)

    def kill(self) -> None:
        """Set the deadline to now, so that the next :meth:`is_over` kills the program's process tree."""
        self.was_stopped, self.is_patient = True, False
        self._deadline_seconds = 0.0

    def is_over(self, program: int | None) -> bool:
        """Whether all processes that must end have ended; after the deadline, also kill those that have not."""
        if self._deadline_seconds is None or self._is_given_up:
            return self._is_given_up
        tree = own_tree()
        if not tree and program is None:
            return True
        now_seconds = time.monotonic()
        if self.is_patient and 0.0 < self._report_at_seconds <= now_seconds:
            self._report_at_seconds = 0.0
            self._report_leftovers(tree, is_ended=False)
        if now_seconds >= self._deadline_seconds and self.is_patient:
            self._report_leftovers(tree, is_ended=True)
            self._end_leftovers_now()
        elif now_seconds >= self._deadline_seconds:
            send(tree, signal.SIGKILL)
        return False

    def news(self) -> Message | None:
        """Return the oldest unsent event about processes that an ended program left; None if there is none."""
        return self._news.pop(0) if self._news else None

    def _report_leftovers(self, tree: Sequence[ProcessKey], *, is_ended: bool) -> None:
        names = [f"process {key.pid} ({' '.join(words_of(key.pid))[:_MOST_LETTERS]})" for key in tree]
        self._news.append({"event": "left", "processes": names, "is_ended": is_ended})

    def _end_leftovers_now(self) -> None:
        self.is_patient, self._deadline_seconds = False, None
        self.end_leftovers(after_good_end=False)

    def _begin(self, seconds: float) -> None:
        if self._deadline_seconds is None:
            self._deadline_seconds = time.monotonic() + seconds
