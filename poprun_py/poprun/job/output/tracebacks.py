"""Tracebacks of the programs as poprun shows them: short, and only once if several instances print the same. Pure.

Several calls of libraries become one line, and the user's own calls stay complete. Log files and the last lines
that poprun remembers contain every line; ``poprun -v`` shows every line as well.
"""

import re
from typing import Final, NamedTuple

from poprun.observe.account.last_words import LIBRARY, WHOLE, is_own_code, without_numbers

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
_SCRIPT: Final = b"/bin/"  # the folder in which pip puts commands of installed programs
_FOLDED: Final = "  … ".encode()
_PACKAGE: Final = re.compile(r"/(?:site|dist)-packages/(\w+)")


_MOST_REPEATED: Final = 100
"""The number of characters of a message that are shown again if another instance has printed the whole message."""


class _Printed(NamedTuple):
    """A traceback that has been shown, with the index of the instance that was the first to print it."""

    instance: int
    error: bytes  # the line that names the exception
    is_ours: bool  # whether popdist has raised the exception, which ends most programs
    message: list[bytes]  # popdist's lines after the line that names the exception


class _After(NamedTuple):
    """The last traceback that an instance printed, and whether it repeats another instance's traceback."""

    printed: _Printed
    is_repeat: bool
    withheld: list[bytes]  # lines of a repeat that equal the first traceback's lines until now


class TracebackFilter:
    """A filter of all instances' stderr that shortens tracebacks and hides repeated ones, unless ``shows_all``."""

    def __init__(self, *, shows_all: bool) -> None:
        self._shows_all = shows_all
        self._leaves_out_interrupts = False
        self._unfinished: dict[int, list[bytes]] = {}
        self._interrupted: set[int] = set()
        self._printed: dict[str, _Printed] = {}
        self._after: dict[int, _After] = {}  # by instance, if its last lines belong to a traceback

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The ascending indices of the instances whose tracebacks of KeyboardInterrupt were hidden."""
        return tuple(sorted(self._interrupted))

    def feed(self, instance: int, lines: bytes, *, leaves_out_interrupts: bool) -> bytes:
        """Return the lines to show after ``instance`` wrote ``lines``; keep an unfinished traceback for later.

        After Ctrl-C ``leaves_out_interrupts`` is True: tracebacks of KeyboardInterrupt are not shown.
        """
        self._leaves_out_interrupts = leaves_out_interrupts
        if self._shows_all and not leaves_out_interrupts:
            return lines
        return b"".join(self._sift(instance, line) for line in lines.splitlines(keepends=True))

    def finish(self, instance: int) -> bytes:
        """Return the unfinished traceback of ``instance``, which prints no more; b"" if there is none."""
        self._after.pop(instance, None)
        return self._release(instance)

    def _release(self, instance: int) -> bytes:
        after = self._after.pop(instance, None)
        return b"".join([*(after.withheld if after else ()), *self._unfinished.pop(instance, ())])

    def _sift(self, instance: int, line: bytes) -> bytes:
        traceback = self._unfinished.get(instance, [])
        text = _DECORATION.sub(b"", line).rstrip()
        is_first = text == _HEADER or _ORIGIN.match(text) is not None
        is_call = text.startswith(b"  ") or not text  # Python marks some calls with a line of blanks
        is_next = bool(traceback) and (is_call or (text == _HEADER and len(traceback) == 1))
        if is_next and len(traceback) < MAX_HELD_LINES:
            traceback.append(line)
            return b""
        if traceback and not is_first and len(traceback) < MAX_HELD_LINES:
            return self._end_traceback(instance, self._unfinished.pop(instance), line)
        if is_first or traceback:
            released = self._release(instance)
            self._unfinished |= {instance: [line]} if is_first else {}
            return released if is_first else released + line
        return self._after_traceback(instance, line, text)

    def _end_traceback(self, instance: int, traceback: list[bytes], line: bytes) -> bytes:
        """Return the lines to show of a finished traceback, whose last line ``line`` names the exception."""
        if self._leaves_out_interrupts and _INTERRUPT.match(_DECORATION.sub(b"", line)):
            self._interrupted.add(instance)
            return b""
        if self._shows_all or not any(_HEADER in one for one in traceback):
            return b"".join(traceback) + line
        folded = [_RANK.sub(b"", one) for one in (*_fold(traceback), line)]
        own_calls = b"".join(one for one in folded if not one.startswith(_FOLDED))
        key, error = without_numbers(own_calls.decode(errors="replace")), folded[-1].decode(errors="replace")
        printed = self._printed.setdefault(key, _Printed(instance, folded[-1], WHOLE.match(error) is not None, []))
        if len(self._printed) > _NUM_REMEMBERED:
            del self._printed[next(iter(self._printed))]
        is_repeat = printed.instance != instance
        if not is_repeat:
            printed.message.clear()
        self._after[instance] = _After(printed, is_repeat, [])
        if is_repeat:
            if printed.error == folded[-1] and len(error) > _MOST_REPEATED:
                error = f"{error[:_MOST_REPEATED]}…\n"
            return f"same traceback as instance {printed.instance}: {error}".encode()
        return b"".join(folded)

    def _after_traceback(self, instance: int, line: bytes, text: bytes) -> bytes:
        """Return ``line``, which follows a traceback; b"" if it repeats the message of an earlier traceback.

        Empty lines around a link between two tracebacks are left out. Withheld lines are shown as soon as a
        different line follows. Only a link or the end of a program shows that the lines were the message and no
        later output.
        """
        after = self._after.get(instance)
        if after is None:
            return line
        message, withheld = after.printed.message, after.withheld
        if _LINK.match(text):
            withheld.clear()
            return b"" if after.is_repeat else line
        if not text and not (withheld if after.is_repeat else message):
            return b""
        place = sum(bool(one.strip()) for one in withheld)  # empty lines are not compared
        if after.is_repeat and (not text or message[place : place + 1] == [text]):
            withheld.append(line)
            return b""
        if not after.is_repeat and after.printed.is_ours and len(message) < _MOST_MESSAGE_LINES:
            message += [text] if text else []
            return line
        return self._release(instance) + line


def _fold(traceback: list[bytes]) -> list[bytes]:
    """Return a traceback with each series of library calls as one line, and the user's own calls unchanged."""
    calls: list[list[bytes]] = [[]]  # the first item contains the lines above the calls
    for line in traceback:
        if _CALL in line:
            calls.append([])
        calls[-1].append(line)
    packages = [_package(call[0].decode(errors="replace")) for call in calls[1:]]
    programs = next((it for it in packages if it not in ("", "Python")), "")  # the package of an installed program
    if all(package or _SCRIPT in call[0] for package, call in zip(packages, calls[1:], strict=True)):
        packages = ["" if it == programs else it for it in packages]
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
    """Return the name of the library that contains ``call``; an empty text if the call is the user's own code."""
    if is_own_code(call):
        return ""
    match = _PACKAGE.search(call)
    return match[1] if match else "Python" if LIBRARY.search(call) else "popdist"
