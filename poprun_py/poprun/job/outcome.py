"""The outcome of an attempt: how it ended, which failure was the first, and poprun's exit code. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poprun.errors import OutputError
from poprun.job.state import AGENT_KILLED, HOST_LOST, SHIM_KILLED, InstanceStatus, shell_code

if TYPE_CHECKING:
    from poprun.job.report.findings import Findings

_LAUNCH_FAILED: Final = 70
_TIMED_OUT: Final = 124
_LEFT: Final = 128 + signal.SIGTERM
_HUNG: Final = 75
"""EX_TEMPFAIL of sysexits.h: another try may go well."""

_LET_DOWN: Final = {HOST_LOST: -1, AGENT_KILLED: 1, SHIM_KILLED: 2}
"""Programs fail because their host or another is lost, not the other way round."""

_LOST: Final = {HOST_LOST: 68, AGENT_KILLED: shell_code(-signal.SIGKILL)}
"""Exit codes of poprun; 68 is EX_NOHOST of sysexits.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of one attempt of a job."""

    statuses: Sequence[InstanceStatus]  # every instance, by index
    num_interrupts: int = 0  # times that Ctrl-C was pressed
    is_terminated: bool = False  # whether poprun was asked to end
    is_output_closed: bool = False  # whether nobody read poprun's output any more, or it could not be written
    is_output_lost: bool = False  # whether it could not be written although somebody would have read it
    is_timed_out: bool = False  # whether the job was stopped because it took too long
    is_hung: bool = False  # whether it was stopped because no instance made progress
    started_at_epoch_seconds: float = 0.0  # when it began, in seconds since 1970
    seconds: float = 0.0  # how long it took
    launcher_code: int | None = None  # exit code of the launcher, negative for a signal; None while it runs
    has_started: bool = True  # whether the programs were ever told to start
    launcher_ended_early: bool = False  # whether the launcher was gone before its instances
    stop_reason: str = ""  # why poprun stopped the job; empty when it ended by itself
    survivors: tuple[int, ...] = ()  # process ids that even SIGKILL did not end
    interrupted: tuple[int, ...] = ()  # instances whose tracebacks of KeyboardInterrupt were not shown, ascending
    # what there is to say of a job that did not end well; None for one that did
    findings: "Findings | None" = None

    @property
    def has_joined(self) -> bool:
        """Whether an instance asked popdist which job it is in."""
        return any(status.progress is not None and status.progress.has_joined for status in self.statuses)

    @property
    def lone_instances(self) -> tuple[int, ...]:
        """The instances that trained although nothing connected them to others; none in a job of one."""
        if len(self.statuses) == 1:
            return ()
        pages = ((status.index, status.progress) for status in self.statuses)
        return tuple(index for index, page in pages if page is not None and page.has_trained_alone)


def first_failure(statuses: Sequence[InstanceStatus]) -> InstanceStatus | None:
    """The instance that failed first, or None. One that failed by itself comes before one that was let down."""
    failed = [status for status in statuses if status.has_failed]
    return min(
        failed,
        key=lambda status: (_LET_DOWN.get(status.problem, 0), status.exited_at_seconds or 0.0),
        default=None,
    )


def has_left(end: JobEnd) -> bool:
    """Whether the program ended with 143 by itself, as those do that save and leave when they are asked to."""
    failed = first_failure(end.statuses)
    return failed is not None and failed.exit_code == _LEFT and not failed.problem and not failed.was_stopped


def exit_code(end: JobEnd) -> int:
    """The exit code of poprun itself."""
    failed = first_failure(end.statuses)
    if end.is_timed_out:
        return _TIMED_OUT
    if end.is_hung:
        return _HUNG
    if failed is not None and failed.exit_code and not failed.was_stopped:
        return shell_code(failed.exit_code)
    if failed is not None and (failed.problem in _LOST or not end.launcher_code):
        return _LOST.get(failed.problem, shell_code(-signal.SIGKILL) if end.has_started else _LAUNCH_FAILED)
    if end.num_interrupts and not end.has_started:  # Ctrl-C may have ended the launcher before it had a session
        return shell_code(-signal.SIGINT)
    if (failed is not None or end.launcher_ended_early) and end.launcher_code:
        return shell_code(end.launcher_code) if end.has_started else _LAUNCH_FAILED
    if end.num_interrupts:
        return shell_code(-signal.SIGINT)
    if end.is_terminated:
        ended_well = end.has_started and all(status.exit_code == 0 for status in end.statuses)
        return 0 if ended_well else shell_code(-signal.SIGTERM)
    if end.is_output_closed:
        return OutputError.exit_code if end.is_output_lost else shell_code(-signal.SIGPIPE)
    return _LAUNCH_FAILED if end.stop_reason else 0
