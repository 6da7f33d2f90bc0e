"""The decision whether a restart can help a job that has failed, from the ends of its attempts. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from popdist.errors import name_instances
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.last_words import LastWords, without_numbers
from poprun.observe.account.state import InstanceStatus
from poprun.observe.judge.findings import Findings
from poprun.observe.judge.job_end import JobEnd

_NOT_THERE: Final = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_USAGE_CODE: Final = 2
_USAGE: Final = re.compile(r"usage: ", re.IGNORECASE)
_FROM_OUTSIDE: Final = (Cause.LOST, Cause.UNKNOWN, Cause.SIGNAL)
"""Causes of failures that may be in the machines, so that the next attempt may succeed."""


def reason_to_end(ends: Sequence[JobEnd]) -> str:
    """Return why no restart of the job can help, in words; an empty text if another attempt may succeed."""
    last = _failure(ends[-1])
    if last is None:
        return ""
    if hopeless := _hopeless(last):
        return f"{hopeless}, which no restart can help"
    before = _failure(ends[-2]) if len(ends) > 1 else None
    if before is None or not last.place or last.key != before.key or last.num_steps > before.num_steps:
        return ""
    who, how = name_instances(last.verdict.culprits), last.printed.summary or last.verdict.cause
    return f"{who} failed twice at {last.place} in the same way, and came no further: {how}"


@dataclass(frozen=True, slots=True)
class _Failure:
    """The failure that ended an attempt: the verdict, the status and last lines of the first instance at fault."""

    verdict: Verdict
    status: InstanceStatus
    printed: LastWords

    @property
    def place(self) -> str:
        return self.verdict.place_of(self.status.index)

    @property
    def num_steps(self) -> int:
        """The number of steps that the failed instance has made: the larger one of counted and reported steps."""
        progress = self.status.progress
        return 0 if progress is None else max(progress.num_steps, progress.step or 0)

    @property
    def key(self) -> tuple[Cause, str, str]:
        """Cause, place and message of the failure, which are equal for two attempts that failed alike."""
        return self.verdict.cause, self.place, without_numbers(self.printed.summary)


def _failure(end: JobEnd) -> _Failure | None:
    """Return the failure that ended an attempt; None if the cause is unknown, or may lie in a machine."""
    findings = end.findings or Findings()
    verdict = findings.verdict
    if not verdict.culprits or verdict.cause in _FROM_OUTSIDE:
        return None
    culprit = verdict.culprits[0]
    return _Failure(verdict, end.statuses[culprit], findings.words_of(culprit))


def _hopeless(failure: _Failure) -> str:
    """Return the error of ``failure``, such as a wrong import, if every attempt would repeat it; else ""."""
    summary, progress = failure.printed.summary, failure.status.progress
    name = summary.partition(":")[0].rpartition(".")[2]
    if failure.verdict.cause is Cause.EXCEPTION and name in _NOT_THERE:
        return summary
    if failure.status.exit_code == _USAGE_CODE and any(map(_USAGE.match, failure.printed.lines)):
        return summary
    if name == "AssertionError" and progress is not None and progress.has_joined and failure.num_steps == 0:
        return f"{summary} before the first step"
    return ""
