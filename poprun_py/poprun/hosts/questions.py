"""Questions to one host, and its answers: `remote_side`, sent to a bare interpreter there through ssh or srun."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
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
