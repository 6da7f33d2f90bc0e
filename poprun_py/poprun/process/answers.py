"""Ask a program of this machine a question, for a bounded time.

Not with `subprocess`: importing it would cost each start of a job more than the usual question does.
"""

import os
import select
import signal
import time
from collections.abc import Sequence

from poprun.process.start import ProcessStart, start_process

_READ_BYTES = 64 * 1024


def answer_of(words: Sequence[str], timeout_seconds: float) -> str | None:
    """What a program prints on both of its streams.

    Args:
        words: Its argv.
        timeout_seconds: How long it may take; then it is killed.

    Returns:
        Its words, or None when it cannot be run, fails, or takes too long.
    """
    deadline_seconds = time.monotonic() + timeout_seconds
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = start_process(ProcessStart(words, "/", os.environ, (null, writer, writer), signal.SIGKILL))
    except OSError:
        os.close(reader)
        return None
    finally:
        os.close(writer)
        os.close(null)
    end = os.pidfd_open(pid)
    answer = _read_all(reader, deadline_seconds)
    if not _is_ready(end, deadline_seconds):
        os.killpg(pid, signal.SIGKILL)
    for descriptor in (reader, end):
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    return answer.decode(errors="replace") if status == 0 else None


def _read_all(reader: int, deadline_seconds: float) -> bytes:
    answer = b""
    while _is_ready(reader, deadline_seconds) and (data := os.read(reader, _READ_BYTES)):
        answer += data
    return answer


def _is_ready(descriptor: int, deadline_seconds: float) -> bool:
    return bool(select.select((descriptor,), (), (), max(0.0, deadline_seconds - time.monotonic()))[0])
