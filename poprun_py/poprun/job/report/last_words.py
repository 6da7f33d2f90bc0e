"""The last words of a program: of all that it wrote to its standard error, the lines that tell most. Pure.

Python's own form is that of its `traceback` module: a header, indented frames, the exception's line and further
lines of its message. torch.distributed puts the rank before each line, a worker's traceback stands inside the
message of the one that brought it, and a group is drawn as a tree.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

_PLAIN_HEADER: Final = "Traceback (most recent call last):"
_HEADER: Final = re.compile(r"(?:Original )?Traceback \(most recent call last\):$")
_GROUP_HEADER: Final = re.compile(r"\s*\+ Exception Group Traceback \(most recent call last\):$")
_BOX_HEADER: Final = re.compile(r"╭─+ Traceback \(most recent call last\) ─+╮$")
_LINK: Final = re.compile(r"(?:During handling of the above|The above exception was the direct cause)")
_ORIGIN: Final = re.compile(
    r"Exception in thread |Process \S+:$|Exception ignored |-- Process \d+ terminated|--- Logging error ---"
)
_FATAL: Final = "Fatal Python error: "
_FATAL_THREAD: Final = re.compile(r"Current thread .*\(most recent call first\):$")
_SYNTAX_ERROR: Final = re.compile(r'  File "[^"]*", line \d+$')
_EXCEPTION: Final = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
_LIBRARY: Final = re.compile(r"/site-packages/|/dist-packages/|/lib/python3|<frozen ")
_RANK: Final = re.compile(r"\[rank(\d+)\]: ?")
_BRANCH: Final = re.compile(r"\s*(?:\+-)?\+-+(?: \d+ -+)?$")
_BOX_FRAME: Final = re.compile(r"│ (\S.*:\d+ in .*?)\s*│$")
_BOX_CODE: Final = re.compile(r"│ ❱ +\d+ (.*?)\s*│$")

NOISE: Final = re.compile(
    r"(?:\[rank\d+\]:)?\[[IWEF]\d* ?.*\.(?:cpp|cc|cu|h):\d+\]"  # torch's own logger
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d"  # glog and torchrun
    r"|.*\b\w*Warning: |  warnings\.warn\(|.*resource_tracker"
    r"|terminate called |  what\(\): |Exception raised from .* first\):|frame #\d+: |\[\S+:\d+\] \[ ?\d+\] "
    r"|Extension modules: "
)
"""What the runtime's shutdown writes after a program's own last words, and the frames of C and C++."""

MAX_EXCERPT_LINES: Final = 9
_MAX_LINE: Final = 200
_KEPT_END: Final = 50
_MAX_MESSAGE_LINES: Final = 4
_MAX_GROUP_LINES: Final = 6
_MAX_LINES_AFTER: Final = 30
_CODES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
)
_PROGRESS: Final = re.compile(r"[\d\s.,:%|?█▏▎▍▌▋▊▉]+")
_ABORT: Final = re.compile(r"terminate called |.*Assertion .* failed")
_IGNORED: Final = ("Exception ignored ", "--- Logging error ---")
_BESIDE: Final = ("Exception in thread ", "Process ")
_MESSENGERS: Final = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    "subprocess.CalledProcessError",
)
_ROOT_CAUSE: Final = "Root Cause (first observed failure):"
_ROOT_RANK: Final = re.compile(r"\s+rank\s+: (\d+)")
_ROOT_FACTS: Final = re.compile(r"\s+(?:host|rank|exitcode)\s+: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call: the line that names its file, the line of code if there is one.

    Attributes:
        lines: As they were printed.
        is_library: Whether the file belongs to an installed package or to Python itself.
    """

    lines: tuple[str, ...]
    is_library: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traceback:
    """One traceback.

    Attributes:
        at: Number of the line that names the exception.
        header: The line above the frames; empty for an error of syntax, which has none.
        frames: Its calls, in the order in which they were printed.
        message: The exception's line, then the further lines of its message.
        origin: The line before the header that says whose it is (a thread's, a worker's); empty for the main one.
        link: How it follows from the exception before it, in Python's words; empty when it stands alone.
        rank: The rank that torch.distributed put before its lines, or None.
    """

    at: int
    header: str
    frames: tuple[Frame, ...]
    message: tuple[str, ...]
    origin: str = ""
    link: str = ""
    rank: int | None = None


