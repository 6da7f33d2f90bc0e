"""The last words of a program: those lines of its standard error that explain best why it ended. Pure.

The last words are the last traceback. torch.distributed puts the rank before each line. The traceback of a
DataLoader worker is inside the message of another exception. Boxes that rich draws are not parsed.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from popdist.ground import contract
from poprun.makers.failures import AT_FAULT, SAID_OF_ALL, find_assertion
from poprun.text.screen import without_codes

MAX_EXCERPT_LINES: Final = 9
_MAX_LINE: Final = 200
_KEPT_END: Final = 50
_MAX_MESSAGE_LINES: Final = 4
_MAX_LINES_AFTER: Final = 30

_PLAIN_HEADER: Final = "Traceback (most recent call last):"
_HEADER: Final = re.compile(r"(?:Original )?Traceback \(most recent call last\):$")
_DRAWN: Final = re.compile(r"╭─+ Traceback ")
_GROUP: Final = "+ Exception Group Traceback (most recent call last):"
_IN_GROUP: Final = "  | "
_NESTED: Final = re.compile(r" {4,}\| (?!Traceback |Exception Group )(\S.*)")
_BOX: Final = re.compile(r" {2,}(?:\||\+[-+])")
_LINK: Final = re.compile(r"(?:During handling of the above|The above exception was the direct cause)")
_ORIGIN: Final = re.compile(
    r"Exception in thread |Process \S+:$|Exception ignored |-- Process \d+ terminated|--- Logging error ---"
)
_FATAL: Final = "Fatal Python error: "
_FATAL_THREAD: Final = re.compile(r"Current thread .*\(most recent call first\):$")
_SYNTAX_ERROR: Final = re.compile(r'  File "[^"]*", line \d+$')
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+)')
_EXCEPTION: Final = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
LIBRARY: Final = re.compile(r"/site-packages/|/dist-packages/|/lib/python3|<frozen ")
_OURS: Final = os.path.dirname(os.path.dirname(contract.__file__)) + os.sep
_RANK: Final = re.compile(r"\[rank(\d+)\]: ?")

NOISE: Final = re.compile(
    r"(?:\[rank\d+\]:)?\[[IWEF]\d* ?.*\.(?:cpp|cc|cu|h):\d+\]"  # torch's own logger
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d"  # glog and torchrun
    r"|.*\b\w*Warning: |  warnings\.warn\(|.*resource_tracker"
    r"|terminate called |  what\(\): |Exception raised from .* first\):|frame #\d+: |\[\S+:\d+\] \[ ?\d+\] "
    r"|Extension modules: "
)
"""A pattern for lines that the runtime prints after a program's own error, and for frames of C and C++."""

_PROGRESS: Final = re.compile(r"[\d\s.,:%|?█▏▎▍▌▋▊▉]+")
_ABORT: Final = re.compile(r"terminate called |.*Assertion .* failed")

_IGNORED: Final = ("Exception ignored ", "--- Logging error ---")
_THREAD_OR_CHILD: Final = ("Exception in thread ", "Process ")
_LAUNCHERS_ERRORS: Final = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    "subprocess.CalledProcessError",
    "RuntimeError: DataLoader worker (pid",
)
"""Exceptions that only report the failure of another process. The other process has printed the reason."""

_ROOT_CAUSE: Final = "Root Cause (first observed failure):"
_ROOT_RANK: Final = re.compile(r"\s+rank\s+: (\d+)")
_ROOT_FACTS: Final = re.compile(r"\s+(?:host|rank|exitcode)\s+: ")

WHOLE: Final = re.compile(r"(?:\[rank\d+\]: )?pop(?:dist|torch)\.[\w.]*: ")
"""A pattern for exceptions of popdist and poptorch, whose messages poprun never cuts, because they say what to do.
"""

_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")

Frame = tuple[str, ...]
"""The printed lines of one call in a traceback: the file, and the line of code if Python printed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """The lines of a program's output that explain its end; empty if the program wrote nothing."""

    summary: str = ""  # the line of the exception, otherwise the last line
    place: str = ""  # the user's line that is nearest to the exception, as ``file:line``
    lines: tuple[str, ...] = ()  # the excerpt, of at most ``MAX_EXCERPT_LINES``


