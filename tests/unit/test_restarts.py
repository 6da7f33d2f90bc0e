"""Whether another attempt can help, by how the ones before it ended."""

from dataclasses import replace

import pytest

from popdist.ground.progress import Progress
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.last_words import LastWords
from poprun.observe.account.state import InstanceState, InstanceStatus
from poprun.observe.judge.findings import Findings
from poprun.observe.judge.job_end import JobEnd
from poprun.observe.judge.restarts import reason_to_end


def ended(
    summary: str,
    cause: Cause = Cause.EXCEPTION,
    *,
    place: str = "train.py:7",
    code: int = 1,
    steps: int | None = None,
    lines: tuple[str, ...] = (),
) -> JobEnd:
    """An attempt whose culprit was instance 1."""
    progress = None if steps is None else Progress(pid=9, has_joined=True, num_steps=steps)
    bad = InstanceStatus(
        index=1, state=InstanceState.ENDED, exit_code=code, exited_at_seconds=1.0, progress=progress
    )
    verdict = Verdict(cause=cause, culprits=(1,), places={1: place} if place else {})
    words = {1: LastWords(summary=summary, lines=lines)}
    return JobEnd(statuses=[InstanceStatus(index=0), bad], findings=Findings(words=words, verdict=verdict))


USAGE = ("usage: train.py [-h] [--lr LR]", "train.py: error: unrecognized arguments: --x")
VALUE = ended("ValueError: batch 3")


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([VALUE], ""),
        ([VALUE, ended("ValueError: batch 4")], "failed twice at train.py:7 in the same way"),
        ([VALUE, ended("ValueError: batch 4", place="train.py:8")], ""),
        ([VALUE, ended("KeyError: 3")], ""),
        ([VALUE, ended("ValueError: batch 4", Cause.OUT_OF_MEMORY)], ""),
        ([ended("x", steps=4), ended("x", steps=9)], ""),
        ([ended("x", steps=4), ended("x", steps=4)], "came no further: x"),
        ([ended("", place="", code=3)] * 2, ""),
        ([ended("", Cause.ABSENT)] * 2, "did not come back from its own code"),
        ([ended("", Cause.SIGNAL, code=-9)] * 2, ""),
        ([ended("x", Cause.LOST)] * 2, ""),
        ([ended("ModuleNotFoundError: No module named 'x'")], "No module named 'x', which no restart can help"),
        ([ended("SyntaxError: invalid syntax")], "invalid syntax, which"),
        ([ended(USAGE[1], Cause.EXIT, code=2, place="", lines=USAGE)], "unrecognized arguments: --x, which"),
        ([ended(USAGE[1], Cause.EXIT, code=2, place="")], ""),
        ([ended("AssertionError: sizes", steps=0)], "AssertionError: sizes before the first step, which"),
        ([ended("AssertionError: sizes", steps=1)], ""),
        ([ended("AssertionError: sizes")], ""),
    ],
)
def test_the_table(ends: list[JobEnd], reason: str) -> None:
    """One row, one job: no reason where another attempt may help."""
    found = reason_to_end(ends)

    assert reason in found
    assert bool(found) == bool(reason)


def test_nobody_at_fault_is_no_reason() -> None:
    """As when a host was lost, or when it is not known."""
    unknown = replace(VALUE, findings=Findings(verdict=Verdict()))

    assert reason_to_end([unknown, unknown]) == reason_to_end([replace(VALUE, findings=None)] * 2) == ""
