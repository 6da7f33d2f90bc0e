"""The monitor that ``--monitor`` shows: a process of its own, so that drawing never holds the supervisor up."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Final

from poprun.process.start import ProcessStart, start_process
from poprun.process.tree import key_of, reap

_STDERR: Final = 2
_LEAVE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.01


class MonitorProcess:
    """The process that draws this poprun's job on the terminal until the job hangs up."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        words = (sys.executable, "-m", "poprun.monitor.top", str(os.getpid()))
        streams = (null, _STDERR, _STDERR)
        pid = start_process(ProcessStart(words, os.getcwd(), environ, streams, signal.SIGTERM))
        os.close(null)
        self._key = key_of(pid)

    def wait(self) -> None:
        """Give it the time to wipe its drawing off the terminal; call this when the job has hung up."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._key is not None and key_of(self._key.pid) == self._key and time.monotonic() < deadline:
            for _ in reap():
                pass
            time.sleep(_POLL_SECONDS)
