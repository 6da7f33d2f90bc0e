"""The ends of instances in words: exit codes, and few lines for all that did not fail first. Pure."""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from popdist.errors import name_instances
from poprun.job.state import EXIT_OF_SIGNAL, InstanceStatus

if TYPE_CHECKING:
    from poprun.job.report.last_words import LastWords

_TOLD_BY_SHELLS: Final = frozenset(
    {
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGTERM,
        signal.SIGXCPU,
    }
)

MAX_OTHER_LINES: Final = 3
_MAX_SUMMARY: Final = 120
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


def signal_of(code: int) -> int | None:
    """The signal that ended a program, also one that a shell passed on as 128 + n; else None."""
    if code < 0:
        return -code
    return code - EXIT_OF_SIGNAL if code - EXIT_OF_SIGNAL in _TOLD_BY_SHELLS else None


def name_code(code: int) -> str:
    """An exit code in short: ``exit code 3``, ``SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def describe_code(code: int) -> str:
    """An exit code with what it stands for: ``exit code 3``, ``SIGSEGV, segmentation fault``."""
    signum = signal_of(code)
    if signum is None:
        return name_code(code)
    if code >= 0:
        return f"{name_code(code)}, which stands for {name_code(-signum)}"
    meaning = signal.strsignal(signum)
    return f"{name_code(code)}, {meaning.lower()}" if meaning else name_code(code)


def describe_others(
    failed: InstanceStatus, statuses: Sequence[InstanceStatus], words: Mapping[int, "LastWords"]
) -> list[str]:
    """At most ``MAX_OTHER_LINES`` lines on every instance but ``failed``: those that failed come first.

    Two failures are alike when they have the same exit code and their programs' last words differ in numbers only:
    an instance names itself in its message, or an address, and has failed for the same reason.
    """
    cause = _kind(failed, words)
    groups: dict[tuple[int, str], list[int]] = {}
    texts: dict[tuple[int, str], str] = {}
    for status in statuses:
        if status is failed:
            continue
        is_alike = _has_failed_by_itself(status, words) and _kind(status, words) == cause
        text = "failed in the same way" if is_alike else _describe_end(status, words)
        worth = 0 if is_alike else 1 if status.has_failed else 2
        key = (worth, _NUMBER.sub("#", text))
        groups.setdefault(key, []).append(status.index)
        texts.setdefault(key, text)
    rows = [
        (name_instances(indices), texts[key])
        for key, indices in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    if len(rows) > MAX_OTHER_LINES:
        num_told = MAX_OTHER_LINES - 1
        num_left = len(rows) - num_told
        rows = [*rows[:num_told], ("the others", f"ended in {num_left} further ways")]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:{width}}   {text}" for name, text in rows]


def _kind(status: InstanceStatus, words: Mapping[int, "LastWords"]) -> tuple[int | None, str, str]:
    return status.exit_code, status.problem, _NUMBER.sub("#", _summary(status, words))


def _has_failed_by_itself(status: InstanceStatus, words: Mapping[int, "LastWords"]) -> bool:
    """Also when poprun's request to end came while it was failing: then it ended with words and an exit code."""
    return status.has_failed or ((status.exit_code or 0) > 0 and bool(_summary(status, words)))


def _summary(status: InstanceStatus, words: Mapping[int, "LastWords"]) -> str:
    return words[status.index].summary if status.index in words else ""


def _describe_end(status: InstanceStatus, words: Mapping[int, "LastWords"]) -> str:
    if status.problem:
        return status.problem
    if status.exit_code is None:
        return "never ran"
    if status.exit_code == 0:
        return "ended with 0"
    if status.was_stopped and status.exit_code < 0:
        return f"stopped by poprun: {name_code(status.exit_code)}"
    summary = _summary(status, words)[:_MAX_SUMMARY]
    how = "ended while poprun stopped the job" if status.was_stopped else "failed, too"
    return f"{how}: {describe_code(status.exit_code)}{f': {summary}' if summary else ''}"
