"""The end of one attempt of a job: which failure ended it, and the exit code of poprun."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Final

from popdist.ground.values import dataclass
from poprun.errors import OutputError
from poprun.observe.account.state import (
    AGENT_FROZEN,
    AGENT_KILLED,
    HOST_LOST,
    OWN_NETWORK_LOST,
    RUNTIME_KILLED,
    SHIM_KILLED,
    InstanceStatus,
    shell_code,
)

if TYPE_CHECKING:
    from poprun.launch.messages.clock import Exchange
    from poprun.observe.account.curves import JobCurves
    from poprun.observe.account.evidence import InstanceEvidence
    from poprun.observe.account.judgements import Slowness, Verdict
    from poprun.observe.judge.findings import Findings

_LAUNCH_FAILED: Final = 70
_TIMED_OUT: Final = 124
_LEFT: Final = 128 + signal.SIGTERM
_HUNG: Final = 75  # EX_TEMPFAIL of sysexits.h: another attempt may succeed
_ORDER_OF_PROBLEMS: Final = {
    OWN_NETWORK_LOST: -1,
    HOST_LOST: -1,
    AGENT_KILLED: 1,
    AGENT_FROZEN: 1,
    RUNTIME_KILLED: 1,
    SHIM_KILLED: 2,
}
"""For each problem its place in the order of failures; a program's own failure has the place 0.

A lost host causes failures of programs. A lost agent, launcher or shim is rather a result of a program's failure.
"""

_LOST: Final = {
    HOST_LOST: 68,
    OWN_NETWORK_LOST: 68,
    AGENT_KILLED: shell_code(-signal.SIGKILL),
    AGENT_FROZEN: shell_code(-signal.SIGKILL),
}
"""The exit code of poprun for each problem of an instance; 68 is EX_NOHOST of sysexits.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end, or the present state, of an attempt of a job: the status of each instance, and why it ended."""

    statuses: Sequence[InstanceStatus]  # every instance, by index
    num_interrupts: int = 0  # times that Ctrl-C was pressed
    is_terminated: bool = False  # whether poprun was asked to end
    is_output_closed: bool = False  # whether nobody read poprun's output any more, or it could not be written
    is_output_lost: bool = False  # whether the output could not be written for another reason than a closed pipe
    is_timed_out: bool = False  # whether the job was stopped because it took too long
    is_hung: bool = False  # whether the job was stopped because no instance made progress
    started_at_epoch_seconds: float = 0.0  # when the attempt began, in seconds since 1970
    began_at_seconds: float = 0.0  # when the attempt began, as monotonic time
    seconds: float = 0.0  # duration of the attempt
    launcher_code: int | None = None  # exit code of the launcher, negative for a signal; None while it runs
    has_told_lone: bool = False  # whether the user was told of instances that train alone
    has_started: bool = True  # whether poprun ordered the programs to start
    launcher_ended_early: bool = False  # whether the launcher ended before its instances
    stop_reason: str = ""  # why poprun stopped the job; empty when it ended by itself
    survivors: tuple[int, ...] = ()  # process ids that even SIGKILL did not end
    interrupted: tuple[int, ...] = ()  # instances whose tracebacks of KeyboardInterrupt were not shown, ascending
    evidence: Mapping[int, "InstanceEvidence"] = field(default_factory=dict)  # evidence of instances, by index
    is_over: bool = True  # False if the attempt still runs, and this is only its present state
    curves: "JobCurves | None" = None  # measurements over time; None if nobody asked for measurements
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)  # last printed lines, by index
    verdict_of_hang: "Verdict | None" = None  # the verdict, if the job was stopped because of a hang
    warnings: Sequence[str] = ()  # such as memory that grows without end, or a rank that validates alone
    slowdowns: Sequence["Slowness"] = ()  # the slow instances, by time
    waiting_seconds: Mapping[int, float] = field(default_factory=dict)  # waits for the slowest, by instance
    clock_rounds: Mapping[str, Sequence["Exchange"]] = field(default_factory=dict)  # exchanges of clocks, by host
    findings: "Findings | None" = None  # findings on a job that did not end well

    @property
    def has_joined(self) -> bool:
        """Whether any of the job's programs has called popdist, or has started JAX by itself."""
        pages = [status.progress for status in self.statuses if status.progress is not None]
        return any(page.has_joined or page.uses_jax for page in pages)


