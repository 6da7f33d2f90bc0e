"""The question where all programs stand, from its orders to what is said."""

from dataclasses import replace
from typing import Any

from poprun.job.hangs import Hang
from poprun.job.stacks import StackInquiry
from poprun.job.state import InstanceState, InstanceStatus

RUNNING = [InstanceStatus(index=index, state=InstanceState.RUNNING) for index in range(3)]
ENDED = [replace(status, state=InstanceState.ENDED) for status in RUNNING]


def answer(*processes: str) -> dict[str, Any]:
    """What an agent says of a program without stacks."""
    return {"event": "stacks", "text": "", "processes": processes}


def ask(statuses: list[InstanceStatus], asked: list[int] | None = None, hang: Hang | None = None) -> StackInquiry:
    """An inquiry at time 0; whom it asks is noted in ``asked``."""
    noted = [] if asked is None else asked
    return StackInquiry(statuses, 0.0, lambda instance, _order: noted.append(instance), hang)


def test_it_is_said_when_all_have_answered() -> None:
    """Only those that run are asked."""
    asked: list[int] = []
    statuses = [*RUNNING[:2], ENDED[2]]
    inquiry = ask(statuses, asked)
    inquiry.add_answer(0, answer("a"))
    assert inquiry.text(statuses, 1.0) is None

    inquiry.add_answer(1, answer("b"))

    assert asked == [0, 1]
    assert inquiry.text(statuses, 1.0) == (
        "where the instances stand, the latest call last\n  instance 0:\n    | a\n  instance 1:\n    | b"
    )


def test_nobody_is_waited_for_too_long() -> None:
    """One that does not answer in time, and one that ends meanwhile, are told as such."""
    inquiry = ask(RUNNING)
    inquiry.add_answer(0, answer("a"))
    statuses = [*RUNNING[:2], ENDED[2]]

    assert inquiry.text(statuses, 3.9) is None
    said = inquiry.text(statuses, 4.0) or ""
    assert "instance 1:\n    | no answer" in said
    assert "instance 2:\n    | it has ended" in said


def test_nobody_is_asked_when_nobody_runs() -> None:
    """It is said at once."""
    assert ask(ENDED).text(ENDED, 0.0) == "no program runs"


def test_whoever_did_not_arrive_is_shown_first() -> None:
    """Of a hang."""
    inquiry = ask(RUNNING, hang=Hang(idle_seconds=5, waiting={"barrier()": (0, 1)}, absent=(2,)))
    for index in range(3):
        inquiry.add_answer(index, answer(f"process {index}"))
    said = inquiry.text(RUNNING, 1.0) or ""

    assert said.splitlines()[0] == "no progress for 5 s: instances 0 and 1 wait in barrier()"
    assert said.index("process 2") < said.index("process 0") < said.index("process 1")
    assert said.endswith("the job goes on: an instance that compiles or saves for long looks the same")
