"""Bring the programs' output to its logs and to poprun's own streams, in a thread of its own.

Pure. A traceback is held back until its last line says whether it is one of KeyboardInterrupt; logs keep them all.

A reader that does not read (a pager, a stopped terminal) blocks this thread and through the pipes the programs, as
it would without poprun; it never blocks the supervision.
"""

import os
import re
import selectors
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from poprun.job.output.descriptors import Source
from poprun.job.output.display import Display
from poprun.job.output.lines import LineSplitter

if TYPE_CHECKING:
    from poprun.job.output.log_files import LogFiles

MAX_HELD_LINES: Final = 500

_DECORATION: Final = re.compile(rb"\x1b\[[0-9;]*m|^\[rank\d+\]: ?")
_HEADER: Final = b"Traceback (most recent call last):"
_CAUSE: Final = re.compile(rb"KeyboardInterrupt\b")
_ORIGIN: Final = re.compile(rb"Process \S+:$|Exception ignored ")


class InterruptFilter:
    """What instances write to their standard errors after Ctrl-C, without the tracebacks of KeyboardInterrupt."""

    def __init__(self) -> None:
        self._held: dict[int, list[bytes]] = {}
        self._interrupted: set[int] = set()

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The instances of which a traceback was taken out, ascending."""
        return tuple(sorted(self._interrupted))

    def feed(self, instance: int, lines: bytes) -> bytes:
        """What is to be shown of whole ``lines``; what may be the beginning of such a traceback is held back."""
        return b"".join(self._sift(instance, line) for line in lines.splitlines(keepends=True))

    def finish(self, instance: int) -> bytes:
        """What was held back and is no such traceback: the instance writes no more."""
        return b"".join(self._held.pop(instance, ()))

    def _sift(self, instance: int, line: bytes) -> bytes:
        held = self._held.get(instance, [])
        text = _DECORATION.sub(b"", line).rstrip()
        if held and _CAUSE.match(text):
            self._interrupted.add(instance)
            del self._held[instance]
            return b""
        is_first = text == _HEADER or _ORIGIN.match(text) is not None
        is_call = text.startswith(b"  ") or not text  # Python marks some calls with a line of blanks
        is_next = bool(held) and (is_call or (text == _HEADER and len(held) == 1))
        if is_next and len(held) < MAX_HELD_LINES:
            held.append(line)
            return b""
        released = self.finish(instance)
        if is_first:
            self._held[instance] = [line]
            return released
        return released + line


_READ_BYTES = (
    64 * 1024
)  # what a pipe holds; larger buffers come fresh from the kernel each time, at half the speed
_TAIL_LINES = 200
_TAIL_LINE_BYTES = 2048
_STDERR = 2


class Relay:
    """Reads every source until it ends, logs and shows it, remembers the last lines of each standard error.

    Args:
        sources: What to read.
        displays: Where to show it, by the number of the stream.
        logs: Where to keep it, or None.
    """

    def __init__(
        self, sources: Iterable[Source], displays: Mapping[int, Display], logs: "LogFiles | None"
    ) -> None:
        self._displays = displays
        self._logs = logs
        self._interrupts: InterruptFilter | None = None
        self._splitters = {source: LineSplitter() for source in sources}
        self._tails: dict[int, deque[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector.register(self._stop_reader, selectors.EVENT_READ, None)
        for source in self._splitters:
            self._selector.register(source.descriptor, selectors.EVENT_READ, source)
        self._thread = threading.Thread(target=self._run, name="poprun-relay", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def finish(self, timeout_seconds: float) -> None:
        """Read what the pipes still hold and end; give up on a reader that does not read within the timeout."""
        os.write(self._stop_writer, b".")
        self._thread.join(timeout_seconds)

    def tail(self, instance: int) -> list[str]:
        """The last lines that ``instance`` wrote to its standard error."""
        return [line.decode(errors="replace").rstrip("\r\n") for line in tuple(self._tails.get(instance, ()))]

    def leave_out_interrupts(self) -> None:
        """From now on, do not show the tracebacks of KeyboardInterrupt: Ctrl-C was pressed."""
        self._interrupts = InterruptFilter()

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The instances whose tracebacks of KeyboardInterrupt were not shown, ascending."""
        return () if self._interrupts is None else self._interrupts.interrupted

    def _run(self) -> None:
        self._read_all()
        for source in tuple(self._splitters):  # pipes that a process that is none of ours holds open
            self._end(source)
        if self._logs is not None:
            self._logs.close()

    def _read_all(self) -> None:
        is_stopping = False
        while self._splitters:
            ready = self._selector.select(0 if is_stopping else self._patience_seconds())
            if is_stopping and not ready:
                return
            for key, _ in ready:
                if key.data is None:
                    is_stopping = True
                    self._selector.unregister(self._stop_reader)
                elif data := _read(key.data.descriptor):
                    self._pass_on(key.data, data)
                else:
                    self._selector.unregister(key.data.descriptor)
                    self._end(key.data)
            for display in self._displays.values():
                display.show_due()

    def _patience_seconds(self) -> float | None:
        return min(
            (due for display in self._displays.values() if (due := display.due_in_seconds) is not None),
            default=None,
        )

    def _pass_on(self, source: Source, data: bytes) -> None:
        if self._logs is not None:
            self._logs.write(source.instance, source.target, data)
        splitter = self._splitters[source]
        lines = splitter.feed(data)
        self._remember(source, lines)
        if source.is_raw:
            self._displays[source.target].pass_on(data)
        elif source.is_shown:
            self._displays[source.target].show(source.instance, self._sifted(source, lines), splitter.step)

    def _end(self, source: Source) -> None:
        """Show the last line of a source that has ended."""
        lines = self._splitters.pop(source).finish()
        self._remember(source, lines)
        if source.is_shown and not source.is_raw:
            lines = self._sifted(source, lines)
            if self._interrupts is not None and source.target == _STDERR:
                lines += self._interrupts.finish(source.instance)
            self._displays[source.target].show(source.instance, lines, b"")
            self._displays[source.target].end(source.instance)
        os.close(source.descriptor)

    def _sifted(self, source: Source, lines: bytes) -> bytes:
        if self._interrupts is None or source.target != _STDERR:
            return lines
        return self._interrupts.feed(source.instance, lines)

    def _remember(self, source: Source, lines: bytes) -> None:
        if source.target == _STDERR and lines:
            tail = self._tails.setdefault(source.instance, deque(maxlen=_TAIL_LINES))
            tail.extend(line[:_TAIL_LINE_BYTES] for line in lines.splitlines()[-_TAIL_LINES:])


def _read(descriptor: int) -> bytes:
    """The next bytes; none at the end of a stream, and when the host that it comes from is lost."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError:
        return b""
