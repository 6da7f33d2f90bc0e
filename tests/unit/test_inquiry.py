"""The question where all programs stand, from its orders to what is said."""

from dataclasses import replace
from typing import Any

import pytest

from poprun.job.hangs import Hang
from poprun.job.stacks import Inquiry
from poprun.job.state import InstanceState, InstanceStatus

RUNNING = [InstanceStatus(index=index, state=InstanceState.RUNNING) for index in range(3)]
ENDED = [replace(status, state=InstanceState.ENDED) for status in RUNNING]


def answer(*processes: str) -> dict[str, Any]:
    """What an agent says of a program without stacks."""
    return {"event": "stacks", "text": "", "processes": processes}


@pytest.fixture
def asked() -> list[int]:
    """The instances that were asked, in order."""
    return []


@pytest.fixture
def inquiry(asked: list[int]) -> Inquiry:
    """One that notes whom it asks."""
    return Inquiry(lambda instance, _order: asked.append(instance), None)


def test_it_is_said_once_when_all_have_answered(inquiry: Inquiry, asked: list[int]) -> None:
    """Only those that run are asked."""
    statuses = [*RUNNING[:2], ENDED[2]]
    inquiry.begin(statuses, 0.0)
    inquiry.take(0, answer("a"))
    assert list(inquiry.answers(statuses, 1.0)) == []

    inquiry.take(1, answer("b"))
    said = list(inquiry.answers(statuses, 1.0))

    assert asked == [0, 1]
    assert said == [
        "where the instances stand, the latest call last\n  instance 0:\n    | a\n  instance 1:\n    | b"
    ]
    assert not inquiry.is_open
    assert list(inquiry.answers(statuses, 2.0)) == []


def test_nobody_is_waited_for_too_long(inquiry: Inquiry) -> None:
    """One that does not answer in time, and one that ends meanwhile, are told as such."""
    inquiry.begin(RUNNING, 0.0)
    inquiry.take(0, answer("a"))
    statuses = [*RUNNING[:2], ENDED[2]]

    assert list(inquiry.answers(statuses, 3.9)) == []
    (said,) = inquiry.answers(statuses, 4.0)
    assert "instance 1:\n    | no answer" in said
    assert "instance 2:\n    | it has ended" in said


def test_nobody_is_asked_when_nobody_runs(inquiry: Inquiry) -> None:
    """It is said at once."""
    inquiry.begin(ENDED, 0.0)

    assert list(inquiry.answers(ENDED, 0.0)) == ["no program runs"]


def test_whoever_did_not_arrive_is_shown_first(inquiry: Inquiry) -> None:
    """Of a hang."""
    inquiry.begin(RUNNING, 0.0, Hang(idle_seconds=5, waiting={"barrier()": (0, 1)}, absent=(2,)))
    for index in range(3):
        inquiry.take(index, answer(f"process {index}"))
    (said,) = inquiry.answers(RUNNING, 1.0)

    assert said.splitlines()[0] == "no progress for 5 s: instances 0-1 wait in barrier()"
    assert said.index("process 2") < said.index("process 0") < said.index("process 1")
    assert said.endswith("the job goes on: an instance that compiles or saves for long looks the same")
