"""Questions to all hosts of a job at once, each with a time limit, and the hosts' answers.

On each host a Python reads the program `remote_side` from standard input, and then prints one answer for each
question.
"""

import asyncio
import json
import os
import signal
import sys
import time
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from poprun.hosts import remote_side
from poprun.launch.routes import remote_words
from poprun.plan.request import RemoteSettings

Answer = dict[str, Any]

_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_MAX_COMPLAINT_BYTES: Final = 2000
_BOOT: Final = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_PROGRAM: Final = Path(remote_side.__file__).read_bytes()
_COMMAND: Final = (sys.executable, "-I", "-S", "-c", _BOOT)
_USUAL_SECONDS: Final = 0.4  # time to the first answer of this machine if the machine is idle


class NoAnswerError(Exception):
    """Error for a host that did not answer a question."""

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code  # exit code of ssh or of the host's Python; None if the time limit passed
        self.words = words  # the error message of ssh or of the host


Replies = tuple[dict[str, Answer], dict[str, NoAnswerError]]  # by the names of the hosts


class HostConnections:
    """poprun's connections to all hosts of a job; a host that has failed to answer is not asked again."""

    def __init__(self, names: Iterable[str], here: str, remote: RemoteSettings) -> None:
        commands = {
            name: _COMMAND if name == here else remote_words(remote.ssh_config, remote.slurm_job, name, _COMMAND)
            for name in names
        }
        self._connections = {name: _HostConnection(argv) for name, argv in commands.items()}
        self._own_connection = self._connections[here]

    async def ask(self, questions: Mapping[str, Answer], seconds: float) -> Replies:
        """Send each host its question, except hosts that have failed before; return answers and failures."""
        # the time limit grows if this machine is busy, which its own slow first answer shows
        tasks = {
            name: asyncio.create_task(self._connections[name].ask(question))
            for name, question in questions.items()
            if name in self._connections
        }
        if tasks:
            _, pending = await asyncio.wait(tasks.values(), timeout=seconds)
            slowness = self._own_connection.first_answer_seconds / _USUAL_SECONDS
            if pending and slowness > 1:
                await asyncio.wait(pending, timeout=seconds * (slowness - 1))
        answers: dict[str, Answer] = {}
        failures: dict[str, NoAnswerError] = {}
        for name, task in tasks.items():
            if not task.done():
                task.cancel()
                failures[name] = NoAnswerError(None, "")
            elif isinstance(error := task.exception(), NoAnswerError):
                failures[name] = error
            else:
                answers[name] = task.result()
        await self._close(failures)
        return answers, failures

    async def aclose(self) -> None:
        """Close the connections to all hosts."""
        await self._close(tuple(self._connections))

    async def _close(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self._connections.pop(name).close() for name in names))


class _HostConnection:
    """A process on one host, started by the first question, that answers poprun's questions about the host."""

    def __init__(self, command: Sequence[str]) -> None:
        self.first_answer_seconds = 0.0  # time until the first answer; 0 before the first answer
        self._command = command
        self._process: Process | None = None

    async def ask(self, question: Answer) -> Answer:
        """Return the host's answer to ``question``. Raises NoAnswerError if the host does not answer."""
        began_at_seconds = time.monotonic()
        process = self._process or await self._start()
        stream, output, complaints = _streams(process)
        stream.write(json.dumps(question).encode() + b"\n")
        with suppress(ConnectionError, ValueError):  # a ValueError means that the output is not an answer
            while line := await output.readline():
                _, mark, text = line.decode(errors="replace").partition(remote_side.MARK)
                if mark:
                    answer = dict(json.loads(text))
                    self.first_answer_seconds = self.first_answer_seconds or time.monotonic() - began_at_seconds
                    return answer
        complaint = await complaints.read(_MAX_COMPLAINT_BYTES)
        raise NoAnswerError(await process.wait(), complaint.decode(errors="replace").strip())

    async def close(self) -> None:
        """Kill the local processes (ssh and its ProxyJump); the remote process ends when its input ends."""
        if self._process is not None:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _start(self) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_MAX_LINE_BYTES, start_new_session=True
            )
        except OSError as error:
            raise NoAnswerError(127, f"{self._command[0]}: {error.strerror}") from None
        self._process = process
        _streams(process)[0].write(f"{len(_PROGRAM)}\n".encode() + _PROGRAM)
        return process


def _streams(process: Process) -> tuple[StreamWriter, StreamReader, StreamReader]:
    """Return the standard input, output and error of a process that was started with pipes."""
    return cast("tuple[StreamWriter, StreamReader, StreamReader]", (process.stdin, process.stdout, process.stderr))
