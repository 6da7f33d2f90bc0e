"""How fast a job is: what two views of it, a little apart, say together. Pure."""

from dataclasses import dataclass

from poprun.messages.view import InstanceView, JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast an instance is.

    Attributes:
        steps_per_second: Optimizer steps, or reported ones; None when it is not known.
        cpu_share: Processors that its processes keep busy, 1.0 for one; None when it is not known.
    """

    steps_per_second: float | None = None
    cpu_share: float | None = None


def rates(before: JobView | None, after: JobView) -> list[Rate]:
    """The rate of each instance between two views of one job; unknown across a restart and with one view only."""
    if before is None or before.restart_count != after.restart_count:
        return [Rate()] * len(after.instances)
    return [_rate(old, new) for old, new in zip(before.instances, after.instances, strict=True)]


def _rate(before: InstanceView, after: InstanceView) -> Rate:
    """What happened between the two looks that the views tell of."""
    if before.looked_at_seconds is None or after.looked_at_seconds is None:
        return Rate()
    seconds = after.looked_at_seconds - before.looked_at_seconds
    num_steps = _steps(after) - _steps(before)
    cpu_seconds = (after.cpu_seconds or 0.0) - (before.cpu_seconds or 0.0)
    if seconds <= 0 or num_steps < 0 or cpu_seconds < 0:
        return Rate()
    return Rate(steps_per_second=num_steps / seconds if _steps(after) else None, cpu_share=cpu_seconds / seconds)


def _steps(view: InstanceView) -> int:
    return view.num_steps or view.step or 0
