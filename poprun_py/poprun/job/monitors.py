"""The monitors of a job, programs that show the job to users: their connections, and the views they are sent.

poprun disconnects a monitor that does not read, so that a monitor never delays the job.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from poprun.job.record import Record
from poprun.launch.messages.control import Link, encode
from poprun.launch.messages.view import InstanceView, JobView
from poprun.launch.process.process_tree import key_of, reap
from poprun.launch.process.spawn import ProcessStart, start_process
from poprun.observe.account.curves import count_steps
from poprun.observe.account.state import InstanceStatus
from poprun.plan.plan import LaunchPlan

_VIEW_SECONDS: Final = 0.5
_MAX_LINE: Final = 200
_MAX_TEXT: Final = 32 * 1024  # a socket can buffer a text of this size and a view
_STDERR: Final = 2
_LEAVE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.01


def job_view(record: Record, last_line: Callable[[int], str], now_seconds: float) -> JobView:
    """Return a job's present state for monitors; ``last_line(instance)`` is the instance's last line of output."""
    plan, identity = record.plan, record.identity
    return JobView(
        pid=os.getpid(),
        job_id=identity.job_id,
        restart_count=identity.restart_count,
        phase=record.phase.name.lower(),
        seconds=now_seconds - identity.began_at_seconds,
        program=plan.program,
        num_replicas=plan.num_replicas,
        parallelism=plan.parallelism,
        instances=tuple(_instance_view(status, plan, last_line(status.index)) for status in record.statuses),
        slow=_slow(record),
    )


def is_of_one_moment(statuses: Sequence[InstanceStatus]) -> bool:
    """Whether the newest measurements of all running instances were made within half a second of each other."""
    moments = [it.usage.at_seconds for it in statuses if it.usage is not None and it.exit_code is None]
    return not moments or max(moments) - min(moments) < _VIEW_SECONDS


def _slow(record: Record) -> str:
    """Return a text that names the slow instance or network link that delays the others; empty if none does."""
    watch = record.performance
    slowness = None if watch is None else watch.lasting or watch.slow_link
    return "" if slowness is None else slowness.text


def _instance_view(status: InstanceStatus, plan: LaunchPlan, last_line: str) -> InstanceView:
    usage, progress = status.usage, status.progress
    return InstanceView(
        index=status.index,
        host=plan.instance(status.index).host,
        state=status.state,
        exit_code=status.exit_code,
        looked_at_seconds=None if usage is None else usage.at_seconds,
        num_steps=count_steps(status),
        step=None if progress is None else progress.step,
        loss=None if progress is None else progress.loss,
        waits_in=progress.collective if progress is not None and status.is_waiting else "",
        cpu_seconds=None if usage is None else usage.cpu_seconds,
        memory_bytes=None if usage is None else usage.memory_bytes,
        last_line=last_line[:_MAX_LINE],
    )


class Viewers:
    """poprun's connections to monitors, the programs that show a running job to users."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._next_seconds = 0.0
        self._unsent_text = ""

    def add_text(self, text: str) -> bool:
        """Add ``text``, cut if too long, to the next update for all monitors. Return False without monitors."""
        if not self._links:
            return False
        self._unsent_text = f"{self._unsent_text}{text}\n"[:_MAX_TEXT]
        self._next_seconds = 0.0
        return True

    def add(self, link: Link) -> None:
        """Add the monitor that is connected by ``link``, so that it also gets each update of the job's state."""
        link.connection.setblocking(False)  # noqa: FBT003 - it takes no keywords
        self._links.append(link)
        self._next_seconds = 0.0

    def close(self) -> None:
        """Close the connections to all monitors."""
        for link in self._links:
            link.close()
        self._links = []

    def send_view(self, record: Record, last_line: Callable[[int], str], now_seconds: float) -> None:
        """Send the job's state to all monitors if an update is due; disconnect monitors that do not read."""
        wait_seconds = 0.0 if is_of_one_moment(record.statuses) else _VIEW_SECONDS
        if not self._links or now_seconds < self._next_seconds + wait_seconds:
            return
        self._next_seconds = now_seconds + _VIEW_SECONDS
        view = replace(job_view(record, last_line, now_seconds), said=self._unsent_text.rstrip("\n"))
        self._unsent_text = ""
        data = encode(view.to_message())
        for link in tuple(self._links):
            try:
                is_whole = link.connection.send(data, socket.MSG_NOSIGNAL) == len(data)
            except OSError:
                is_whole = False
            if not is_whole:
                self._links.remove(link)
                link.close()


class MonitorProcess:
    """The process of the option `--monitor`, which shows this job on the terminal until poprun disconnects it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        command = (sys.executable, "-P", "-m", "poprun.observe.show.monitor.top", str(os.getpid()))
        streams = (null, _STDERR, _STDERR)
        pid = start_process(ProcessStart(command, os.getcwd(), environ, streams, signal.SIGTERM))
        os.close(null)
        self._key = key_of(pid)

    def wait(self) -> None:
        """Wait at most 2 s until the monitor has cleared what it drew on the terminal, and has ended."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._key is not None and key_of(self._key.pid) == self._key and time.monotonic() < deadline:
            for _ in reap():
                pass
            time.sleep(_POLL_SECONDS)