def find_tracebacks(lines: Sequence[str]) -> list[Traceback]:
    """Every traceback of ``lines``, which hold no control codes, in the order in which they were told."""
    streams: dict[int | None, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        tag = _RANK.match(line)
        rank, text = (int(tag[1]), line[tag.end() :]) if tag else (None, line)
        streams.setdefault(rank, []).append((number, text))
    found = []
    for rank, numbered in streams.items():
        texts = [text for _, text in numbered]
        found += [replace(traceback, at=numbered[traceback.at][0], rank=rank) for traceback in _parse(texts)]
    return sorted(found, key=lambda traceback: traceback.at)


def _parse(lines: list[str]) -> list[Traceback]:
    """The tracebacks of one process, in order."""
    found: list[Traceback] = []
    gap_start = number = 0
    while number < len(lines):
        traceback = _read_at(lines, number)
        if traceback is None:
            number += 1
            continue
        gap = lines[gap_start:number]
        link = next((line for line in gap if found and _LINK.match(line)), "")
        origin = next((line.strip() for line in reversed(gap[-2:]) if _ORIGIN.match(line)), "")
        if lines[number].startswith("Original") and found:
            origin = found[-1].message[0] if found[-1].message else ""
        found.append(replace(traceback, link=link, origin=origin))
        gap_start = number = traceback.at + 1
    return found


def _read_at(lines: list[str], number: int) -> Traceback | None:
    """The traceback that begins at a line, or None."""
    line = lines[number]
    if _HEADER.match(line):
        return _read_plain(lines, number + 1, header=line.removeprefix("Original "))
    if _GROUP_HEADER.match(line):
        return _read_group(lines, number)
    if _BOX_HEADER.match(line):
        return _read_box(lines, number)
    if line.startswith(_FATAL):
        return _read_fatal(lines, number)
    if _SYNTAX_ERROR.match(line):
        traceback = _read_plain(lines, number, header="")
        return traceback if traceback.message and _EXCEPTION.match(traceback.message[0]) else None
    return None


def _read_plain(lines: Sequence[str], number: int, header: str) -> Traceback:
    end = number
    while end < len(lines) and (lines[end].startswith("  ") or (end > number and not lines[end])):
        end += 1  # Python marks some calls with a line of blanks
    frames = _frames([line for line in lines[number:end] if line])
    return Traceback(header=header, frames=frames, message=_message(lines, end), at=min(end, len(lines) - 1))


def _frames(body: Sequence[str]) -> tuple[Frame, ...]:
    calls: list[list[str]] = []
    for line in body:
        if line.startswith("  File ") or not calls:
            calls.append([line])
        else:
            calls[-1].append(line)
    return tuple(map(_frame, calls))


def _frame(lines: Sequence[str]) -> Frame:
    """Of code that spans several lines the first is kept; of an error of syntax the mark below it, too."""
    marks = lines[2:3] if _SYNTAX_ERROR.match(lines[0]) else ()
    repeated = [line for line in lines[1:] if line.startswith("  [Previous line repeated")]
    code = [line for line in lines[1:2] if line not in repeated]
    return Frame(lines=(lines[0], *code, *marks, *repeated), is_library=bool(_LIBRARY.search(lines[0])))


def _message(lines: Sequence[str], start: int) -> tuple[str, ...]:
    """The exception's line and what follows it, up to what is known to be something else."""
    end = start + 1
    while end < len(lines) and not _is_other(lines[end]):
        end += 1
    message = list(lines[start:end])
    while message and not message[-1].strip():
        message.pop()
    return tuple(message)


def _is_other(line: str) -> bool:
    patterns = (_HEADER, _GROUP_HEADER, _BOX_HEADER, _LINK, _ORIGIN, NOISE)
    return line in ('"""', "'''") or line.startswith(_FATAL) or any(pattern.match(line) for pattern in patterns)


def _read_group(lines: list[str], start: int) -> Traceback:
    """A group: its own traceback, then one line for each of its exceptions."""
    end = start + 1
    while end < len(lines) and lines[end].lstrip().startswith(("|", "+")):
        end += 1
    parts: list[tuple[str, list[str]]] = [("", [])]
    for line in lines[start + 1 : end]:
        if _BRANCH.match(line):
            parts.append((" " * (line.rindex("+") - 2), []))
        else:
            parts[-1][1].append(re.sub(r"^\s*\| ?", "", line))
    own = _read_plain(parts[0][1], 0, header="")
    told = tuple(f"{indent}{_in_one_line(part)}" for indent, part in parts[1:] if part)
    message = (*own.message[:1], *told)
    return Traceback(header=lines[start].strip(" +"), frames=own.frames, message=message, at=end - 1)


def _in_one_line(part: list[str]) -> str:
    start = next((number + 1 for number, line in enumerate(part) if _HEADER.match(line)), 0)
    read = _read_plain(part, start, header="")
    return summary(read) if read.message else part[0]


def summary(traceback: Traceback) -> str:
    """A traceback in one line: the exception, and the place in the user's code that is nearest to it, if any."""
    said = traceback.message[0] if traceback.message else traceback.header
    frames = [frame for frame in traceback.frames if not frame.is_library]
    return f"{said} ({frames[-1].lines[0].strip()})" if frames else said


def _read_box(lines: list[str], start: int) -> Traceback:
    """A traceback as rich draws it: of each call the file, and the line of code that the arrow marks."""
    end = start + 1
    calls: list[list[str]] = []
    while end < len(lines) and lines[end].startswith("│"):
        if call := _BOX_FRAME.match(lines[end]):
            calls.append([f"  {call[1]}"])
        elif calls and (code := _BOX_CODE.match(lines[end])):
            calls[-1].append(f"    {code[1].lstrip('│ ')}")
        end += 1
    end += end < len(lines) and lines[end].startswith("╰")
    message = _message(lines, end)
    return Traceback(
        header=_PLAIN_HEADER, frames=tuple(map(_frame, calls)), message=message, at=min(end, len(lines) - 1)
    )


def _read_fatal(lines: list[str], start: int) -> Traceback | None:
    """The interpreter's own report of a crash: the stack of the thread that crashed, turned as in a traceback."""
    number = next((at for at in range(start, len(lines)) if _FATAL_THREAD.match(lines[at])), None)
    if number is None:
        return None
    end = number + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    frames = _frames(lines[number + 1 : end])
    return Traceback(header=_PLAIN_HEADER, frames=frames[::-1], message=(lines[start],), at=end - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What a program said before it ended.

    Attributes:
        summary: The line that says most: the exception's, else the last one; empty when it said nothing.
        lines: The excerpt, at most ``MAX_EXCERPT_LINES``.
    """

    summary: str = ""
    lines: tuple[str, ...] = ()


def last_words(tail: Sequence[str]) -> LastWords:
    """The lines of a standard error that tell why its program ended.

    They are the traceback of the exception that ended it, if there is one, else what it printed last. A traceback
    after which the program went on to print much is one that it survived.
    """
    lines = [_shorten(_CODES.sub("", line).expandtabs(4).rstrip()) for line in tail]
    tracebacks = find_tracebacks(lines)
    chosen = _choose(tracebacks, lines)
    if chosen is None:
        excerpt = _without_traceback(lines)
        return LastWords(summary=excerpt[-1].strip() if excerpt else "", lines=tuple(excerpt))
    excerpt = _condense(chosen, _chain_before(tracebacks, chosen))
    lines = [_shorten(line) for line in excerpt[:MAX_EXCERPT_LINES]]
    return LastWords(summary=chosen.message[0] if chosen.message else chosen.header, lines=tuple(lines))


def _choose(tracebacks: Sequence[Traceback], lines: Sequence[str]) -> Traceback | None:
    """The one nearest to the cause: the last one, and a thread's or a child's only when there is no other."""
    candidates = [traceback for traceback in tracebacks if not traceback.origin.startswith(_IGNORED)]
    if not candidates:
        return None
    last = max(candidates, key=lambda traceback: (not traceback.origin.startswith(_BESIDE), traceback.at))
    if not _is_messenger(last):
        return None if _num_told(lines[last.at + 1 :]) > _MAX_LINES_AFTER else last
    earlier = [traceback for traceback in candidates if traceback.at < last.at and not _is_messenger(traceback)]
    rank = _root_rank(last)
    by_rank = [traceback for traceback in earlier if rank is not None and traceback.rank == rank]
    if by_rank or not earlier:
        return by_rank[-1] if by_rank else last
    return earlier[0] if _root_cause(last) else earlier[-1]


def _num_told(lines: Sequence[str]) -> int:
    return sum(1 for line in lines if line and not NOISE.match(line))


def _is_messenger(traceback: Traceback) -> bool:
    """Whether it only says that another process has failed, which said why itself."""
    return bool(traceback.message) and traceback.message[0].startswith(_MESSENGERS)


def _root_rank(messenger: Traceback) -> int | None:
    for line in _root_cause(messenger):
        if rank := _ROOT_RANK.match(line):
            return int(rank[1])
    return None


def _root_cause(messenger: Traceback) -> tuple[str, ...]:
    message = messenger.message
    return message[message.index(_ROOT_CAUSE) :] if _ROOT_CAUSE in message else ()


def _chain_before(tracebacks: Sequence[Traceback], chosen: Traceback) -> list[Traceback]:
    """The exceptions that led to the chosen one, the first one first."""
    same = [traceback for traceback in tracebacks if traceback.rank == chosen.rank]
    at = same.index(chosen)
    start = at
    while start > 0 and same[start].link:
        start -= 1
    return same[start:at]


def _condense(traceback: Traceback, before: Sequence[Traceback]) -> list[str]:
    """At most ``MAX_EXCERPT_LINES`` of a traceback: the exception, then the user's calls."""
    head = [traceback.origin] if traceback.origin else []
    if before:
        between = len(before) - 1
        head += [summary(before[0]), f"… {between} more …" if between else traceback.link]
    head += [traceback.header] if traceback.header else []
    message = _condense_message(traceback)
    return [*head, *_condense_frames(traceback.frames, MAX_EXCERPT_LINES - len(head) - len(message)), *message]


def _condense_message(traceback: Traceback) -> list[str]:
    if _is_messenger(traceback) and _root_cause(traceback):
        return [traceback.message[0], *(line for line in _root_cause(traceback) if _ROOT_FACTS.match(line))]
    lines = [line for line in traceback.message if line.strip() and not NOISE.match(line)] or list(
        traceback.message[:1]
    )
    most = _MAX_GROUP_LINES if traceback.header.startswith("Exception Group") else _MAX_MESSAGE_LINES
    if len(lines) <= most:
        return lines
    kept = lines[: most - 1]
    return [*kept, f"… {len(lines) - len(kept)} more lines"]


def _condense_frames(frames: Sequence[Frame], max_lines: int) -> list[str]:
    """All calls if they fit, else as many of the user's as fit, and the very last one."""
    kept = set(range(len(frames)))
    if len(_render_frames(frames, kept)) <= max_lines:
        return _render_frames(frames, kept)
    kept = set()
    for number in _by_worth(frames):
        if len(_render_frames(frames, kept | {number})) <= max_lines:
            kept.add(number)
    return _render_frames(frames, kept) if kept else []


def _by_worth(frames: Sequence[Frame]) -> list[int]:
    """The calls worth telling: the user's last, the very last, the user's first, the user's others upwards."""
    every = range(len(frames))
    own = [number for number in every if not frames[number].is_library] or list(every)
    return list(dict.fromkeys([own[-1], every[-1], own[0], *reversed(own)]))


def _render_frames(frames: Sequence[Frame], kept: set[int]) -> list[str]:
    lines: list[str] = []
    num_left_out = 0
    for number, frame in enumerate(frames):
        num_left_out += number not in kept
        if number in kept:
            lines += _gap(num_left_out)
            lines += frame.lines
            num_left_out = 0
    return lines + _gap(num_left_out)


def _gap(num_left_out: int) -> list[str]:
    return [f"  … {num_left_out} more call{'s' if num_left_out > 1 else ''}"] if num_left_out else []


def _without_traceback(lines: Sequence[str]) -> list[str]:
    """What was printed last: an abort's message if there is one; of the steps of a progress bar only the last."""
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
    """The two ends of a line that is too long to read."""
    if len(line) <= _MAX_LINE:
        return line
    return f"{line[: _MAX_LINE - _KEPT_END - 3]} … {line[-_KEPT_END:]}"
