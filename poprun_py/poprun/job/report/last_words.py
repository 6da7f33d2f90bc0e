"""The last words of a program: of all that it wrote to its standard error, the lines that tell most. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.job.report.tracebacks import NOISE, Frame, Traceback, find_tracebacks, summary

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

    Args:
        tail: The last lines of the standard error, without their endings.
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
