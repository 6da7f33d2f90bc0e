"""The last duty: whatever still descends from poprun when its job is over is ended.

poprun is a subreaper, so what a killed agent left behind has become its child.
"""

import signal
import time

from poprun.process_tree import ProcessKey, own_tree, reap, send, terminate

_POLL_SECONDS = 0.02


def sweep(grace_seconds: float, kill_seconds: float) -> list[ProcessKey]:
    """End all descendants: SIGTERM, SIGKILL after the grace, and a bounded wait for the kernel to bury them.

    Returns those that even SIGKILL did not end in time (a process in an uninterruptible system call).
    """
    if not _living():
        return []
    terminate(_living())
    _wait_until_none(grace_seconds)
    send(_living(), signal.SIGKILL)
    _wait_until_none(kill_seconds)
    return _living()


def _living() -> list[ProcessKey]:
    for _ in reap():
        pass
    return own_tree()


def _wait_until_none(timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while _living() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
