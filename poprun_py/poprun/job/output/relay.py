"""The relay of the programs' output: a thread that reads the output, logs it, adds tags, and writes it on.

If the process that reads poprun's output stops reading (a pager, a stopped terminal), this thread waits. The
programs then wait because their pipes are full, as without poprun, but poprun's supervision of the job never
waits.
"""

import errno
import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from popdist.ground.values import dataclass
from poprun.job.output.lines import LineSplitter, StepLines, Tags, tagged
from poprun.launch.process.spawn import start_thread
from poprun.plan.plan import LaunchPlan
from poprun.text.screen import Level, log

if TYPE_CHECKING:
    from poprun.job.output.folding import Folded, Folder
    from poprun.job.output.log_files import LogFiles
    from poprun.job.output.progress_bars import BottomRow
    from poprun.job.output.tracebacks import TracebackFilter


_NAMES: Final = {1: "stdout", 2: "stderr"}

_HEADER: Final = b"Traceback (most recent call last):"
_READ_BYTES = 64 * 1024
"""The capacity of a pipe; a larger buffer halves the speed, because each read then gets new memory from the
kernel.
"""

_TAIL_LINES = 200
_LAST_LINES = 20
_TAIL_LINE_BYTES = 2048
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One output stream, stdout or stderr, of one instance's program."""

    descriptor: int  # the reading end of the stream's pipe
    instance: int  # the instance that writes the stream
    target: int  # descriptor of poprun's own stream to which it goes: 1 or 2
    is_shown: bool  # whether its lines are shown; lines are always logged and remembered
    # whether its bytes are written unchanged, because only one instance writes and lines need no tag
    is_raw: bool


OnClosed = Callable[[OSError], None]  # called with the reason when poprun's output cannot be written any more


class OutputStream:
    """poprun's own stdout or stderr; ``on_closed`` is called if writing fails, such as on a full disk."""

    def __init__(self, descriptor: int, on_closed: OnClosed) -> None:
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._is_closed = False

    def write(self, data: bytes) -> None:
        """Write ``data`` and wait while the reader is slow; after a write error, drop this and all later data."""
        view = memoryview(data)
        while view and not self._is_closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another program made the terminal non-blocking
                select.select((), (self._descriptor,), ())
            except OSError as error:
                self._is_closed = True
                if error.errno != errno.EPIPE:
                    log(f"standard output cannot be written: {error.strerror}", Level.ERROR)
                self._on_closed(error)


class Display:
    """A writer of all instances' lines to poprun's stdout or stderr; it adds prefixes and draws progress bars."""

    def __init__(
        self, stream: str, output: OutputStream, tags: Tags, row: "BottomRow | None", folder: "Folder | None"
    ) -> None:
        self._stream = stream
        self._output = output
        self._tags = tags
        self._row = row
        self._folder = folder
        self._steps = StepLines()

    def pass_on(self, data: bytes) -> None:
        """Write ``data``, bytes that a program has printed, unchanged to poprun's own stdout or stderr."""
        self._output.write(data)

    def show(self, instance: int, lines: bytes, step: bytes) -> None:
        """Show whole ``lines`` of ``instance``, and then ``step``, its progress bar's unfinished update."""
        if self._folder is not None:
            self._write_folded(self._folder.add_lines(instance, lines, time.monotonic()))
            lines = b""
        self._write((instance,), lines, step)

    def show_due(self) -> None:
        """Show the lines that have waited long enough for other instances to print the same lines."""
        if self._folder is not None:
            self._write_folded(self._folder.due(time.monotonic()))

    def end(self, instance: int) -> None:
        """Show the lines and progress bars of ``instance`` that still wait, because the instance has ended."""
        if self._folder is not None:
            self._write_folded(self._folder.end(instance))
        if self._row is not None:
            self._output.write(self._row.end_bars(self._stream, instance))
        elif step := self._steps.end((instance,)):
            self._write((instance,), step, b"")

    @property
    def due_in_seconds(self) -> float | None:
        """The seconds until the oldest waiting line must be shown; None if no line waits."""
        due_at_seconds = None if self._folder is None else self._folder.due_at_seconds
        return None if due_at_seconds is None else max(0.0, due_at_seconds - time.monotonic())

    def _write_folded(self, folded: "Iterable[Folded]") -> None:
        for instances, some in groupby(folded, attrgetter("instances")):
            self._write(instances, b"".join(one.line for one in some), b"")

    def _write(self, instances: tuple[int, ...], lines: bytes, step: bytes) -> None:
        tag = self._tags.of(instances)
        if self._row is None:
            lines = self._steps.show(instances, lines, time.monotonic()) if tag else lines
            self._output.write(tagged(tag, lines))
        else:
            self._output.write(self._row.render(self._stream, instances, tag, lines, step))


