"""A request to all running programs for their stacks, and the text that shows the answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from popdist.ground.layout import Parallelism
from poprun.launch.messages.control import Message
from poprun.observe.account.evidence import InstanceEvidence, Stacks
from poprun.observe.account.stacks import ReadLine, collective_of
from poprun.observe.account.state import InstanceState, InstanceStatus
from poprun.observe.judge.hangs import Hang
from poprun.observe.show.standstill import describe_hang, render_stacks

_MOST_ANSWER_SECONDS: Final = 4.0  # how long poprun waits for agents; an agent gives its program half of this time
_MAX_GROUPS_OF_HANG: Final = 6
_MOST_HELPERS: Final = 8  # processes below a program, such as a data loader's workers, that are asked for stacks
_NOT_SHARED: Final = Parallelism()


class StackInquiry:
    """A request to all running programs for their stacks, because of a hang or because the user asked."""

    def __init__(
        self,
        statuses: Sequence[InstanceStatus],
        now_seconds: float,
        send_order: Callable[[int, Message], None],
        hang: Hang | None = None,
        hang_timeout_seconds: float | None = None,
        parallelism: Parallelism = _NOT_SHARED,
    ) -> None:
        running = [status.index for status in statuses if status.state is InstanceState.RUNNING]
        first = hang.absent if hang is not None else ()
        self.hang = hang  # the hang that caused the request; None if the user asked
        self._hang_timeout_seconds = hang_timeout_seconds
        self._parallelism = parallelism
        self._instances = tuple(dict.fromkeys((*first, *running)))
        self._awaited = set(self._instances)
        self._deadline_seconds = now_seconds + _MOST_ANSWER_SECONDS
        for index in running:
            send_order(index, {"order": "stacks", "most_helpers": _MOST_HELPERS})

    def note_answer(self, instance: int) -> None:
        """Record that ``instance`` has answered, so that poprun no longer waits for an answer of this instance."""
        self._awaited.discard(instance)

    @property
    def is_about_suspicion(self) -> bool:
        """Whether poprun has requested the stacks only to find out whether a suspected hang is a real hang."""
        return self.hang is not None and self.hang.is_suspicion

    def calls(self, evidence: Mapping[int, InstanceEvidence]) -> dict[int, str]:
        """Return {instance: the torch collective in which its program waits}; omit programs that wait in none."""
        answers = self._answers(evidence).items()
        return {index: call for index, stacks in answers if (call := collective_of(stacks))}

    def is_over(self, statuses: Sequence[InstanceStatus], now_seconds: float) -> bool:
        """Whether all running programs have sent their stacks, or the time limit for answers has passed."""
        is_awaited = any(statuses[index].state is InstanceState.RUNNING for index in self._awaited)
        return not is_awaited or now_seconds >= self._deadline_seconds

    def text(
        self,
        statuses: Sequence[InstanceStatus],
        evidence: Mapping[int, InstanceEvidence],
        read_line: ReadLine,
        findings: Sequence[str] = (),
    ) -> str:
        """Return the stacks of all programs as text for the user; ``findings`` are lines on the hang's cause."""
        answers = self._answers(evidence)
        stacks = {
            index: answers.get(index) or Stacks(processes=(_without_answer(statuses[index]),))
            for index in self._instances
        }
        max_groups = None if self.hang is None else _MAX_GROUPS_OF_HANG
        lines = render_stacks(stacks, read_line, max_groups, self._parallelism)
        return "\n  ".join([*self._heading(statuses, findings), *lines, *self._last_lines()])

    def _answers(self, evidence: Mapping[int, InstanceEvidence]) -> dict[int, Stacks]:
        """Return {instance: stacks} of the programs that answered this request; omit stacks of older requests."""
        answered = (index for index in self._instances if index not in self._awaited and index in evidence)
        return {index: evidence[index].stacks for index in answered}

    def _heading(self, statuses: Sequence[InstanceStatus], findings: Sequence[str]) -> list[str]:
        if self.hang is not None:
            return describe_hang(self.hang, statuses, self._parallelism, findings)
        return ["where the instances stand, the latest call last" if self._instances else "no program runs"]

    def _last_lines(self) -> list[str]:
        if self.hang is None:
            return []
        if self._hang_timeout_seconds is None:
            return ["the job goes on: an instance that compiles or saves for long looks the same"]
        return [f"the job is ended when this has lasted {self._hang_timeout_seconds:g} s (--hang-timeout)"]


def _without_answer(status: InstanceStatus) -> str:
    return "no answer" if status.state is InstanceState.RUNNING else "it has ended"
