"""Questions to the hosts of a job, and their answers: all at once, each round in a bounded time."""

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from poprun.hosts import remote_side
from poprun.hosts.routes import srun_words, ssh_words
from poprun.plan.settings import RemoteSettings

Answer = dict[str, Any]
Part = TypeVar("Part")

_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_MOST_WORDS: Final = 2000
_BOOT: Final = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_COMMAND: Final = (sys.executable, "-I", "-S", "-c", _BOOT)


class NoAnswerError(Exception):
    """A host did not answer.

    Attributes:
        code: Exit code of ssh or of the interpreter there; None when time was over.
        words: What ssh or the host said about it.
    """

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


class Conversation:
    """One host, asked.

    Args:
        host: Its name.
        remote: How it is reached; None for the machine that poprun runs on.
    """

    def __init__(self, host: str, remote: RemoteSettings | None) -> None:
        self.host = host
        self._words = _COMMAND if remote is None else _words(host, remote)
        self._process: Process | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is somebody to be asked."""
        return self._process is not None

    async def begin(self) -> None:
        """Send the text that answers.

        Raises:
            NoAnswerError: If there is no ssh here.
        """
        text = _source()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_MAX_LINE_BYTES, start_new_session=True
            )
        except OSError as error:
            raise NoAnswerError(127, f"{self._words[0]}: {error.strerror}") from None
        self._write(f"{len(text)}\n".encode() + text)

    async def ask(self, question: Answer) -> Answer:
        """The host's answer.

        Raises:
            NoAnswerError: If it gives none.
        """
        process = _there(self._process)
        self._write(json.dumps(question).encode() + b"\n")
        with suppress(ConnectionError, ValueError):  # also of who says what is no answer
            while line := await _there(process.stdout).readline():
                _, mark, text = line.decode(errors="replace").partition(remote_side.MARK)
                if mark:
                    return dict(json.loads(text))
        complaint = await _there(process.stderr).read(_MOST_WORDS)
        raise NoAnswerError(await process.wait(), complaint.decode(errors="replace").strip())

    async def end(self) -> None:
        """Hang up, at once: the other side ends with its standard input."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _write(self, data: bytes) -> None:
        with suppress(ConnectionError):
            _there(_there(self._process).stdin).write(data)


def _words(host: str, remote: RemoteSettings) -> tuple[str, ...]:
    if remote.slurm_job is not None:
        return (*srun_words(remote.slurm_job, (host,), 1), *_COMMAND)
    return ssh_words(remote.ssh_config, host, _COMMAND)


def _there(part: Part | None) -> Part:
    """A part of a process that was started with pipes."""
    if part is None:
        raise NoAnswerError(None, "it was not asked yet")
    return part


def python_file() -> str:
    """The interpreter that answers on every host."""
    return sys.executable


def _source() -> bytes:
    with open(os.path.abspath(remote_side.__file__), "rb") as file:
        return file.read()


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
