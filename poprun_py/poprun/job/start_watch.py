"""Watch shims come to life under an MPI runtime, which may lose one and say nothing.

A shim that is killed before its agent has reported leaves no trace on the control socket, and Hydra goes on
waiting for it. So while a job starts, the shims below the launcher are looked for.
"""

from collections.abc import Collection, Iterable
from typing import Final

from poprun.launch.launchers import SHIM_WORDS
from poprun.process.tree import descendants, words_of

_INTERVAL_SECONDS: Final = 0.2


def living_shims(roots: Iterable[int]) -> set[int]:
    """The shims below the processes ``roots``, and agents that have not left their shim's session yet."""
    below = {key.pid for root in roots for key in descendants(root)}
    return {pid for pid in below if words_of(pid) == list(SHIM_WORDS)}


class StartWatch:
    """What was seen of the shims so far.

    It looks now and then: a start that takes the usual moment is over before the first look.

    Args:
        now_seconds: Monotonic time at which the start began.
        has_runtime: Whether an MPI runtime starts all shims, on this machine; else there is nothing to see.

    Attributes:
        has_runtime: As above.
        has_lost_one: Whether a shim, or an agent, was gone before it had reported.
        idle_seconds: For how long there has been no shim that may still report.
    """

    def __init__(self, now_seconds: float, *, has_runtime: bool = True) -> None:
        self.has_runtime = has_runtime
        self._next_seconds = now_seconds + _INTERVAL_SECONDS
        self._seen: set[int] = set()
        self._idle_since_seconds: float | None = None
        self.has_lost_one = False
        self.idle_seconds = 0.0

    def look(self, roots: Iterable[int], reported: Collection[int], now_seconds: float) -> None:
        """Look below the launcher's processes, if it is time to.

        Args:
            roots: The launcher's processes.
            reported: The agents that have reported, and their shims.
            now_seconds: Monotonic time.
        """
        if self.has_runtime and now_seconds >= self._next_seconds:
            self._next_seconds = now_seconds + _INTERVAL_SECONDS
            self.note(living_shims(roots), reported, now_seconds)

    def note(self, living: Collection[int], reported: Collection[int], now_seconds: float) -> None:
        """Take note of the shims and agents that live now."""
        self.has_lost_one = self.has_lost_one or bool(self._seen - set(living) - set(reported))
        self._seen |= set(living)
        if set(living) - set(reported):
            self._idle_since_seconds = None
            self.idle_seconds = 0.0
        else:
            self._idle_since_seconds = (
                now_seconds if self._idle_since_seconds is None else self._idle_since_seconds
            )
            self.idle_seconds = now_seconds - self._idle_since_seconds
