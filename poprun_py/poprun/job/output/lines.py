r"""Cut a byte stream into whole lines, and tag them.

Bytes stay bytes: what is not decoded cannot be torn or lost. A line ends with ``\n``, ``\r\n`` or ``\r`` (a step
of a progress bar). Lines travel in blocks, as they were read: whole lines, one after the other.
"""

from typing import Final

MAX_LINE_BYTES: Final = 1024 * 1024
"""A line that grows longer is passed on in parts."""


class LineSplitter:
    """Collects what a stream brings until lines are whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_drawing = False

    def feed(self, data: bytes) -> bytes:
        r"""The lines that ``data`` completes, each with its ending.

        A ``\r`` at the very end waits for the next byte, which may be its ``\n``.
        """
        data = self._rest + data
        after_bar = data.rfind(b"\r", 0, -1) + 1
        end = max(after_bar, data.rfind(b"\n") + 1)
        if len(data) - end > MAX_LINE_BYTES:
            end = len(data)
        self._rest = data[end:]
        if end:
            self._is_drawing = end == after_bar
        return data[:end]

    def finish(self) -> bytes:
        """The last line, which had no ending; it gets one."""
        rest, self._rest = self._rest, b""
        return rest if not rest or rest.endswith(b"\r") else rest + b"\n"

    @property
    def step(self) -> bytes:
        r"""What has come of a progress bar's next step, whose end is not known yet; empty if there is no bar.

        Some programs write ``\r`` before each step, some behind it: either way it would be shown one step late.
        """
        if self._rest.endswith(b"\r"):
            return self._rest[:-1]
        return self._rest if self._is_drawing else b""


def tagged(tag: bytes, lines: bytes) -> bytes:
    """Whole lines, each with ``tag`` before it."""
    if not tag or not lines:
        return lines
    if b"\r" in lines:
        return b"".join(tag + line for line in lines.splitlines(keepends=True))
    return tag + lines[:-1].replace(b"\n", b"\n" + tag) + lines[-1:]
