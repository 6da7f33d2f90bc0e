"""The tracebacks that programs print, as poprun shows them: short, and once where instances print the same. Pure.

Calls of libraries become a line, and the user's own calls stay whole. Log files and the last lines that poprun
remembers keep every line; ``poprun -v`` shows every line, too.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from poprun.job.report.last_words import LIBRARY, is_own_code, without_numbers

MAX_HELD_LINES: Final = 500
_NUM_REMEMBERED: Final = 64
_MOST_MESSAGE_LINES: Final = 20
_DECORATION: Final = re.compile(rb"\x1b\[[0-9;]*m|^\[rank\d+\]: ?")
_HEADER: Final = b"Traceback (most recent call last):"
_INTERRUPT: Final = re.compile(rb"KeyboardInterrupt\b")
_ORIGIN: Final = re.compile(rb"Process \S+:$|Exception ignored ")
_LINK: Final = re.compile(rb"During handling of the above exception|The above exception was the direct cause")
_RANK: Final = re.compile(rb"^\[rank\d+\]: ?")
_CALL: Final = b'  File "'
_FOLDED: Final = "  … ".encode()
_PACKAGE: Final = re.compile(r"/(?:site|dist)-packages/(\w+)")


class _Printed(NamedTuple):
    """A traceback as it was printed first."""

    instance: int
    message: list[bytes]  # the lines behind the one that names the exception, without empty ones


class _After(NamedTuple):
    """What follows a traceback that an instance has printed."""

    printed: _Printed
    repeated: Iterator[bytes] | None  # the lines that are expected where the traceback is a repeat


class TracebackFilter:
    """The filter of all standard errors of a job, which shortens tracebacks unless ``shows_all``."""

    def __init__(self, *, shows_all: bool) -> None:
        self._shows_all = shows_all
        self._leaves_out_interrupts = False
        self._held: dict[int, list[bytes]] = {}
        self._interrupted: set[int] = set()
        self._printed: dict[str, _Printed] = {}
        self._after: dict[int, _After] = {}  # by instance, where its last lines belong to a traceback

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The instances whose tracebacks of KeyboardInterrupt were left out, ascending."""
        return tuple(sorted(self._interrupted))

    def feed(self, instance: int, lines: bytes, *, leaves_out_interrupts: bool) -> bytes:
        """Return the lines to show after ``instance`` wrote ``lines``; the beginning of a traceback is held back.

        After Ctrl-C ``leaves_out_interrupts`` is True: tracebacks of KeyboardInterrupt are not shown.
        """
        self._leaves_out_interrupts = leaves_out_interrupts
        if self._shows_all and not leaves_out_interrupts:
            return lines
        return b"".join(self._sift(instance, line) for line in lines.splitlines(keepends=True))

    def finish(self, instance: int) -> bytes:
        """Return the lines that were held back, because ``instance`` writes no more."""
        return b"".join(self._held.pop(instance, ()))

    def _sift(self, instance: int, line: bytes) -> bytes:
        held = self._held.get(instance, [])
        text = _DECORATION.sub(b"", line).rstrip()
        is_first = text == _HEADER or _ORIGIN.match(text) is not None
        is_call = text.startswith(b"  ") or not text  # Python marks some calls with a line of blanks
        is_next = bool(held) and (is_call or (text == _HEADER and len(held) == 1))
        if is_next and len(held) < MAX_HELD_LINES:
            held.append(line)
            return b""
        if held and not is_first and len(held) < MAX_HELD_LINES:
            return self._end_traceback(instance, self._held.pop(instance), line)
        released = self.finish(instance)
        if is_first:
            self._held[instance] = [line]
            return released
        return released + self._after_traceback(instance, line, text)

    def _end_traceback(self, instance: int, held: list[bytes], line: bytes) -> bytes:
        """Return what is shown of the traceback ``held``, whose exception ``line`` names."""
        if self._leaves_out_interrupts and _INTERRUPT.match(_DECORATION.sub(b"", line)):
            self._interrupted.add(instance)
            return b""
        if self._shows_all or not any(_HEADER in one for one in held):
            return b"".join(held) + line
        folded = [_RANK.sub(b"", one) for one in (*_fold(held), line)]
        own_calls = b"".join(one for one in folded if not one.startswith(_FOLDED))
        key = without_numbers(own_calls.decode(errors="replace"))
        printed = self._printed.setdefault(key, _Printed(instance, []))
        if len(self._printed) > _NUM_REMEMBERED:
            del self._printed[next(iter(self._printed))]
        is_repeat = printed.instance != instance
        if not is_repeat:
            printed.message.clear()
        self._after[instance] = _After(printed, iter(tuple(printed.message)) if is_repeat else None)
        if is_repeat:
            return f"same traceback as instance {printed.instance}: ".encode() + folded[-1]
        return b"".join(folded)

    def _after_traceback(self, instance: int, line: bytes, text: bytes) -> bytes:
        """Return ``line``, without the further lines of a repeated message, and empty lines around a link."""
        after = self._after.get(instance)
        if after is None:
            return line
        is_link = _LINK.match(text) is not None
        if after.repeated is not None:
            if is_link or not text or text == next(after.repeated, None):
                return b""
        elif len(after.printed.message) < _MOST_MESSAGE_LINES:
            is_left_out = not text and not after.printed.message
            if text and not is_link:
                after.printed.message.append(text)
            return b"" if is_left_out else line
        del self._after[instance]
        return line


def _fold(held: list[bytes]) -> list[bytes]:
    """Return the lines of a traceback with one line for calls of libraries in a row; the only calls stay."""
    calls: list[list[bytes]] = [[]]  # first what stands above the calls
    for line in held:
        if _CALL in line:
            calls.append([])
        calls[-1].append(line)
    packages = [_package(call[0].decode(errors="replace")) for call in calls[1:]]
    if packages and all(packages):
        packages[-1] = ""
    shown = list(calls[0])
    run: list[str] = []
    for call, package in zip([*calls[1:], []], [*packages, ""], strict=True):
        if package:
            run.append(package)
            continue
        if run:
            names = " and ".join(dict.fromkeys(run))
            shown.append(_FOLDED + f"{len(run)} call{'s' if len(run) > 1 else ''} of {names}\n".encode())
            run = []
        shown += call
    return shown


def _package(call: str) -> str:
    """Return the name of the library that a call stands in; empty for the user's own code."""
    if is_own_code(call):
        return ""
    found = _PACKAGE.search(call)
    return found[1] if found else "Python" if LIBRARY.search(call) else "popdist"
