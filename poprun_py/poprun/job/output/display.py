"""Where lines are shown: one of poprun's own streams, or a terminal that two of them share."""

import errno
import os
import select
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from poprun.job.output.lines import Tags, tagged
from poprun.text.screen import Level, say

if TYPE_CHECKING:
    from poprun.job.output.bars import BottomRow
    from poprun.job.output.folding import Folded, Folder


class Outlet:
    """One of poprun's own streams, written to until nobody reads it any more.

    A reader that does not read blocks the caller.

    Args:
        descriptor: Where to write.
        on_closed: Called once when the reader has gone, or the disk is full, which is said.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._is_closed = False

    def write(self, data: bytes) -> None:
        """Write all of ``data``."""
        view = memoryview(data)
        while view and not self._is_closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # somebody made the terminal non-blocking
                select.select((), (self._descriptor,), ())
            except OSError as error:
                self._is_closed = True
                if error.errno != errno.EPIPE:
                    say(f"the output cannot be written: {error.strerror}", Level.ERROR)
                self._on_closed()


class Display:
    """Shows the lines of all instances on one stream.

    Args:
        stream: The stream's name, ``stdout`` or ``stderr``.
        outlet: Where to write.
        tags: What stands before each line.
        row: The terminal's bottom row when the outlet is a terminal.
        folder: What folds the lines if they are to be folded.
    """

    def __init__(
        self, stream: str, outlet: Outlet, tags: Tags, row: "BottomRow | None", folder: "Folder | None"
    ) -> None:
        self._stream = stream
        self._outlet = outlet
        self._tags = tags
        self._row = row
        self._folder = folder

    def pass_on(self, data: bytes) -> None:
        """Write ``data`` as it is."""
        self._outlet.write(data)

    def show(self, instance: int, lines: bytes, step: bytes) -> None:
        """Show what ``instance`` wrote: whole lines, and what has come of a progress bar's next step."""
        if self._folder is not None:
            self._write_folded(_fold(self._folder, instance, lines))
            lines = b""
        self._write((instance,), lines, step)

    def show_due(self) -> None:
        """Show the lines that have waited long enough for others to print them, too."""
        if self._folder is not None:
            self._write_folded(self._folder.due(time.monotonic()))

    def end(self, instance: int) -> None:
        """Note that ``instance`` writes no more."""
        if self._folder is not None:
            self._write_folded(self._folder.end(instance))
        if self._row is not None:
            self._outlet.write(self._row.leave(self._stream, instance))

    @property
    def due_in_seconds(self) -> float | None:
        """When :meth:`show_due` has something to show; None if no line waits."""
        due_at_seconds = None if self._folder is None else self._folder.due_at_seconds
        return None if due_at_seconds is None else max(0.0, due_at_seconds - time.monotonic())

    def _write_folded(self, folded: "Iterable[Folded]") -> None:
        for instances, some in groupby(folded, attrgetter("instances")):
            self._write(instances, b"".join(one.line for one in some), b"")

    def _write(self, instances: tuple[int, ...], lines: bytes, step: bytes) -> None:
        tag = self._tags.of(instances)
        if self._row is None:
            self._outlet.write(tagged(tag, lines))
        else:
            self._outlet.write(self._row.render(self._stream, instances, tag, lines, step))


def _fold(folder: "Folder", instance: int, lines: bytes) -> "list[Folded]":
    """What is to be shown now that ``instance`` wrote ``lines``; steps of bars are not held back."""
    from poprun.job.output.folding import Folded  # noqa: PLC0415 - there is a folder, so it is loaded

    now_seconds = time.monotonic()
    shown: list[Folded] = []
    for line in lines.splitlines(keepends=True):
        if line.endswith(b"\n"):
            shown += folder.add(instance, line, now_seconds)
        else:
            shown += [*folder.flush(instance), Folded((instance,), line)]
    return shown
