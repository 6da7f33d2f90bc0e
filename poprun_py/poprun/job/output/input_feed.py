"""The standard input of a job on several hosts: sent to instance 0 as it comes.

It is sent whether or not the program reads it, as ssh does; the end of the input is the end of what the program
reads.
"""

import errno
import os
import select
import signal
import socket
import threading
from contextlib import suppress
from typing import Final

from poprun.process.spawn import start_thread

_READ_BYTES: Final = 64 * 1024
_BACKGROUND_MILLISECONDS: Final = 500
_JOIN_SECONDS: Final = 1.0


class InputFeed:
    """Sends what comes from one descriptor to a connected socket until there is no more, or nobody reads it."""

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = socket.socket(fileno=target)
        self._target.setblocking(False)  # noqa: FBT003 - it takes no keywords
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="poprun-input", daemon=True)

    def start(self) -> None:
        """Begin to read.

        Raises:
            OSError: If there can be no more threads.
        """
        start_thread(self._thread)

    def end(self) -> None:
        """Read no more."""
        os.close(self._stop_writer)
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        os.close(self._stop_reader)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        with self._target, suppress(OSError):  # the instance has gone, or there is no standard input
            while data := self._read():
                while data and self._is_ready(self._target.fileno(), select.POLLOUT):
                    data = data[self._target.send(data) :]

    def _read(self) -> bytes:
        """What has come; nothing at the end.

        While others have the terminal, a read fails instead of stopping poprun, since SIGTTIN is blocked: read(2).
        """
        while self._is_ready(self._source, select.POLLIN):
            try:
                return os.read(self._source, _READ_BYTES)
            except OSError as error:
                is_in_background = error.errno == errno.EIO and os.isatty(self._source)
                if not is_in_background or not self._is_ready(None, 0, _BACKGROUND_MILLISECONDS):
                    break
        return b""

    def _is_ready(self, descriptor: int | None, event: int, patience_milliseconds: int | None = None) -> bool:
        """Wait for a descriptor, or as long as is said; False when the feed is to end, or nobody reads."""
        target = self._target.fileno()
        poll = select.poll()
        poll.register(self._stop_reader, 0)
        poll.register(target, select.POLLRDHUP)
        if descriptor is not None:
            poll.register(descriptor, event | (select.POLLRDHUP if descriptor == target else 0))
        found = dict(poll.poll(patience_milliseconds))
        return self._stop_reader not in found and not found.get(target, 0) & ~select.POLLOUT