@dataclass(frozen=True, slots=True, kw_only=True)
class Traceback:
    """A traceback in a program's output: its calls in the printed order, and the exception's message."""

    at: int  # the number of the exception's line
    header: str
    frames: tuple[Frame, ...]
    message: tuple[str, ...]
    origin: str = ""  # the thread or process that raised the exception, if it is not the main thread
    link: str = ""  # Python's line between the traceback before and this traceback
    rank: int | None = None  # the rank that torch.distributed printed before the lines

    @property
    def root_cause(self) -> tuple[str, ...]:
        """The lines of torchrun's message about the process that failed first; () if there are none."""
        return self.message[self.message.index(_ROOT_CAUSE) :] if _ROOT_CAUSE in self.message else ()

    @property
    def is_a_launchers(self) -> bool:
        """Whether a launcher such as torchrun raised the exception, only to report another process's failure."""
        return bool(self.message) and self.message[0].startswith(_LAUNCHERS_ERRORS)


def last_words(tail: Sequence[str]) -> LastWords:
    """Return the lines of a program's last output that explain its end: a traceback, or the last lines."""
    lines = [_shorten(without_codes(line).expandtabs(4).rstrip()) for line in tail]
    lines = _open_groups(lines) if any(_GROUP in line for line in lines) else lines
    tracebacks = _find_tracebacks(lines)
    chosen = _choose(tracebacks, lines)
    if chosen is None:
        excerpt = _last_lines(lines)
        return LastWords(summary=excerpt[-1].strip() if excerpt else "", lines=tuple(excerpt))
    summary = _first_words(chosen) or chosen.header
    assertion = find_assertion(lines[: chosen.at]) if AT_FAULT.search(summary) else ""
    above = [assertion] if assertion else []
    condensed = _condense(chosen, tracebacks, MAX_EXCERPT_LINES - len(above))
    excerpt = [_shorten(line) for line in [*above, *condensed][:MAX_EXCERPT_LINES]]
    return LastWords(summary=summary, place=_place(chosen.frames), lines=tuple(excerpt))


def _open_groups(lines: Sequence[str]) -> list[str]:
    """Return ``lines`` with exception groups made plain tracebacks; of inner exceptions only the messages stay."""
    opened = []
    for line in lines:
        tag = match[0] if (match := _RANK.match(line)) else ""
        text = line.removeprefix(tag)
        if text.strip() == _GROUP:
            opened.append(tag + _PLAIN_HEADER)
        elif text.startswith(_IN_GROUP):
            opened.append(tag + text.removeprefix(_IN_GROUP))
        elif nested := _NESTED.match(text):
            opened.append(f"{tag}  {nested[1]}")
        elif not _BOX.match(text):
            opened.append(line)
    return opened


def without_numbers(text: str) -> str:
    """Return ``text`` with ``#`` for each number, so that two errors that differ only in numbers are equal."""
    return _NUMBER.sub("#", text)


def is_own_code(call: str) -> bool:
    """Whether ``call``, a line of a traceback, is about the user's code, and not about a library."""
    return not LIBRARY.search(call) and _OURS not in call


def _place(frames: Sequence[Frame]) -> str:
    """Return the last call in the user's code, or else the last call, as ``file:line``; "" if there is no call."""
    own_frames = [frame for frame in frames if is_own_code(frame[0])] or frames
    match = _FRAME.match(own_frames[-1][0]) if own_frames else None
    return f"{match[1]}:{match[2]}" if match else ""


