"""Runs the process of a part with a deadline, and ends whatever it started.

Processes that a part starts inherit a mark in their environment. So they are found also if they left its group.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from gpu_check.outcomes import ProcessEnd

MARK: Final = "GPU_CHECK_MARK"

STOP_SECONDS: Final = 4.0
"""How long processes have after SIGTERM until SIGKILL; part of the time that a part has."""

LEAVE_SECONDS: Final = 2.0
"""How long processes that a part started may end after the part itself."""

_POLL_SECONDS: Final = 0.05


def run(words: Sequence[str], seconds: float, environment: Mapping[str, str], log: Path) -> ProcessEnd:
    """Run a command as a process group of its own, for at most ``seconds``; its output is appended to ``log``."""
    mark, begin = uuid4().hex, time.monotonic()
    with log.open("ab") as output:
        first_byte = output.tell()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark},
            start_new_session=True,
        )
        code: int | None = None
        num_left = 0
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(max(seconds - STOP_SECONDS, 0.0))
            if code is not None:
                num_left = len(_remaining(mark, LEAVE_SECONDS))
        finally:
            end_all(process, mark)
    return ProcessEnd(
        code=code, seconds=time.monotonic() - begin, num_left=num_left, last_line=_last_line(log, first_byte)
    )


def end_all(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End the group of ``process`` and every process with ``mark``: SIGTERM, a deadline, SIGKILL."""
    _signal_group(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    _remaining(mark, STOP_SECONDS / 2 if process.poll() is not None else 0.0)
    _signal_group(process, signal.SIGKILL)
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _remaining(mark: str, seconds: float) -> list[int]:
    """Return the processes with ``mark`` that have not ended after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        pids = marked(mark)
        if not pids:  # a process that begins another program has no environment for a moment
            time.sleep(_POLL_SECONDS)
            pids = marked(mark)
        if not pids or time.monotonic() >= deadline:
            return pids
        time.sleep(_POLL_SECONDS)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment holds ``mark``."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdecimal() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _last_line(log: Path, first_byte: int) -> str:
    with log.open("rb") as written:
        written.seek(first_byte)
        lines = written.read().decode(errors="replace").split("\n")
    return next((it.strip() for it in reversed(lines) if it.strip()), "")
