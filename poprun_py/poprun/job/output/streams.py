"""The programs' standard streams while a job runs: opened for each instance, read, fed, and finished.

On one machine instance 0 reads poprun's standard input itself. Between hosts what is there is sent as it comes,
whether or not the program reads it, as ssh does; the end of the input is the end of what the program reads.
"""

import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from poprun.job.orders import JobIdentity
from poprun.job.output.descriptors import StreamPlan
from poprun.plan.plan import LaunchPlan

if TYPE_CHECKING:
    from poprun.job.output.relay import Relay

_READ_BYTES: Final = 64 * 1024
_BACKGROUND_MILLISECONDS: Final = 500
_JOIN_SECONDS: Final = 1.0


class InputFeed:
    """Sends what comes from ``source`` to ``target`` until there is no more, or nobody reads it any more.

    Args:
        source: Descriptor to read.
        target: Descriptor of a connected socket; the feed closes it.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = socket.socket(fileno=target)
        self._target.setblocking(False)  # noqa: FBT003 - it takes no keywords
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="poprun-input", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def end(self) -> None:
        """Read no more."""
        os.close(self._stop_writer)
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


class Traffic:
    """What goes between poprun's own streams and those of the programs of one attempt.

    Raises:
        PlanError: If there are to be logs and they cannot be made.
        LaunchError: If poprun may not open as many files.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], identity: JobIdentity) -> None:
        self._streams = StreamPlan(plan, environ, identity)
        self._relay: Relay | None = None
        self._feed: InputFeed | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether the one program has poprun's own streams."""
        return self._streams.is_inherited

    def open(self, instance: int, sockets: Mapping[int, int]) -> list[int]:
        """The descriptors for ``instance``, which :meth:`close` closes here: see :meth:`StreamPlan.open`."""
        return self._streams.open(instance, sockets)

    def close(self, streams: list[int]) -> None:
        """Close what was passed on."""
        self._streams.close(streams)

    def start(self, on_closed: Callable[[], None]) -> None:
        """Begin to read and to feed; ``on_closed`` is called when nobody reads poprun's output any more."""
        if self._streams.sources:
            from poprun.job.output.relay import Relay  # noqa: PLC0415 - was loaded while the shims started

            self._relay = Relay(self._streams.sources, self._streams.displays(on_closed), self._streams.logs)
            self._relay.start()
        if self._streams.fed is not None:
            self._feed = InputFeed(0, self._streams.fed)
            self._feed.start()

    def finish(self, timeout_seconds: float) -> None:
        """Read what the pipes still hold, and end."""
        if self._feed is not None:
            self._feed.end()
        if self._relay is not None:
            self._relay.finish(timeout_seconds)

    def last_line(self, instance: int) -> str:
        """The last line that ``instance`` wrote to its standard error, or nothing."""
        tail = [] if self._relay is None else self._relay.tail(instance)
        return tail[-1] if tail else ""

    def tails(self, instances: Iterable[int]) -> dict[int, list[str]]:
        """What each of ``instances`` wrote last to its standard error."""
        relay = self._relay
        return {} if relay is None else {index: relay.tail(index) for index in instances}

    def leave_out_interrupts(self) -> None:
        """From now on, do not show the tracebacks of KeyboardInterrupt: Ctrl-C was pressed."""
        if self._relay is not None:
            self._relay.leave_out_interrupts()

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The instances whose tracebacks of KeyboardInterrupt were not shown, ascending."""
        return () if self._relay is None else self._relay.interrupted
