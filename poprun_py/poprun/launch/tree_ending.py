"""How the tree of a program is ended: asked once, bounded by one deadline, then killed."""

import os
import signal
import time

from poprun.process.tree import own_tree, send, terminate

_GRACE_SECONDS = 5.0
_LEFTOVER_SECONDS = 1.0


class Ending:
    """What is known of the end of the tree of this process.

    Attributes:
        grace_seconds: How long the program may take to end, once it was asked.
        was_stopped: Whether the program was asked to end, or is never to begin.
    """

    def __init__(self) -> None:
        self.grace_seconds = _GRACE_SECONDS
        self.was_stopped = False
        self._deadline_seconds: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a deadline."""
        return self._deadline_seconds is not None

    def stop(self, program: int | None) -> None:
        """Ask the program to end; what is left of its tree at the deadline is killed.

        Only the program itself is asked first. Its own children are asked once it has ended, so that a program
        which saves its state on SIGTERM does not lose its data loader's workers while it does.
        """
        self.was_stopped = True
        self._begin(self.grace_seconds)
        if program is not None:
            os.kill(program, signal.SIGTERM)
            os.killpg(program, signal.SIGCONT)

    def stop_leftovers(self) -> None:
        """The program has ended: what it left behind is asked to end, too."""
        terminate(own_tree())
        self._begin(_LEFTOVER_SECONDS)

    def kill(self) -> None:
        """Wait for nothing any more."""
        self.was_stopped = True
        self._deadline_seconds = 0.0

    def is_over(self, program: int | None) -> bool:
        """Whether nothing is left of a tree that was to end; kills what is left when the time is over."""
        if self._deadline_seconds is None:
            return False
        tree = own_tree()
        if not tree and program is None:
            return True
        if time.monotonic() >= self._deadline_seconds:
            send(tree, signal.SIGKILL)
        return False

    def _begin(self, seconds: float) -> None:
        if self._deadline_seconds is None:
            self._deadline_seconds = time.monotonic() + seconds
