"""The status of an instance after an event of its agent. Pure."""

import errno
import os
from dataclasses import replace
from typing import Any, Final

from popdist.progress import Progress
from poprun.job.state import (
    AGENT_KILLED,
    HOST_LOST,
    NOT_BOUND,
    NOT_EXECUTABLE,
    NOT_FOUND,
    SHIM_KILLED,
    InstanceState,
    InstanceStatus,
    Phase,
    Usage,
)
from poprun.text.ranges import fold_numbers

LOST: Final = "lost"
"""The event that poprun makes up when an agent's connection closes."""

_NO_PROGRAM: Final = "it is neither a program for this machine nor a script that begins with #!"


def after_event(status: InstanceStatus, event: dict[str, Any], phase: Phase, now_seconds: float) -> InstanceStatus:
    """The status of an instance after one event of its agent, which is ``LOST`` when its connection closed.

    A death that comes after a stop order is no failure, so ``phase`` says how far the job has come.
    """
    kind = event["event"]
    is_over = status.state is InstanceState.ENDED
    if kind == "hello":
        return replace(status, state=InstanceState.READY)
    if kind == "started":
        return replace(status, state=InstanceState.RUNNING, started_at_seconds=now_seconds)
    if kind == "stats":
        return _after_stats(status, event, now_seconds)
    if kind == "exited":
        return _after_exit(status, event, phase)
    if kind in _FAILURES:
        exit_code, problem = _FAILURES[kind](event)
        ended = replace(status, state=InstanceState.EXITED, exit_code=exit_code, problem=problem)
        return replace(ended, exited_at_seconds=now_seconds)
    if kind == "shim_lost" and phase < Phase.INTERRUPTED and not is_over:
        return _with_problem(status, SHIM_KILLED, now_seconds)
    if kind == "ended":
        return replace(status, state=InstanceState.ENDED)
    if kind == LOST and not is_over:
        ended = replace(status, state=InstanceState.ENDED)
        problem = HOST_LOST if event["is_silent"] else AGENT_KILLED
        return ended if phase >= Phase.STOPPING else _with_problem(ended, problem, now_seconds)
    return status


def _after_stats(status: InstanceStatus, event: dict[str, Any], now_seconds: float) -> InstanceStatus:
    if "memory_bytes" in event:
        usage = Usage(
            at_seconds=now_seconds,
            memory_bytes=event["memory_bytes"],
            cpu_seconds=event["cpu_seconds"],
            num_processes=event["num_processes"],
        )
        status = replace(status, usage=usage, memory=status.memory.after(now_seconds, usage.memory_bytes))
    progress = Progress.read(bytes.fromhex(event["progress"]))
    if progress is None or progress == status.progress:
        return status
    return replace(status, progress=progress, progressed_at_seconds=now_seconds)


def _after_exit(status: InstanceStatus, event: dict[str, Any], phase: Phase) -> InstanceStatus:
    return replace(
        status,
        state=InstanceState.EXITED,
        exit_code=event["code"],
        exited_at_seconds=event["at_seconds"],
        was_stopped=phase is Phase.INTERRUPTED or event["was_stopped"],
        memory=status.memory.with_peak(event["peak_bytes"]),
    )


def _failed_start(event: dict[str, Any]) -> tuple[int, str]:
    number = event["errno"]
    reason = _NO_PROGRAM if number == errno.ENOEXEC else os.strerror(number)
    return NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE, f"cannot run {event['place']}: {reason}"


def _failed_binding(event: dict[str, Any]) -> tuple[int, str]:
    return NOT_BOUND, (
        f"cannot be bound to cores {fold_numbers(sorted(event['cores']))}, not all of which are to be had here "
        f"({os.strerror(event['errno'])}): make the plan on such a machine, or use --process-placement disabled"
    )


def _lost_lease(event: dict[str, Any]) -> tuple[int, str]:
    reason = os.strerror(event["errno"])
    return NOT_BOUND, f"who kept the job's lease on this host has ended ({reason}): start it again"


_FAILURES: Final = {
    "failed_to_start": _failed_start,
    "failed_to_hold": _lost_lease,
    "failed_to_bind": _failed_binding,
}
"""The exit code and the problem of an instance whose program has not come to life, by event."""


def _with_problem(status: InstanceStatus, problem: str, now_seconds: float) -> InstanceStatus:
    if status.problem or status.exit_code is not None:
        return status
    return replace(status, problem=problem, exited_at_seconds=status.exited_at_seconds or now_seconds)
