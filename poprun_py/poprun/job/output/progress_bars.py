r"""Progress bars on a terminal that several instances share. Pure.

A bar is a row that ends with ``\r``, so that its next step replaces it. The last drawn bar stays the bottom row:
lines of other instances are written in its place, and the bar is drawn again below them. Programs with several
bars move the cursor up; this is allowed until another writer has changed these rows.
"""

import re
from collections.abc import Callable
from typing import Final

from poprun.job.output.lines import tagged

_ERASE_TO_END: Final = b"\x1b[K"
_CURSOR_UP: Final = b"\x1b[A"
_MAX_STEP_BYTES: Final = 4096
_COLOUR_OR_SIGN: Final = re.compile(r"(\x1b\[[0-9;]*m)|.", re.DOTALL)

_Writer = tuple[str, tuple[int, ...]]


class BottomRow:
    """The state of a terminal's last rows, where a progress bar stays below the lines of other instances."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns  # returns the width of the terminal, 0 if unknown
        self._bar = b""
        self._owner: _Writer | None = None
        self._num_used = 0  # rows that are not empty, from the cursor's row downwards
        self._writer: _Writer | None = None
        self._num_above = 0  # rows above the cursor that ``_writer`` wrote last

    def render(self, stream: str, instances: tuple[int, ...], tag: bytes, lines: bytes, step: bytes) -> bytes:
        """Return terminal output that shows ``lines``, and then ``step``, a progress bar's unfinished update."""
        writer = (stream, instances)
        if len(step) > _MAX_STEP_BYTES or _CURSOR_UP in step:
            step = b""  # such a step cannot be written twice
        if b"\r" not in lines and not step and _CURSOR_UP not in lines and self._num_used <= 1:
            return self._render_lines(writer, tagged(tag, lines))
        rows = [*lines.splitlines(keepends=True), *([step + b"\r"] if step else ())]
        last = len(rows) - 1
        return b"".join(
            self._render_row(writer, tag, row)
            for number, row in enumerate(rows)
            if number == last or not row.endswith(b"\r") or _CURSOR_UP in row
        )

    def end_bars(self, stream: str, instance: int) -> bytes:
        """Return line breaks to write after an instance's end, so that no line overwrites its progress bars."""
        if self._owner != (stream, (instance,)):
            return b""
        below = b"\n" * self._num_used
        self._bar, self._owner, self._num_used, self._writer = b"", None, 0, None
        return below

    def _render_row(self, writer: _Writer, tag: bytes, row: bytes) -> bytes:
        if _CURSOR_UP in row:
            num_up = row.count(_CURSOR_UP)
            writes_above = not row.rstrip(b"\r\n").endswith(_CURSOR_UP * num_up)
            num_left = num_up - row.endswith(b"\n")
            if (num_up if writes_above else num_left) <= (self._num_above if self._writer == writer else 0):
                return self._render_move(writer, tag + row, num_left)
            row = row.replace(_CURSOR_UP, b"").rstrip(b"\r\n") + b"\n"  # other writers' rows are there
            if row.isspace():
                return b""
        return (
            self._render_step(writer, tag, row) if row.endswith(b"\r") else self._render_lines(writer, tag + row)
        )

    def _render_move(self, writer: _Writer, text: bytes, num_up: int) -> bytes:
        self._bar, self._owner = b"", writer
        self._num_above -= num_up
        self._num_used = max(1, self._num_used) + num_up
        return _ERASE_TO_END + text

    def _render_lines(self, writer: _Writer, text: bytes) -> bytes:
        if not text:
            return b""
        num_lines = text.count(b"\n")
        self._num_above = num_lines + (self._num_above if self._writer == writer else 0)
        self._writer = writer
        erase = _ERASE_TO_END if self._num_used else b""
        if not self._bar or self._is_owned_by(writer):
            self._bar = b""
            self._num_used = max(0, self._num_used - num_lines)
            self._owner = self._owner if self._num_used else None
        return erase + text + self._bar

    def _render_step(self, writer: _Writer, tag: bytes, row: bytes) -> bytes:
        if row == b"\r" or (row.isspace() and not self._is_owned_by(writer)):
            return b""
        if row.isspace():  # the program has erased the bar
            self._bar, self._num_used = b"", max(0, self._num_used - 1)
            return _ERASE_TO_END
        bar = clip(tag + row[:-1], self._columns()) + b"\r"
        self._bar, self._owner, self._num_used = bar, writer, max(1, self._num_used)
        return _ERASE_TO_END + bar

    def _is_owned_by(self, writer: _Writer) -> bool:
        if self._owner is None:
            return False
        stream, (instance, *_) = self._owner
        return stream == writer[0] and instance in writer[1]


def clip(text: bytes, columns: int) -> bytes:
    """Cut ``text`` to ``columns`` visible characters, with all colour codes; cut nothing if ``columns`` is 0."""
    if not columns or len(text) <= columns:
        return text
    shown, num_signs = [], 0
    for piece in _COLOUR_OR_SIGN.finditer(text.decode(errors="surrogateescape")):
        num_signs += piece[1] is None
        if piece[1] or num_signs <= columns:
            shown.append(piece[0])
    return "".join(shown).encode(errors="surrogateescape")
