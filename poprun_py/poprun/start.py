"""From a plan to a job: its hosts looked at, its virtual IPUs and cores leased, its processes started."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poprun.errors import PlanError, UsageError
from poprun.job.identity import JobIdentity
from poprun.job.launching import Launch
from poprun.job.signals import ReceivedSignals
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.program_environment import passed_environment, wished_job_id
from poprun.plan.topology import MachineFacts
from poprun.probe.job_needs import find_loopback_problem, raise_open_files, users_open_files
from poprun.probe.machine import names_of_this_machine
from poprun.process.spawn import become_subreaper
from poprun.text import screen
from poprun.text.host_names import fold_hosts

if TYPE_CHECKING:
    from poprun.devices.pool.records import HeldLease
    from poprun.hosts.preflight import Examination
    from poprun.hosts.routes import JobNetwork
    from poprun.job.outcome import JobEnd

_MAX_TOLD_ROUTES: Final = 4


def look_at_hosts(plan: LaunchPlan, verbosity: int) -> "JobNetwork | None":
    """How the hosts of ``plan`` reach each other; None when there is only this machine.

    Raises:
        PlanError: If the plan starts its processes without MPI.
        HostsError: If a host cannot take part.
    """
    if plan.launcher is LauncherKind.SRUN and plan.remote.slurm_job is None:
        raise PlanError(
            "--launcher srun starts processes in an allocation of Slurm, and poprun is in none: call it in a "
            "batch script (--emit sbatch writes one), or in the shell of salloc, or leave --launcher out"
        )
    here = names_of_this_machine(plan.hosts) & set(plan.hosts)
    if here == set(plan.hosts):
        return None
    if plan.launcher is LauncherKind.LOCAL:
        raise PlanError(
            f"--launcher local starts processes on this machine only, and {fold_hosts(plan.hosts)} is not: use "
            "MPI, or leave out --host"
        )
    found = _examine(plan)
    screen.tell(f"hosts talk over {_routes(found.network)}: {found.reason}")
    if verbosity:
        passed = sorted(passed_environment(os.environ, plan.passed_names()))
        screen.tell(f"variables that go to other hosts: {', '.join(passed)}")
    return found.network


def _examine(plan: LaunchPlan) -> "Examination":
    from poprun.hosts.preflight import examine_hosts  # noqa: PLC0415 - jobs of one host go without

    return examine_hosts(plan, names_of_this_machine(plan.hosts) & set(plan.hosts), screen.tell)


def _routes(network: "JobNetwork") -> str:
    """The interfaces and addresses, of many hosts the first ones."""
    told = [f"{route.interface} {route.address} ({route.name})" for route in network.hosts[:_MAX_TOLD_ROUTES]]
    return ", ".join([*told, *(["..."] if len(network.hosts) > _MAX_TOLD_ROUTES else [])])


def start_job(
    plan: LaunchPlan,
    facts: MachineFacts | None,
    network: "JobNetwork | None",
    *,
    verbosity: int,
    announce: Callable[[LaunchPlan], None],
) -> int:
    """Start the job with what it holds, and see it to its end; poprun's exit code.

    Args:
        plan: The job.
        facts: What the plan was made from; None for one that was read, which needs just what it names.
        network: How the hosts reach each other; None when there is only this machine.
        verbosity: How much to tell of what is done.
        announce: Called with the plan on what the job holds, before it starts.

    Raises:
        PoprunError: If it cannot have what it needs, or cannot be started.
    """
    if plan.num_instances > 1 and (problem := find_loopback_problem()):
        screen.tell(f"warning: {problem}")
    if not (plan.asks_server or plan.takes_lease or plan.owns_cores):
        return _run(plan, network, verbosity, announce)
    from poprun.devices.lease.pool_client import hold  # noqa: PLC0415 - a job on a laptop asks no pool

    with hold(plan, facts, network) as job:
        return _run(job.plan, job.network, verbosity, announce, job.leases, job.regain)


def _run(
    plan: LaunchPlan,
    network: "JobNetwork | None",
    verbosity: int,
    announce: Callable[[LaunchPlan], None],
    leases: Sequence["HeldLease"] = (),
    regain: "Callable[[JobNetwork], JobNetwork]" = lambda network: network,
) -> int:
    """Run the job on what it holds, ``leases``; ``regain`` takes anew what was lost with a host."""
    announce(plan)
    if verbosity:
        for lease in leases:
            screen.tell(f"holds {lease}")

    def look_again() -> "JobNetwork | None":
        return None if network is None else regain(replace(network, key=_examine(plan).network.key))

    environ = {**os.environ, **_library_variables(plan)}
    return run_job(plan, environ=environ, verbosity=verbosity, leases=leases, network=network, look=look_again)


def _library_variables(plan: LaunchPlan) -> dict[str, str]:
    """What the library of the program needs to be told, and is not told by the variables of torch and MPI."""
    if not any(word.endswith(".py") for word in plan.program):
        return {}
    from poprun.probe.fabric_script import fabric_variables  # noqa: PLC0415 - ast is expensive

    counts = plan.num_instances_per_host, len(plan.hosts)
    return fabric_variables(plan.program, plan.working_directory, counts, os.environ, on_cpu=not plan.devices)


def run_job(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    verbosity: int = 0,
    leases: "Sequence[HeldLease]" = (),
    network: "JobNetwork | None" = None,
    look: "Callable[[], JobNetwork | None]" = lambda: None,
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
    identity = _new_identity(environ, leases, network)
    ends: list[JobEnd] = []
    error = ""
    with ReceivedSignals() as signals:
        try:
            launch = Launch(plan, environ, identity)
            launch.start()
            from poprun.job.attempts import run_attempts  # noqa: PLC0415 - loaded while shims and agents start

            return run_attempts(launch, signals, verbosity, look, ends)
        except Exception as problem:
            error = str(problem)
            raise
        finally:
            if file is not None:
                _write_report(file, plan, identity, ends, error)


def _new_identity(
    environ: Mapping[str, str], leases: "Sequence[HeldLease]", network: "JobNetwork | None"
) -> JobIdentity:
    """What a job is known by, from now until its last restart has ended."""
    return JobIdentity(
        job_id=wished_job_id(environ) or os.urandom(6).hex(),
        restart_count=0,
        began_at_seconds=time.monotonic(),
        network=network,
        leases=tuple(leases),
        open_files=users_open_files(),
    )


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


def _write_report(
    file: str, plan: LaunchPlan, identity: JobIdentity, ends: "Sequence[JobEnd]", error: str
) -> None:
    from poprun.job.report.report_file import job_to_dict, render_job  # noqa: PLC0415 - most jobs have no report
    from poprun.text.atomic_file import write_whole  # noqa: PLC0415 - as above

    text = render_job(job_to_dict(plan, identity.job_id, ends, error, identity.leases))
    try:
        write_whole(file, text)
    except OSError as problem:
        screen.say(f"warning: --report {file} cannot be written: {problem.strerror}")
