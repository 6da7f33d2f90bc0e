"""Take the tracebacks of Ctrl-C out of what programs write: each program prints one, and none tells anything.

Pure. A traceback is held back until its last line says whether it is one of KeyboardInterrupt; logs keep them all.
"""

import re
from typing import Final

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
