"""What a monitor is shown of the instances. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

from poprun.job.state import InstanceStatus
from poprun.messages.view import InstanceView
from poprun.plan.plan import LaunchPlan

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