def _find_tracebacks(lines: Sequence[str]) -> list[Traceback]:
    """Return all tracebacks in the output ``lines`` of a program, ordered by the exception's line."""
    streams: dict[int | None, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        tag = _RANK.match(line)
        rank, text = (int(tag[1]), line[tag.end() :]) if tag else (None, line)
        streams.setdefault(rank, []).append((number, text))
    tracebacks = []
    for rank, numbered in streams.items():
        texts = [text for _, text in numbered]
        tracebacks += [replace(traceback, at=numbered[traceback.at][0], rank=rank) for traceback in _parse(texts)]
    return sorted(tracebacks, key=lambda traceback: traceback.at)


def _parse(lines: Sequence[str]) -> list[Traceback]:
    """Return the tracebacks in one process's output, each with the thread or DataLoader worker that raised it."""
    tracebacks: list[Traceback] = []
    start = number = 0
    while number < len(lines):
        traceback = _read_at(lines, number)
        if traceback is None:
            number += 1
            continue
        above = lines[start:number]
        link = next((line for line in above if tracebacks and _LINK.match(line)), "")
        origin = next((line.strip() for line in reversed(above[-2:]) if _ORIGIN.match(line)), "")
        # the exception around the traceback of a loader's worker names the worker
        if lines[number].startswith("Original") and tracebacks:
            origin = "".join(tracebacks[-1].message[:1])
        tracebacks.append(replace(traceback, link=link, origin=origin))
        start = number = traceback.at + 1
    return tracebacks


def _read_at(lines: Sequence[str], number: int) -> Traceback | None:
    """Return the traceback that begins at the line ``number`` of ``lines``; None if no traceback begins there."""
    is_syntax_error = bool(_SYNTAX_ERROR.match(lines[number]))
    if lines[number].startswith(_FATAL):
        return _read_crash(lines, number)
    if not is_syntax_error and not _HEADER.match(lines[number]):
        return None
    start = end = number if is_syntax_error else number + 1
    while end < len(lines) and (lines[end].startswith("  ") or (end > start and not lines[end])):
        end += 1  # Python marks some calls with a line of blanks
    message = _message(lines, end)
    if is_syntax_error and not (message and _EXCEPTION.match(message[0])):
        return None
    return Traceback(
        at=min(end, len(lines) - 1),
        header="" if is_syntax_error else _PLAIN_HEADER,
        frames=_frames([line for line in lines[start:end] if line]),
        message=message,
    )


def _read_crash(lines: Sequence[str], number: int) -> Traceback | None:
    """Return the stack that Python's faulthandler printed after a crash, as a traceback; None if it is missing."""
    start = next((at + 1 for at in range(number, len(lines)) if _FATAL_THREAD.match(lines[at])), None)
    if start is None:
        return None
    end = start
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    frames = _frames(lines[start:end])[::-1]
    return Traceback(at=end - 1, header=_PLAIN_HEADER, frames=frames, message=(lines[number],))


def _frames(body: Sequence[str]) -> tuple[Frame, ...]:
    """Return the calls in a traceback's lines ``body``, each with the first line of its code."""
    calls: list[list[str]] = []
    for line in body:
        if line.startswith("  File ") or not calls:
            calls.append([line])
        elif len(calls[-1]) < (3 if _SYNTAX_ERROR.match(calls[-1][0]) else 2) or line.startswith("  [Previous"):
            calls[-1].append(line)
    return tuple(map(tuple, calls))


def _message(lines: Sequence[str], start: int) -> tuple[str, ...]:
    """Return the lines of an exception's message, from the line ``start`` until a line of other output."""
    end = start + 1
    while end < len(lines) and not _is_other(lines[end]):
        end += 1
    message = [line for line in lines[start:end] if not SAID_OF_ALL.match(line)]
    while message and not message[-1].strip():
        message.pop()
    return tuple(message)


def _is_other(line: str) -> bool:
    patterns = (_HEADER, _DRAWN, _LINK, _ORIGIN, NOISE)
    return line in ('"""', "'''") or line.startswith(_FATAL) or any(pattern.match(line) for pattern in patterns)


def _choose(tracebacks: Sequence[Traceback], lines: Sequence[str]) -> Traceback | None:
    """Return the traceback that explains the program's end best; None if the last lines explain it better."""
    candidates = [traceback for traceback in tracebacks if not traceback.origin.startswith(_IGNORED)]
    if not candidates:
        return None
    # the traceback of a thread or a child process counts only if there is no other traceback
    last = max(candidates, key=lambda traceback: (not traceback.origin.startswith(_THREAD_OR_CHILD), traceback.at))
    after = [line for line in lines[last.at + 1 :] if line and not NOISE.match(line)]
    if any(map(_DRAWN.match, after)):
        return None
    if not last.is_a_launchers:  # a program that printed many lines after the traceback has survived the exception
        return None if len(after) > _MAX_LINES_AFTER else last
    earlier = [traceback for traceback in candidates if traceback.at < last.at and not traceback.is_a_launchers]
    rank = next((int(match[1]) for match in map(_ROOT_RANK.match, last.root_cause) if match), None)
    of_rank = [traceback for traceback in earlier if rank is not None and traceback.rank == rank]
    if of_rank or not earlier:
        return of_rank[-1] if of_rank else last
    return earlier[0] if last.root_cause else earlier[-1]


def _condense(traceback: Traceback, tracebacks: Sequence[Traceback], max_lines: int) -> list[str]:
    """Return a traceback in at most ``max_lines``: the exception that led to it, its calls and its message."""
    same = [other for other in tracebacks if other.rank == traceback.rank]
    first = at = same.index(traceback)
    while first > 0 and same[first].link:
        first -= 1
    head = [traceback.origin] if traceback.origin else []
    if first < at:
        between = at - first - 1
        head += [_summary(same[first]), f"… {between} more …" if between else traceback.link]
    header = [traceback.header] if traceback.header else []
    message = _condense_message(traceback)
    num_others = len(head) + len(header) + len(message)
    frames = _condense_frames(traceback.frames, max_lines - num_others)
    return [*head, *(header if frames else ()), *frames, *message]


def _summary(traceback: Traceback) -> str:
    """Return one line about a traceback: its exception, and the last call in the user's code, if any."""
    words = _first_words(traceback) or traceback.header
    own_frames = [frame for frame in traceback.frames if is_own_code(frame[0])]
    return f"{words} ({own_frames[-1][0].strip()})" if own_frames else words


def _first_words(traceback: Traceback) -> str:
    """Return the first line of an exception's message; if this line ends with a colon, also the next line."""
    lines = [line.strip() for line in traceback.message if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def _condense_message(traceback: Traceback) -> list[str]:
    if traceback.is_a_launchers and traceback.root_cause:
        return [traceback.message[0], *filter(_ROOT_FACTS.match, traceback.root_cause)]
    lines = [line for line in traceback.message if line.strip() and not NOISE.match(line)]
    lines = lines or list(traceback.message[:1])
    if len(lines) <= _MAX_MESSAGE_LINES or WHOLE.match(lines[0]):
        return lines
    kept = lines[: _MAX_MESSAGE_LINES - 1]
    return [*kept, f"… {len(lines) - len(kept)} more lines"]


def _condense_frames(frames: Sequence[Frame], max_lines: int) -> list[str]:
    """Return the lines of all calls in a traceback; if ``max_lines`` are too few, the user's last calls first."""
    every = range(len(frames))
    own_numbers = [number for number in every if is_own_code(frames[number][0])] or list(every)
    kept: set[int] = set(every)
    if len(_render_frames(frames, kept)) > max_lines:
        kept = set()
        last = own_numbers if _OURS in frames[-1][0] else every  # popdist's message says more than its line
        for number in (own_numbers[-1], last[-1], *reversed(own_numbers)):
            if len(_render_frames(frames, kept | {number})) <= max_lines:
                kept.add(number)
    return _render_frames(frames, kept) if kept else []


def _render_frames(frames: Sequence[Frame], kept: set[int]) -> list[str]:
    lines: list[str] = []
    num_left_out = 0
    for number, frame in enumerate(frames):
        if number not in kept:
            num_left_out += 1
            continue
        lines += [*_left_out(num_left_out), *frame]
        num_left_out = 0
    return lines + _left_out(num_left_out)


def _left_out(num_calls: int) -> list[str]:
    return [f"  … {num_calls} more call{'s' if num_calls > 1 else ''}"] if num_calls else []


def _last_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines, or the abort message, of output without traceback; of a progress bar one line."""
    aborts = [number for number, line in enumerate(lines) if _ABORT.match(line)]
    kept: list[str] = []
    for line in lines[aborts[-1] :] if aborts else lines:
        if not line or (NOISE.match(line) and not _ABORT.match(line) and "what():" not in line):
            continue
        if kept and _PROGRESS.sub("#", kept[-1]) == _PROGRESS.sub("#", line):
            kept.pop()
        kept.append(line)
    kept = kept or [line for line in lines if line]
    return kept[:MAX_EXCERPT_LINES] if aborts else kept[-MAX_EXCERPT_LINES:]


def _shorten(line: str) -> str:
    """Return ``line``; if it is too long to read, only both its ends. Lines of popdist's errors stay whole."""
    if len(line) <= _MAX_LINE or WHOLE.match(line):
        return line
    return f"{line[: _MAX_LINE - _KEPT_END - 3]} … {line[-_KEPT_END:]}"