def num_lone(statuses: Sequence[InstanceStatus]) -> int:
    """Return the number of instances that trained without a connection to others; 0 if there is one instance."""
    pages = [status.progress for status in statuses]
    return sum(page is not None and page.has_trained_alone for page in pages) if len(pages) > 1 else 0


def first_failure(statuses: Sequence[InstanceStatus]) -> InstanceStatus | None:
    """Return the status of the failed instance that is first by :func:`order_of_failure`; None if none failed."""
    return min((status for status in statuses if status.has_failed), key=order_of_failure, default=None)


def order_of_failure(status: InstanceStatus) -> tuple[int, float]:
    """Return a sort key for failures: lost hosts first, then programs, then poprun's own processes; by time."""
    return _ORDER_OF_PROBLEMS.get(status.problem, 0), status.exited_at_seconds or 0.0


def failure_at_fault(end: JobEnd) -> InstanceStatus | None:
    """Return the status of the instance whose failure is at fault for the job's end; None if none failed."""
    failed = first_failure(end.statuses)
    culprits = end.findings.verdict.culprits if end.findings is not None else ()
    if failed is None or failed.index in culprits:
        return failed
    return next((end.statuses[index] for index in culprits if end.statuses[index].has_failed), failed)


def has_left(end: JobEnd) -> bool:
    """Whether the first failed program ended with 143, which means that it saved its state after SIGTERM."""
    failed = first_failure(end.statuses)
    return failed is not None and failed.exit_code == _LEFT and not failed.problem and not failed.was_stopped


def failed_while_leaving(end: JobEnd) -> InstanceStatus | None:
    """Return the first instance that failed while poprun stopped the job after a request to end; None if none."""
    stopped = (status for status in end.statuses if end.is_terminated and status.was_stopped)
    failed = (status for status in stopped if (status.exit_code or 0) > 0 and status.exit_code != _LEFT)
    return min(failed, key=order_of_failure, default=None)


def exit_code(end: JobEnd) -> int:
    """Return the exit code with which poprun ends after an attempt with the end ``end``."""
    failed = failure_at_fault(end)
    if end.is_timed_out:
        return _TIMED_OUT
    if end.is_hung:
        return _HUNG
    if failed is not None and failed.exit_code and not failed.was_stopped:
        return shell_code(failed.exit_code)
    is_launchers = bool(end.launcher_code) and not (end.findings and end.findings.has_launcher_followed)
    if failed is not None and (failed.problem in _LOST or not is_launchers):
        return _LOST.get(failed.problem, shell_code(-signal.SIGKILL) if end.has_started else _LAUNCH_FAILED)
    if end.num_interrupts and not end.has_started:  # Ctrl-C may have ended the launcher before it had a session
        return shell_code(-signal.SIGINT)
    if (failed is not None or end.launcher_ended_early) and end.launcher_code:
        return shell_code(end.launcher_code) if end.has_started else _LAUNCH_FAILED
    if end.num_interrupts:
        return shell_code(-signal.SIGINT)
    if end.is_terminated:
        return _code_of_leaving(end)
    if end.is_output_closed:
        return OutputError.exit_code if end.is_output_lost else shell_code(-signal.SIGPIPE)
    return _LAUNCH_FAILED if end.stop_reason else 0


def _code_of_leaving(end: JobEnd) -> int:
    """Return poprun's exit code after a request to end: of a failure, 0 if all ended well, else SIGTERM's code."""
    if (failed := failed_while_leaving(end)) is not None:
        return failed.exit_code or 0
    ended_well = end.has_started and all(status.exit_code == 0 for status in end.statuses)
    return 0 if ended_well else shell_code(-signal.SIGTERM)
