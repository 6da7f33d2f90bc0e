"""What is known of one attempt of a job: it takes note of what happens and tells how things stand.

It touches nothing: whoever keeps the record passes the clock's readings in.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from popdist.contract import Endpoint
from poprun.job.events import after_event
from poprun.job.hangs import HangWatch
from poprun.job.launcher_processes import StartWatch
from poprun.job.orders import JobIdentity
from poprun.job.report.outcome import first_failure
from poprun.job.signals import SignalBox
from poprun.job.state import InstanceState, InstanceStatus, JobSnapshot, Phase
from poprun.messages.view import InstanceView
from poprun.plan.plan import LaunchPlan

if TYPE_CHECKING:
    from poprun.messages.view import JobView

_MAX_LINE: Final = 200


def instance_views(
    plan: LaunchPlan, statuses: Sequence[InstanceStatus], last_line: Callable[[int], str]
) -> tuple[InstanceView, ...]:
    """The instances of a job as a monitor sees them; ``last_line`` tells what one printed last."""
    return tuple(_instance_view(status, plan, last_line(status.index)) for status in statuses)


def _instance_view(status: InstanceStatus, plan: LaunchPlan, last_line: str) -> InstanceView:
    usage, progress = status.usage, status.progress
    is_waiting = progress is not None and progress.waiting_since_seconds is not None
    return InstanceView(
        index=status.index,
        host=plan.instance(status.index).host,
        state=status.state,
        exit_code=status.exit_code,
        looked_at_seconds=None if usage is None else usage.at_seconds,
        num_steps=0 if progress is None else progress.num_steps,
        step=None if progress is None else progress.step,
        loss=None if progress is None else progress.loss,
        waits_in=progress.collective if progress is not None and is_waiting else "",
        cpu_seconds=None if usage is None else usage.cpu_seconds,
        memory_bytes=None if usage is None else usage.memory_bytes,
        last_line=last_line[:_MAX_LINE],
    )


class Record:
    """One attempt, so far.

    Args:
        plan: The job.
        identity: Which job this is, and which attempt of it.
        now_seconds: Monotonic time at which the attempt began.

    Attributes:
        statuses: Every instance, by index.
        phase: How far the attempt has come.
        meeting: Where torch's own store and popdist's will listen, once instance 0's agent has reported.
        reported: The process ids of the agents that have reported, and of their shims.
        began_at_seconds: Monotonic time at which the attempt began.
        has_started: Whether the programs were told to start.
        hang_watch: Whether instances wait while nobody gets on.
        is_timed_out: Whether it is stopped because the job takes too long.
        is_hung: Whether it is stopped because nobody gets on.
        stop_reason: Why poprun stops it; empty when it does not.
    """

    def __init__(self, plan: LaunchPlan, identity: JobIdentity, now_seconds: float) -> None:
        self._plan = plan
        self._identity = identity
        self._phase_since_seconds = now_seconds
        self.statuses = [InstanceStatus(index=index) for index in range(plan.num_instances)]
        self.phase = Phase.STARTING
        self.meeting: list[Endpoint] = []
        self.reported: set[int] = set()
        self.began_at_seconds = now_seconds
        self.has_started = False
        self.hang_watch = HangWatch()
        self.is_timed_out = False
        self.is_hung = False
        self.stop_reason = ""

    def note(self, instance: int, event: dict[str, Any], now_seconds: float) -> None:
        """Take note of what an agent said; the clocks of other hosts show other times."""
        if event["event"] == "exited" and self._identity.network is not None:
            event = {**event, "at_seconds": now_seconds}
        self.statuses[instance] = after_event(self.statuses[instance], event, self.phase, now_seconds)
        if event["event"] == "hello":
            self.reported |= {event["shim"], event["pid"]}
            if instance == 0:
                self.meeting = [Endpoint(host=event["address"], port=port) for port in event["ports"]]

    def enter(self, phase: Phase, now_seconds: float) -> None:
        """Take note of a new phase."""
        self.phase = phase
        self._phase_since_seconds = now_seconds

    def give_up_awaited(self) -> None:
        """Take note that agents which have not reported are not waited for any more."""
        for index, status in enumerate(self.statuses):
            if status.state is InstanceState.AWAITED:
                self.statuses[index] = replace(status, state=InstanceState.ENDED)

    def snapshot(
        self,
        signals: SignalBox,
        start_watch: StartWatch,
        *,
        awaits_stacks: bool,
        has_launcher_ended: bool,
        now_seconds: float,
    ) -> JobSnapshot:
        """All that the policy may look at."""
        failed = first_failure(self.statuses)
        return JobSnapshot(
            phase=self.phase,
            in_phase_seconds=now_seconds - self._phase_since_seconds,
            in_job_seconds=now_seconds - self._identity.began_at_seconds,
            num_instances=len(self.statuses),
            num_ready=sum(status.state is InstanceState.READY for status in self.statuses),
            num_ended=sum(status.state is InstanceState.ENDED for status in self.statuses),
            failed_instance=None if failed is None else failed.index,
            num_interrupts=signals.num_interrupts,
            is_terminated=signals.is_terminated,
            is_output_closed=signals.is_output_closed,
            hang_seconds=self.hang_watch.idle_seconds,
            is_hang_told=self.hang_watch.is_told,
            awaits_stacks=awaits_stacks,
            has_lost_shim=start_watch.has_lost_one,
            no_shim_seconds=start_watch.idle_seconds,
            has_launcher_ended=has_launcher_ended,
        )

    def view(self, last_line: Callable[[int], str], now_seconds: float) -> "JobView":
        """What a monitor is shown; ``last_line`` tells what an instance printed last."""
        from poprun.messages.view import JobView  # noqa: PLC0415 - as above

        return JobView(
            pid=os.getpid(),
            job_id=self._identity.job_id,
            restart_count=self._identity.restart_count,
            phase=self.phase.name.lower(),
            seconds=now_seconds - self._identity.began_at_seconds,
            program=self._plan.program,
            num_replicas=self._plan.num_replicas,
            instances=instance_views(self._plan, self.statuses, last_line),
        )
