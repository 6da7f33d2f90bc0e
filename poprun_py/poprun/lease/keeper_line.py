"""The line from poprun to the process that keeps a job's lease on one host (`host_keeper`)."""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Final, Self

from popdist import contract
from poprun import errors
from poprun.errors import HostsError, PoprunError
from poprun.hosts.routes import kept_words
from poprun.messages.control import RECEIVE_BYTES, LineReader
from poprun.plan.settings import RemoteSettings
from poprun.pool.records import KEEPER_MARK
from poprun.text import screen

_COMPLAINT_SECONDS: Final = 1.0
_PING_SECONDS: Final = 10.0
_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(contract.__file__)))
_FILE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "host_keeper.py")
_COMMAND: Final = (sys.executable, "-I", _FILE, _FOLDER)
_MARK: Final = KEEPER_MARK.encode()

Message = dict[str, Any]


class Keeper:
    """The process that keeps the lease on one host, at the other end of a line.

    Args:
        host: What the plan calls the host.
        remote: How it is reached; None for the machine that poprun runs on.
    """

    def __init__(self, host: str, remote: RemoteSettings | None) -> None:
        self.host = host
        self._lines = LineReader()
        self._heard: list[bytes] = []
        self._holds = False
        words = _COMMAND if remote is None else kept_words(remote.ssh_config, remote.slurm_job, host, _COMMAND)
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise HostsError(f"{words[0]}: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """The process here that leads there."""
        return self._process.pid

    def say(self, message: Message) -> Self:
        """Send a line; whether somebody reads it shows when an answer is waited for."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
        return self

    def take(self, until: float | None) -> Message:
        """Have it take what the job needs; what it was given.

        Raises:
            PoprunError: What the pool there answers.
            HostsError: If nobody answers, before the monotonic time ``until`` if there is one.
        """
        granted = self.say({"order": "take"}).answer("held", until)
        self._holds = True
        return granted

    def answer(self, wanted: str, until: float | None) -> Message:
        """The next message that has ``wanted``; what is told meanwhile goes to the user.

        Raises:
            PoprunError: If it is an error.
            HostsError: If none comes, before the monotonic time ``until`` if there is one.
        """
        while True:
            message = self._hear(until)
            if wanted in message:
                return message
            if "told" in message:
                screen.tell(f"host {self.host}: {message['told']}")
            elif "error" in message:
                kind = getattr(errors, message["kind"], PoprunError)
                raise kind(f"host {self.host}: {message['error']}")

    def is_there(self) -> bool:
        """Whether it still keeps what it took."""
        try:
            self.say({"order": "ping"}).answer("here", time.monotonic() + _PING_SECONDS)
        except PoprunError:
            return False
        return True

    def release(self) -> None:
        """Have it give back what it holds, and hang up."""
        if self._holds:
            self.say({"order": "release"})
            self._holds = False
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self, until: float) -> None:
        """See that it has gone, before the monotonic time ``until``."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _hear(self, until: float | None) -> Message:
        while not self._heard:
            lines, _ = self._lines.feed(self._read(until))
            self._heard += [line for line in lines if _MARK in line]
        message: Message = json.loads(self._heard.pop(0).partition(_MARK)[2])
        return message

    def _read(self, until: float | None) -> bytes:
        stream = self._process.stdout
        if stream is None:
            return b""
        patience = None if until is None else max(0.0, until - time.monotonic())
        readable, _, _ = select.select([stream], [], [], patience)
        data = os.read(stream.fileno(), RECEIVE_BYTES) if readable else b""
        if not data:
            how = "does not answer" if not readable else f"hung up{self._complaint()}"
            raise HostsError(
                f"host {self.host}: who keeps its virtual IPUs {how}: see that this works: ssh {self.host} true"
            )
        return data

    def _complaint(self) -> str:
        """The last line of what ssh, or the process itself, had to complain of."""
        stream = self._process.stderr
        if stream is None or not select.select([stream], [], [], _COMPLAINT_SECONDS)[0]:
            return ""
        lines = os.read(stream.fileno(), RECEIVE_BYTES).decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f" ({words[-1]})" if words else ""
