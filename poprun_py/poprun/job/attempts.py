"""A job and its restarts: attempt after attempt, until one ends well or there are no more.

The way of a job: `attempts` runs one `loop` after the other. The loop starts the launcher and hears the agents
(`agents`) and the user (`signals`); `record` takes note of what they tell; `policy` decides from a snapshot of it;
the loop acts, by the order that starts a program (`orders`), through the programs' streams (`output`), and by
stopping. `outcome` is the exit code. What only some jobs need is loaded when they do: `hangs` and `stacks`,
`monitors`, `key_proofs`, and `report` after a failure.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poprun.errors import HostsError, UsageError
from poprun.job.loop import Attempt
from poprun.job.orders import JobIdentity
from poprun.job.outcome import JobEnd, exit_code, first_failure, has_left
from poprun.job.signals import ReceivedSignals
from poprun.plan.plan import LaunchPlan
from poprun.plan.program_environment import wished_job_id
from poprun.probe.job_needs import raise_open_files, users_open_files
from poprun.process.spawn import become_subreaper
from poprun.text.screen import say

if TYPE_CHECKING:
    from poprun.hosts.routes import JobNetwork
    from poprun.pool.records import HeldLease

_LONGEST_PAUSE_SECONDS: Final = 30.0

Look = Callable[[], "JobNetwork | None"]


def run_job(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    verbosity: int = 0,
    leases: "Sequence[HeldLease]" = (),
    network: "JobNetwork | None" = None,
    look: Look = lambda: None,
) -> int:
    """Start every instance of ``plan``, and return poprun's exit code when the last process has ended.

    A job that fails is started again as often as the plan says.

    0 when all instances ended with 0, else the code of the first that failed (128 + n for signal n); 130 after
    Ctrl-C, 143 after SIGTERM unless all instances then ended with 0, 124 after the job's timeout, 75 after a hang.

    Args:
        plan: What to start.
        environ: The environment that poprun was called in; the programs inherit it, on other hosts in part.
        verbosity: 0 says nothing unless something fails, 1 tells of decisions, 2 of every event.
        leases: What the job holds. Every agent of this host keeps the descriptors open until its program has
            ended: a lease on virtual IPUs or cores lasts as long as somebody has it open.
        network: How the hosts of the plan reach each other; None when there is only this machine.
        look: Called before each restart, gives the hosts a new key and returns how they reach each other then;
            raises HostsError when some can take part no more.

    Raises:
        HostsError: If hosts are missing and there are no more restarts.
        LaunchError: If the MPI runtime or an agent could not be started.
        UsageError: If the report that the plan asks for could not be written.
    """
    file = _checked_report_file(plan)
    become_subreaper()
    raise_open_files(plan.num_instances)
    identity = JobIdentity(
        job_id=wished_job_id(environ) or os.urandom(6).hex(),
        restart_count=0,
        began_at_seconds=time.monotonic(),
        network=network,
        leases=tuple(leases),
        open_files=users_open_files(),
    )
    ends: list[JobEnd] = []
    error = ""
    with ReceivedSignals() as signals:
        try:
            following: JobIdentity | None = identity
            while following is not None:
                ends.append(Attempt(plan, environ, following, signals, verbosity).run())
                following = _next_attempt(plan, following, ends[-1], signals, look)
        except Exception as problem:
            error = str(problem)
            raise
        finally:
            if file is not None:
                _write_report(file, plan, identity, ends, error)
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


def _checked_report_file(plan: LaunchPlan) -> str | None:
    """The absolute path of the report, or None when none is wanted."""
    if plan.ending.report_file is None:
        return None
    from poprun.text.atomic_file import check_target  # noqa: PLC0415 - most jobs have no report

    file = os.path.join(plan.working_directory, plan.ending.report_file)
    try:
        check_target(file)
    except OSError as error:
        raise UsageError(f"--report {plan.ending.report_file} cannot be written: {error.strerror}") from None
    return file


def _write_report(file: str, plan: LaunchPlan, identity: JobIdentity, ends: Sequence[JobEnd], error: str) -> None:
    from poprun.job.report.report_file import job_to_dict, render_job  # noqa: PLC0415 - most jobs have no report
    from poprun.text.atomic_file import write_whole  # noqa: PLC0415 - as above

    text = render_job(job_to_dict(plan, identity.job_id, ends, error, identity.leases))
    try:
        write_whole(file, text)
    except OSError as problem:
        say(f"warning: --report {file} cannot be written: {problem.strerror}")


def _tell_of_all(ends: Sequence[JobEnd], plan: LaunchPlan) -> None:
    """Say what only all attempts together show."""
    if len(ends) == 1 and plan.num_replicas == plan.num_instances and not ends[-1].lone_instances:
        return
    from poprun.job.report.printed_report import render_attempts, render_warning  # noqa: PLC0415 - most jobs do without

    for line in render_attempts(ends):
        say(line)
    if exit_code(ends[-1]) == 0 and (line := render_warning(ends[-1], plan)):
        say(line)
