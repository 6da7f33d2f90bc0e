"""The start of a planned job: the launcher of its first attempt, then the attempts."""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from poprun.hosts.probe.program import fabric_variables
from poprun.job.launched import launch
from poprun.job.signals import ReceivedSignals
from poprun.launch.process.limits import (
    find_loopback_problem,
    find_tmpdir_problem,
    raise_open_files,
    users_open_files,
)
from poprun.launch.process.spawn import become_subreaper
from poprun.observe.account.job_identity import JobIdentity
from poprun.outcome import JobOutcome, reported
from poprun.plan.plan import LaunchPlan
from poprun.text import screen

if TYPE_CHECKING:
    from poprun.devices.lease.claims import LeasedPlan
    from poprun.launch.routes import JobNetwork


def run_job(
    plan: LaunchPlan,
    network: "JobNetwork | None" = None,
    *,
    verbosity: int = 0,
    leased: "LeasedPlan | None" = None,
    outcome: JobOutcome | None = None,
) -> int:
    """Run the planned job, restart it after failures as the plan allows, and return its exit code."""
    if plan.num_instances > 1 and (problem := find_loopback_problem()):
        screen.log(f"warning: {problem}")
    if problem := find_tmpdir_problem(os.environ.get("TMPDIR", "")):
        screen.log(f"warning: {problem}")
    leases = () if leased is None else leased.leases
    for lease in leases if verbosity else ():
        screen.log(f"holds {lease}")
    outcome = outcome or JobOutcome()
    outcome.leased = leased
    become_subreaper()
    raise_open_files(plan.num_instances)
    identity = JobIdentity(
        job_id=outcome.job_id,
        restart_count=0,
        began_at_seconds=time.monotonic(),
        network=network,
        leases=leases,
        given=None if leased is None else leased.given,
        open_files=users_open_files(),
    )
    with ReceivedSignals() as signals, reported(outcome):
        first = launch(plan, {**os.environ, **_library_variables(plan)}, identity, verbosity)
        with first.ended_on_failure():  # files or memory may be missing
            from poprun.attempts import run_attempts  # the supervisor loads while the first shims start

        return run_attempts(first, outcome, signals)


def _library_variables(plan: LaunchPlan) -> Mapping[str, str]:
    """Return environment variables that give a Lightning Fabric script its number of devices; {} if not needed."""
    if not any(word.endswith(".py") for word in plan.program):
        return {}
    counts = plan.num_instances_per_host, len(plan.hosts)
    return fabric_variables(plan.program, plan.working_directory, counts, os.environ, on_cpu=not plan.devices)
