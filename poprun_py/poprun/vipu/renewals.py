"""Which leases of clients are still renewed. Pure but for the clock, which is an argument."""

import time
from collections.abc import Callable, Collection


class Renewals:
    """When each lease was renewed last.

    Time in which this process itself did not run (it was stopped, or the machine slept) counts for nobody: clients
    could not renew anything while nobody listened.

    Args:
        lease_seconds: How long a lease lasts after it was renewed.
        look_seconds: How often :meth:`expired` is called; what is much later is a gap.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self, lease_seconds: float, look_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_seconds = lease_seconds
        self._look_seconds = look_seconds
        self._clock = clock
        self._looked_at = clock()
        self._ends: dict[str, float] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._ends

    def renew(self, key: str) -> None:
        """Let the lease last from now on, also one that was not known."""
        self._ends[key] = self._clock() + self._lease_seconds

    def forget(self, key: str) -> None:
        """The lease has ended."""
        self._ends.pop(key, None)

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget the leases that somebody else has ended."""
        self._ends = {key: end for key, end in self._ends.items() if key in keys}

    def expired(self) -> list[str]:
        """The leases that were not renewed in time; those that nobody could renew get the time back."""
        now = self._clock()
        gap = now - self._looked_at - self._look_seconds
        self._looked_at = now
        if gap > self._look_seconds:
            self._ends = {key: end + gap for key, end in self._ends.items()}
        return [key for key, end in self._ends.items() if end <= now]