def make_displays(plan: LaunchPlan, on_closed: OnClosed, *, has_colours: bool) -> dict[int, Display]:
    """Make the displays that write all instances' output to poprun's stdout (key 1) and stderr (key 2)."""
    rows: dict[int, BottomRow] = {}  # by terminal, because two streams may share a terminal
    displays = {}
    for target, name in _NAMES.items():
        is_terminal = os.isatty(target)
        tags = Tags(plan, name, is_coloured=is_terminal and has_colours)
        row = _bottom_row(target, rows) if is_terminal else None
        displays[target] = Display(name, OutputStream(target, on_closed), tags, row, _folder(plan))
    return displays


def _bottom_row(terminal: int, rows: "dict[int, BottomRow]") -> "BottomRow":
    from poprun.job.output.progress_bars import BottomRow

    return rows.setdefault(os.fstat(terminal).st_rdev, BottomRow(lambda: _columns(terminal)))


def _columns(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns
    except OSError:  # the terminal does not exist any more
        return 0


def _folder(plan: LaunchPlan) -> "Folder | None":
    if not plan.output.is_folded:
        return None
    from poprun.job.output.folding import Folder

    return Folder(instance for instance in range(plan.num_instances) if _is_shown(plan, instance))


def _is_shown(plan: LaunchPlan, instance: int) -> bool:
    instances = plan.output.shown_instances
    return not plan.output.has_monitor and (instances is None or instance in instances)


class Tails:
    """The last output lines of each instance, for error messages; if ``keeps_all``, also for the job's report."""

    def __init__(self, *, keeps_all: bool) -> None:
        self._errors: dict[int, deque[bytes]] = {}
        self._hidden: dict[int, deque[bytes]] = {}
        self._all: dict[int, deque[bytes]] | None = {} if keeps_all else None

    def add(self, source: Source, lines: bytes) -> None:
        """Remember the last of ``lines``, which came from the stream ``source``; drop older remembered lines."""
        if source.target == _STDERR and lines:
            _add_lines(self._errors.setdefault(source.instance, deque(maxlen=_TAIL_LINES)), lines)
        elif not source.is_shown and lines:
            _add_lines(self._hidden.setdefault(source.instance, deque(maxlen=_LAST_LINES)), lines)
        if self._all is not None and lines:
            _add_lines(self._all.setdefault(source.instance, deque(maxlen=_LAST_LINES)), lines)

    def of_failure(self, instance: int) -> list[str]:
        """Return the last lines of an instance's stderr, or else of its hidden stdout, to explain its failure."""
        return _decode(self._errors.get(instance) or self._hidden.get(instance) or ())

    def of_all(self, instance: int) -> list[str]:
        """Return the last lines of an instance's stdout and stderr; [] unless the job's report needs lines."""
        return _decode((self._all or {}).get(instance, ()))


class Relay:
    """The thread that reads the output of all programs until each pipe ends, and logs and shows the output."""

    def __init__(
        self,
        plan: LaunchPlan,
        pipes: Iterable[tuple[int, int, int]],  # each with a descriptor, the instance, and 1 or 2 for the stream
        displays: Mapping[int, Display],
        logs: "LogFiles | None",
        *,
        shows_all: bool,
    ) -> None:
        is_alone = plan.num_instances == 1 and not plan.is_tagged
        sources = [
            Source(
                descriptor=descriptor,
                instance=instance,
                target=stream,
                is_shown=_is_shown(plan, instance),
                is_raw=is_alone and _is_shown(plan, instance),
            )
            for descriptor, instance, stream in pipes
        ]
        self._displays = displays
        self._logs = logs
        self._shows_all = shows_all  # whether all calls of a traceback are shown
        self._is_interrupted = False
        self._tracebacks: TracebackFilter | None = None
        self._splitters = {source: LineSplitter() for source in sources}
        self.tails = Tails(keeps_all=plan.has_curves)
        self._selector = selectors.DefaultSelector()
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector.register(self._stop_reader, selectors.EVENT_READ, None)
        for source in self._splitters:
            self._selector.register(source.descriptor, selectors.EVENT_READ, source)
        self._thread = threading.Thread(target=self._run, name="poprun-relay", daemon=True)

    def start(self) -> None:
        """Start the thread that reads the programs' output. Raises OSError if no more threads are possible."""
        start_thread(self._thread)

    def finish(self, timeout_seconds: float) -> None:
        """Read the rest of the programs' output and stop the thread; give up after ``timeout_seconds``."""
        os.close(self._stop_writer)  # closing the pipe wakes the thread
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._stop_reader)

    def leave_out_interrupts(self) -> None:
        """Hide tracebacks of KeyboardInterrupt from now on, because the user has pressed Ctrl-C."""
        self._is_interrupted = True

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The ascending indices of the instances whose tracebacks of KeyboardInterrupt were hidden."""
        return () if self._tracebacks is None else self._tracebacks.interrupted

    def _run(self) -> None:
        self._read_all()
        for source in tuple(self._splitters):  # pipes that a foreign process still keeps open
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
                elif data := _read(key.data):
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
        self.tails.add(source, lines)
        if source.is_raw:
            self._displays[source.target].pass_on(data)
        elif source.is_shown:
            self._displays[source.target].show(source.instance, self._sifted(source, lines), splitter.step)

    def _end(self, source: Source) -> None:
        """Show the last line of an output stream that has ended, and close the stream's descriptor."""
        lines = self._splitters.pop(source).finish()
        self.tails.add(source, lines)
        if source.is_shown and not source.is_raw:
            lines = self._sifted(source, lines)
            if self._tracebacks is not None and source.target == _STDERR:
                lines += self._tracebacks.finish(source.instance)
            self._displays[source.target].show(source.instance, lines, b"")
            self._displays[source.target].end(source.instance)
        os.close(source.descriptor)

    def _sifted(self, source: Source, lines: bytes) -> bytes:
        has_begun = self._tracebacks is not None or self._is_interrupted or _HEADER in lines
        if source.target != _STDERR or not has_begun:
            return lines
        if self._tracebacks is None:
            from poprun.job.output.tracebacks import TracebackFilter

            self._tracebacks = TracebackFilter(shows_all=self._shows_all)
        return self._tracebacks.feed(source.instance, lines, leaves_out_interrupts=self._is_interrupted)


def _add_lines(tail: deque[bytes], lines: bytes) -> None:
    for line in lines.splitlines(keepends=True)[-_TAIL_LINES:]:
        if tail and tail[-1].endswith(b"\r"):  # a step of a progress bar is replaced by the next line
            tail.pop()
        is_long = len(line) > _TAIL_LINE_BYTES
        tail.append(line[: _TAIL_LINE_BYTES // 2] + b" ... " + line[-_TAIL_LINE_BYTES // 2 :] if is_long else line)


def _decode(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace").rstrip("\r\n") for line in tuple(lines)]


def _read(source: Source) -> bytes:
    """Return the next bytes of a program's output; b"" at the end of the stream, or after a logged read error."""
    try:
        return os.read(source.descriptor, _READ_BYTES)
    except OSError as error:
        stream_name = f"the {_NAMES[source.target]} of instance {source.instance}"
        log(f"warning: {stream_name} was cut off, and lines may be missing: {error.strerror}")
        return b""
