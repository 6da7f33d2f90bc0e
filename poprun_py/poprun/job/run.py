"""See a job from its plan to its end: snapshot, policy, decision, executor.

Pure: `state` holds the values, `events` changes them, `hangs` finds who waits for whom, `policy` decides,
`orders`, `lines`, `tags`, `bars`, `folding`, `interrupts`, `hang_words` and `stacks` word. `outcome` is how a job
ended, `aborts` who aborted it; `report` and `report_file` tell it, with `roll_call`, `hints`, `codes`, `excerpt`
and `tracebacks`.
`attempts` runs one `loop` after the other until the job has ended; a loop asks and acts. Its hands are `agents`
(the control socket), `start_watch` and `children` (the launcher's processes), `signals`, `streams`, `relay`,
`log_files` and `display` (the programs' output), `inquiry` and `sources` (where they stand), `voice` (poprun's
own), `whole_file`, and `sweep` (what is left).
"""

from collections.abc import Callable, Mapping, Sequence

from poprun.hosts.routes import JobNetwork
from poprun.plan.plan import LaunchPlan
from poprun.pool.held_lease import HeldLease

__all__ = ["run_job"]


def run_job(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    verbosity: int = 0,
    leases: Sequence[HeldLease] = (),
    network: JobNetwork | None = None,
    look: Callable[[], JobNetwork | None] = lambda: None,
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
    from poprun.job.attempts import run_attempts  # noqa: PLC0415 - a dry run does not pay for the supervisor

    return run_attempts(plan, environ, verbosity, network, leases, look)
