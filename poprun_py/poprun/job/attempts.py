"""A job and its restarts: attempt after attempt, until one ends well or there are no more.

The way of a job: `launching` starts the launcher of an attempt, and its `loop` hears the agents (`agents`) and the
user (`signals`); `record` takes note of what they tell; `policy` decides from a snapshot of it; the loop acts, by
the order that starts a program (`orders`), through the programs' streams (`output`), and by stopping. `outcome` is
the exit code. What only some jobs need is loaded when they do: `hangs` and `stacks`, `monitors`, `key_proofs`, and
`report` after a failure.
"""

import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poprun.errors import HostsError
from poprun.job.identity import JobIdentity
from poprun.job.launching import Launch
from poprun.job.loop import Attempt
from poprun.job.outcome import JobEnd, exit_code, first_failure, has_left
from poprun.job.signals import ReceivedSignals
from poprun.plan.plan import LaunchPlan
from poprun.text.screen import say

if TYPE_CHECKING:
    from poprun.hosts.routes import JobNetwork

_LONGEST_PAUSE_SECONDS: Final = 30.0

Look = Callable[[], "JobNetwork | None"]


def run_attempts(launch: Launch, signals: ReceivedSignals, verbosity: int, look: Look, ends: list[JobEnd]) -> int:
    """See the attempt that was launched to its end, and those that follow it; poprun's exit code.

    Args:
        launch: The first attempt; its launcher runs.
        signals: The signals that poprun receives.
        verbosity: How much to tell of what is done.
        look: Called before each restart, gives the hosts a new key and returns how they reach each other then.
        ends: Gets the end of each attempt, the last of which is the job's.

    Raises:
        HostsError: If hosts are missing and there are no more restarts.
        LaunchError: If the launcher of a further attempt could not be started.
    """
    plan, environment = launch.plan, launch.environment
    while True:
        ends.append(Attempt(launch, signals, verbosity).run())
        identity = _next_attempt(plan, launch.identity, ends[-1], signals, look)
        if identity is None:
            break
        launch = Launch(plan, environment, identity)
        launch.start()
    _tell_of_all(ends, plan)
    return exit_code(ends[-1])


def restart_pause_seconds(end: JobEnd, restart_count: int, max_restarts: int) -> float | None:
    """How long to wait before a job that ended in this way is started again; None when it is not.

    1, 2, 4, … seconds, at most 30. A job that was asked to end is not started again, nor one whose program says
    with its exit code that it was, nor one whose program cannot be executed: it would not be the next time.
    """
    was_asked = end.num_interrupts or end.is_terminated or end.is_output_closed or end.is_timed_out
    failed = first_failure(end.statuses)
    is_hopeless = failed is not None and failed.cannot_run
    if restart_count >= max_restarts or exit_code(end) == 0 or was_asked or has_left(end) or is_hopeless:
        return None
    return min(2.0**restart_count, _LONGEST_PAUSE_SECONDS)


def _next_attempt(
    plan: LaunchPlan, identity: JobIdentity, end: JobEnd, signals: ReceivedSignals, look: Look
) -> JobIdentity | None:
    """The identity of the next attempt, when it is time for it; None when there is none.

    A restart at which hosts are missing counts as one, and the next may find them again.
    """
    while True:
        pause_seconds = restart_pause_seconds(end, identity.restart_count, plan.ending.max_restarts)
        if pause_seconds is None:
            return None
        identity = replace(identity, restart_count=identity.restart_count + 1)
        say(f"restart {identity.restart_count} of at most {plan.ending.max_restarts} in {pause_seconds:g} s")
        if not _pause(pause_seconds, signals):
            return None
        try:
            network = look()
        except HostsError as error:
            if identity.restart_count >= plan.ending.max_restarts:
                raise
            say(str(error))
        else:
            found = identity if network is None else replace(identity, network=network)
            return found if _pause(0.0, signals) else None


def _pause(seconds: float, signals: ReceivedSignals) -> bool:
    """Wait; False when somebody asked for the end of the job meanwhile."""
    deadline = time.monotonic() + seconds
    while True:
        signals.drain()
        if signals.num_interrupts or signals.is_terminated or signal.SIGHUP in signals.passed_on:
            return False
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        select.select((signals.descriptor,), (), (), left)


def _tell_of_all(ends: Sequence[JobEnd], plan: LaunchPlan) -> None:
    """Say what only all attempts together show."""
    if len(ends) == 1 and plan.num_replicas == plan.num_instances and not ends[-1].lone_instances:
        return
    from poprun.job.report.printed_report import render_attempts, render_warning  # noqa: PLC0415 - most jobs do without

    for line in render_attempts(ends):
        say(line)
    if exit_code(ends[-1]) == 0 and (line := render_warning(ends[-1], plan)):
        say(line)
