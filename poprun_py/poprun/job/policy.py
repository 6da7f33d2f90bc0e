"""The policy: what to do next, a pure function of a snapshot and the plan's times."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from poprun.observe.account.state import JobSnapshot, Phase
from poprun.plan.request import EndingSettings

_KILL_SECONDS: Final = 5.0  # what the kernel gets to remove killed processes
_NO_SHIM_SECONDS: Final = 10.0  # how long the MPI runtime may take to start its first shim
_LOST_SHIM_SECONDS: Final = 1.0  # how long it may have no further shim under way once one has reported

_ESCALATION_SECONDS: Final = 1.0
"""An agent ends its tree by itself when the grace is over; poprun steps in this much later."""


class Action(StrEnum):
    """An action that the policy can decide on."""

    WAIT = "wait"
    START = "start"
    INTERRUPT = "interrupt"
    ASK = "ask"
    STOP = "stop"
    TIME_OUT = "time out"
    REPORT_HANG = "report a hang"
    STOP_HUNG = "stop the hung job"
    KILL = "kill"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, and the reason that is logged with it."""

    action: Action
    reason: str = ""


_WAIT: Final = Decision(Action.WAIT)


def decide(job: JobSnapshot, ending: EndingSettings) -> Decision:
    """The next action for a job."""
    if job.num_ended == job.num_instances:
        return Decision(Action.FINISH, "every instance has ended")
    if job.phase is Phase.KILLING:
        if job.in_phase_seconds >= _KILL_SECONDS:
            return Decision(Action.FINISH, "the agents do not answer")
        return _WAIT
    if job.num_interrupts > 1:
        return Decision(Action.KILL, "Ctrl-C was pressed again")
    if job.phase is Phase.STOPPING:
        if job.in_phase_seconds >= ending.stop_timeout_seconds + _ESCALATION_SECONDS:
            return Decision(Action.KILL, f"not ended {ending.stop_timeout_seconds:g} s after the request")
        return _WAIT
    return _decide_before_stop(job, ending)


def _decide_before_stop(job: JobSnapshot, ending: EndingSettings) -> Decision:
    if job.is_terminated:
        return Decision(Action.STOP, "poprun was asked to end")
    if job.is_output_closed:
        return Decision(Action.STOP, "nobody reads the output any more")
    if ending.timeout_seconds is not None and job.in_job_seconds >= ending.timeout_seconds:
        return Decision(Action.TIME_OUT, f"not over after --timeout {ending.timeout_seconds:g} s")
    if job.phase is Phase.INTERRUPTED:
        if job.in_phase_seconds >= ending.stop_timeout_seconds:
            return Decision(Action.STOP, f"not ended {ending.stop_timeout_seconds:g} s after Ctrl-C")
        return _WAIT
    if job.num_interrupts:
        action = Action.STOP if job.phase is Phase.STARTING else Action.INTERRUPT
        return Decision(action, "Ctrl-C was pressed")
    if job.failed_instance is not None:
        return _decide_failure(job)
    if job.has_launcher_ended:
        return Decision(Action.STOP, "the launcher has ended before its instances")
    if job.phase is Phase.STARTING:
        return _decide_start(job, ending)
    return _decide_hang(job, ending)


def _decide_failure(job: JobSnapshot) -> Decision:
    """Wait for an instance that may be about to end; ask the others where they stand; then stop all."""
    if job.awaits_culprit:
        return _WAIT
    if job.has_recorders:
        return Decision(Action.ASK, f"instance {job.failed_instance} failed: where do the others stand?")
    return _WAIT if job.awaits_evidence else Decision(Action.STOP, f"instance {job.failed_instance} failed")


def _decide_hang(job: JobSnapshot, ending: EndingSettings) -> Decision:
    """Report a hang before it ends the job, so that the user sees where the job stood."""
    if job.awaits_stacks or not job.hang_seconds:
        return _WAIT
    patience = min(filter(None, (ending.hang_report_seconds, ending.hang_timeout_seconds)), default=math.inf)
    if job.hang_seconds >= patience and not job.is_hang_told:
        return Decision(Action.REPORT_HANG, f"instances have waited for {job.hang_seconds:.0f} s")
    if job.is_hang_suspected or ending.hang_timeout_seconds is None:
        return _WAIT
    if job.hang_seconds >= ending.hang_timeout_seconds:
        return Decision(Action.STOP_HUNG, f"no progress for --hang-timeout {ending.hang_timeout_seconds:g} s")
    return _WAIT


def _decide_start(job: JobSnapshot, ending: EndingSettings) -> Decision:
    if job.num_ready == job.num_instances:
        return Decision(Action.START, "every agent has reported")
    if job.has_lost_shim:
        return Decision(Action.STOP, "a shim or an agent was killed before it had reported")
    if job.no_shim_seconds >= (_LOST_SHIM_SECONDS if job.num_ready else _NO_SHIM_SECONDS):
        return Decision(Action.STOP, f"the MPI runtime has started {job.num_ready} of {job.num_instances} shims")
    if job.in_phase_seconds >= ending.start_timeout_seconds:
        missing = job.num_instances - job.num_ready
        return Decision(Action.STOP, f"{missing} of {job.num_instances} agents have not reported")
    return _WAIT
