"""Questions to all hosts of a job at once, each round of them in a bounded time."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from poprun.hosts.questions import Answer, Conversation, NoAnswerError
from poprun.plan.settings import RemoteSettings

_USUAL_SECONDS: Final = 0.4
"""How long this machine takes for its own first answer when it has nothing else to do."""


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one question to several hosts.

    Attributes:
        answers: What each said that answered, by its name.
        silent: Why each of the others did not.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    silent: dict[str, NoAnswerError] = field(default_factory=dict)


class Rounds:
    """The lines to all hosts. Who does not answer once is asked no more.

    Args:
        names: The hosts.
        here: The one of them that is this machine.
        remote: How the others are reached.
    """

    def __init__(self, names: Iterable[str], here: str, remote: RemoteSettings) -> None:
        self._here = here
        self._lines = {name: Conversation(name, None if name == here else remote) for name in names}
        self._slowness = 1.0

    async def ask(self, questions: Mapping[str, Answer], seconds: float) -> Round:
        """Ask each host its question; hosts that are no more asked are left out.

        It may take longer on a machine that is so busy that its own first answer took longer than usual.
        """
        asked = {
            name: asyncio.create_task(self._ask(name, questions[name]))
            for name in questions
            if name in self._lines
        }
        if asked:
            _, pending = await asyncio.wait(asked.values(), timeout=seconds)
            if pending and self._slowness > 1:
                await asyncio.wait(pending, timeout=seconds * (self._slowness - 1))
        found = Round()
        for name, task in asked.items():
            if not task.done():
                task.cancel()
                found.silent[name] = NoAnswerError(None, "")
            elif isinstance(error := task.exception(), NoAnswerError):
                found.silent[name] = error
            else:
                found.answers[name] = task.result()
        await self._hang_up(found.silent)
        return found

    async def end(self) -> None:
        """Hang up on all."""
        await self._hang_up(tuple(self._lines))

    async def _ask(self, name: str, question: Answer) -> Answer:
        line = self._lines[name]
        if line.has_begun:
            return await line.ask(question)
        began_at_seconds = time.monotonic()
        await line.begin()
        answer = await line.ask(question)
        if name == self._here:
            self._slowness = max(1.0, (time.monotonic() - began_at_seconds) / _USUAL_SECONDS)
        return answer

    async def _hang_up(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self._lines.pop(name).end() for name in names))
