"""Whether another attempt can help a job that has failed: a pure function of how its attempts ended."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from popdist.errors import name_instances
from poprun.job.record import JobEnd
from poprun.job.report.findings import Findings
from poprun.job.verdict import Cause

_NOT_THERE: Final = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_USAGE_CODE: Final = 2
_USAGE: Final = re.compile(r"usage: ", re.IGNORECASE)
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+")
_FROM_OUTSIDE: Final = (Cause.LOST, Cause.UNKNOWN, Cause.SIGNAL)
"""Causes that lie in the machines, or perhaps there: the next attempt may find them gone."""


def reason_to_end(ends: Sequence[JobEnd]) -> str:
    """Why no attempt after these can help, in words; empty where one may."""
    last = _failure(ends[-1])
    if last is None:
        return ""
    if hopeless := _hopeless(last):
        return f"{hopeless}, which no restart can help"
    before = _failure(ends[-2]) if len(ends) > 1 else None
    if before is None or not last.place or last.key != before.key or last.num_steps > before.num_steps:
        return ""
    how = last.summary or last.cause
    return f"{last.who} failed twice at {last.place} in the same way, and came no further: {how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """How an attempt has failed, as far as attempts are compared."""

    cause: Cause
    who: str
    code: int | None
    summary: str  # the exception's line, else the last one
    lines: tuple[str, ...]
    place: str
    num_steps: int  # how far the culprit was, by what it reported or popdist counted
    uses_popdist: bool

    @property
    def key(self) -> tuple[Cause, str, str]:
        """What two attempts that failed in the same way have in common."""
        return self.cause, self.place, _NUMBER.sub("#", self.summary)


def _failure(end: JobEnd) -> _Failure | None:
    """The failure of an attempt's first culprit; None where nobody is at fault, or the machines may be."""
    findings = end.findings or Findings()
    verdict = findings.verdict
    if not verdict.culprits or verdict.cause in _FROM_OUTSIDE:
        return None
    culprit = end.statuses[verdict.culprits[0]]
    said, progress = findings.words_of(culprit.index), culprit.progress
    return _Failure(
        cause=verdict.cause,
        who=name_instances(verdict.culprits),
        code=culprit.exit_code,
        summary=said.summary,
        lines=said.lines,
        place=verdict.place_of(culprit.index),
        num_steps=0 if progress is None else max(progress.num_steps, progress.step or 0),
        uses_popdist=progress is not None and progress.has_joined,
    )


def _hopeless(failure: _Failure) -> str:
    """What every attempt would fail with again, in words; empty for a failure that may pass."""
    name = failure.summary.partition(":")[0].rpartition(".")[2]
    if failure.cause is Cause.EXCEPTION and name in _NOT_THERE:
        return failure.summary
    if failure.code == _USAGE_CODE and any(map(_USAGE.match, failure.lines)):
        return failure.summary
    if name == "AssertionError" and failure.uses_popdist and failure.num_steps == 0:
        return f"{failure.summary} before the first step"
    return ""
