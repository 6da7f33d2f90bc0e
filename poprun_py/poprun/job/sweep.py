"""The last duty: whatever still descends from poprun when its job is over is ended.

poprun is a subreaper, so what a killed agent left behind has become its child.
"""

import signal
import time
from collections.abc import Collection

from poprun.process.tree import ProcessKey, own_tree, reap, send, terminate

_POLL_SECONDS = 0.02


def sweep(grace_seconds: float, kill_seconds: float, spared: Collection[int] = ()) -> list[ProcessKey]:
    """End all descendants: SIGTERM, SIGKILL after the grace, and a bounded wait for the kernel to bury them.

    Those that are ``spared`` stay, with all below them: who keeps a lease is there for the next attempt, too.

    Returns those that even SIGKILL did not end in time (a process in an uninterruptible system call).
    """
    if not _living(spared):
        return []
    terminate(_living(spared))
    _wait_until_none(grace_seconds, spared)
    send(_living(spared), signal.SIGKILL)
    _wait_until_none(kill_seconds, spared)
    return _living(spared)


def _living(spared: Collection[int]) -> list[ProcessKey]:
    for _ in reap():
        pass
    return own_tree(spared)


def _wait_until_none(timeout_seconds: float, spared: Collection[int]) -> None:
    deadline = time.monotonic() + timeout_seconds
    while _living(spared) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
