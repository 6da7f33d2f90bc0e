"""The supervisor's policy: a pure function that returns the next action for a snapshot of the job."""

import math
from enum import StrEnum
from typing import Final

from popdist.ground.values import dataclass
from poprun.observe.account.state import JobSnapshot, Phase
from poprun.plan.request import EndingSettings

_KILL_SECONDS: Final = 5.0  # time in which the kernel removes killed processes
_NO_SHIM_SECONDS: Final = 10.0  # how long the MPI runtime may take to start its first shim
_LOST_SHIM_SECONDS: Final = 1.0  # how long no other shim may be starting after the first shim has reported

_ESCALATION_SECONDS: Final = 1.0
"""An agent kills its process tree when the grace time is over; poprun orders the kill so many seconds later."""


class Action(StrEnum):
    """An action that poprun can take next while it watches a job, such as START, STOP or KILL."""

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
    """The action that poprun must take next, as :func:`decide` has chosen, and the reason, which poprun logs."""

    action: Action
    reason: str = ""


_WAIT: Final = Decision(Action.WAIT)


def decide(job: JobSnapshot, ending: EndingSettings) -> Decision:
    """Return what poprun must do next for a job in the state ``job``; ``ending`` has the job's time limits."""
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
    """Return the next action after an instance failed: wait for the cause, stop the job, or, if torch's flight
    recorder runs in other instances, ask them in which collective they wait.
    """
    if job.awaits_culprit:
        return _WAIT
    if job.has_recorders:
        return Decision(Action.ASK, f"instance {job.failed_instance} failed: where do the others stand?")
    return _WAIT if job.awaits_evidence else Decision(Action.STOP, f"instance {job.failed_instance} failed")


def _decide_hang(job: JobSnapshot, ending: EndingSettings) -> Decision:
    """Return the next action for a running job without failures: wait, report a hang, or stop a hung job."""
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
