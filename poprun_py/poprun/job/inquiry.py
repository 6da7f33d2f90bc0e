"""Ask the programs where they stand, and word what they answer: for a user who asks, and of a job that hangs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from poprun.job.hangs import Hang
from poprun.job.state import InstanceState, InstanceStatus
from poprun.messages.control import Message

_MOST_SECONDS = 4.0
"""How long agents are waited for; each gives its program half of it."""

_MAX_GROUPS_OF_HANG = 6


class Inquiry:
    """The question that is open, if one is.

    Args:
        tell: Sends an order to the agent of an instance.
        hang_timeout_seconds: When a job that hangs is ended, for the words of its report; None when it is not.
    """

    def __init__(self, tell: Callable[[int, Message], None], hang_timeout_seconds: float | None) -> None:
        self._tell = tell
        self._hang_timeout_seconds = hang_timeout_seconds
        self._hang: Hang | None = None
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._deadline_seconds: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether not all have answered yet."""
        return self._deadline_seconds is not None

    def begin(self, statuses: Sequence[InstanceStatus], now_seconds: float, hang: Hang | None = None) -> None:
        """Ask every program that runs, about a hang or because the user wants to know."""
        running = [status.index for status in statuses if status.state is InstanceState.RUNNING]
        first = hang.absent if hang is not None else ()
        self._hang = hang
        self._answers = dict.fromkeys((*first, *running))
        self._deadline_seconds = now_seconds + _MOST_SECONDS
        for index in running:
            self._tell(index, {"order": "stacks"})

    def take(self, instance: int, event: dict[str, Any]) -> None:
        """Take note of an answer."""
        if instance in self._answers:
            self._answers[instance] = event

    def answers(self, statuses: Sequence[InstanceStatus], now_seconds: float) -> Iterator[str]:
        """What there is to say, once: when all that still run have answered, or when they have had their time."""
        if self._deadline_seconds is None:
            return
        is_awaited = any(
            answer is None and statuses[index].state is InstanceState.RUNNING
            for index, answer in self._answers.items()
        )
        if is_awaited and now_seconds < self._deadline_seconds:
            return
        self._deadline_seconds = None
        yield "\n  ".join([*self._heading(statuses), *self._lines(statuses), *self._closing()])

    def _heading(self, statuses: Sequence[InstanceStatus]) -> list[str]:
        if self._hang is None:
            return ["where the instances stand, the latest call last" if self._answers else "no program runs"]
        from poprun.job.hang_words import describe_hang  # noqa: PLC0415 - most jobs never hang

        return describe_hang(self._hang, statuses)

    def _closing(self) -> list[str]:
        if self._hang is None:
            return []
        if self._hang_timeout_seconds is None:
            return ["the job goes on: an instance that compiles or saves for long looks the same"]
        return [f"the job is ended when this has lasted {self._hang_timeout_seconds:g} s (--hang-timeout)"]

    def _lines(self, statuses: Sequence[InstanceStatus]) -> list[str]:
        from poprun.job.sources import read_lines  # noqa: PLC0415 - most jobs are never asked
        from poprun.job.stacks import read_standing, render_standings  # noqa: PLC0415 - as above

        silent = {
            index: "no answer" if statuses[index].state is InstanceState.RUNNING else "it has ended"
            for index in self._answers
        }
        standings = {
            index: read_standing("", [silent[index]])
            if answer is None
            else read_standing(answer["text"], answer["processes"])
            for index, answer in self._answers.items()
        }
        threads = [stack for standing in standings.values() for stack in standing.threads]
        sources = read_lines({(frame.file, frame.line) for stack in threads for frame in stack})
        return render_standings(
            standings,
            lambda file, line: sources.get((file, line), ""),
            None if self._hang is None else _MAX_GROUPS_OF_HANG,
        )
