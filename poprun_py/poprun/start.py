"""The run of a planned job: check the hosts, then run attempts until the job succeeds or may not restart."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from popdist.ground.trusted_paths import own_folder_problem
from poprun.errors import HostsError, PlanError, UsageError, error_of_system
from poprun.hosts.probe.machine import names_of_this_machine
from poprun.hosts.probe.program import fabric_variables
from poprun.job.loop import Attempt
from poprun.job.signals import ReceivedSignals
from poprun.launch.process.limits import (
    find_loopback_problem,
    find_tmpdir_problem,
    raise_open_files,
    users_open_files,
)
from poprun.launch.process.spawn import become_subreaper
from poprun.observe.account.state import JobIdentity
from poprun.observe.judge.job_end import JobEnd, exit_code, first_failure, has_left, num_lone
from poprun.plan.advice import named
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.program_environment import passed_environment, wished_job_id
from poprun.text import screen
from poprun.text.ranges import fold_hosts

if TYPE_CHECKING:
    from poprun.devices.lease.claims import LeasedPlan
    from poprun.launch.routes import JobNetwork
    from poprun.observe.show.metrics_server import MetricsServer
    from poprun.observe.show.report_writer import ReportWriter

_MAX_SHOWN_ROUTES: Final = 4
_LONGEST_PAUSE_SECONDS: Final = 30.0


def find_network(plan: LaunchPlan, verbosity: int) -> "JobNetwork | None":
    """Check the hosts of ``plan`` and return the network of the job; None if it runs only on this machine."""
    if plan.launcher is LauncherKind.SRUN and plan.remote.slurm_job is None:
        raise PlanError(
            "--launcher srun starts processes in an allocation of Slurm, and poprun is in none: call it in a "
            "batch script (--emit sbatch writes one), or in the shell of salloc, or leave --launcher out"
        )
    here = names_of_this_machine(plan.hosts) & set(plan.hosts)
    if here == set(plan.hosts):
        if plan.cache_directory is not None and (problem := own_folder_problem(plan.cache_directory)):
            raise PlanError(f"--executable-cache-path: {problem}")
        return None
    if plan.launcher is LauncherKind.LOCAL:
        raise PlanError(
            f"--launcher local starts processes on this machine only, and {fold_hosts(plan.hosts)} is not: use "
            "MPI, or leave out --host"
        )
    raise_open_files(plan.num_instances)  # each connection to a host needs open files
    network, reason = _examine(plan)
    routes = [f"{route.interface} {route.address} ({route.name})" for route in network.hosts]
    shown = ", ".join([*routes[:_MAX_SHOWN_ROUTES], *(["..."] if len(routes) > _MAX_SHOWN_ROUTES else [])])
    screen.log(f"hosts talk over {shown}: {reason}")
    if verbosity:
        passed = sorted(passed_environment(os.environ, plan.passed_names()))
        screen.log(f"variables that go to other hosts: {', '.join(passed)}")
    return network


def _examine(plan: LaunchPlan) -> "tuple[JobNetwork, str]":
    from poprun.hosts.preflight import examine_hosts

    return examine_hosts(plan, names_of_this_machine(plan.hosts) & set(plan.hosts), screen.log)


def forget_key(plan: LaunchPlan, network: "JobNetwork | None") -> None:
    """Make the other hosts remove the key of a job that is not started after all."""
    if network is not None:
        from poprun.hosts import preflight

        preflight.forget_key(plan, network.key, names_of_this_machine(plan.hosts) & set(plan.hosts))


@dataclass(slots=True)
class JobOutcome:
    """The ends of a job's attempts until now, with the writers of the job's report and metrics."""

    files: Sequence[str] = ()  # names of the report files, as the user wrote the names
    job_id: str = field(default_factory=lambda: wished_job_id(os.environ) or os.urandom(6).hex())
    plan: LaunchPlan | None = None  # None before poprun has made the plan
    leased: "LeasedPlan | None" = None
    ends: list[JobEnd] = field(default_factory=list)
    provenance: Mapping[str, str] = field(default_factory=dict)
    writer: "ReportWriter | None" = None  # None before the plan, and if nobody asked for a report
    metrics: "MetricsServer | None" = None  # None if nobody asked for metrics

    def begin(self, plan: LaunchPlan) -> None:
        """Keep ``plan``, check that a report can be written, and serve metrics if ``plan`` names a port."""
        self.plan, self.files = plan, ()
        if plan.ending.report_files:
            self._begin_report(plan)
        if plan.ending.metrics_port is not None:
            self.metrics = _serve_metrics(plan.ending.metrics_port)

    def _begin_report(self, plan: LaunchPlan) -> None:
        from poprun.hosts.probe.provenance import provenance
        from poprun.observe.show.report_writer import ReportWriter

        writer = ReportWriter(plan.ending.report_files, plan.working_directory)
        writer.check()
        self.writer = writer
        self.provenance = provenance(plan.program, plan.working_directory)

    def note_progress(self, attempt: Attempt) -> None:
        """Write the state of a running attempt to the report from time to time, and update the metrics."""
        is_due = self.writer is not None and self.writer.is_due(time.monotonic())
        if self.plan is None or not (self.metrics or is_due):
            return
        end = attempt.end(is_over=False)
        if self.metrics is not None:
            self.metrics.update(self.plan, end, len(self.ends))
        if self.writer is not None and is_due:
            self._write(self.writer, [*self.ends, end])

    def write(self, error: str) -> None:
        """Write the report of a job that is over and stop the metrics; ``error`` says why poprun gave up."""
        if self.metrics is not None:
            self.metrics.close()
        if self.files:  # the files are still there if no plan was made
            from poprun.observe.show.report_writer import ReportWriter

            self.writer, self.files = ReportWriter(self.files, os.curdir), ()
        if self.writer is not None:
            writer, self.writer = self.writer, None
            self._write(writer, self.ends, error)

    def _write(self, writer: "ReportWriter", ends: Sequence[JobEnd], error: str = "") -> None:
        from poprun.observe.show.report_file import record_job

        leases, given = (self.leased.leases, self.leased.given) if self.leased else ((), None)
        job = record_job(self.plan, self.job_id, ends, error=error, leases=leases, given=given)
        writer.write(replace(job, provenance=self.provenance))


def _serve_metrics(port: int) -> "MetricsServer":
    try:
        from poprun.observe.show.metrics_server import MetricsServer
    except ModuleNotFoundError:
        raise UsageError(
            "--metrics-port needs the package prometheus_client, which is not there: install it, or poprun's "
            "extra metrics"
        ) from None
    server = MetricsServer(port)
    screen.log(f"metrics are at {server.address}")
    return server


@contextmanager
def reported(outcome: JobOutcome) -> Iterator[None]:
    """Return a context that writes the job's report at the end, even if an exception ends the context."""
    error = ""
    try:
        yield
    except (OSError, MemoryError) as problem:
        error = str(error_of_system(problem))
        raise
    except Exception as problem:
        error = str(problem)
        raise
    finally:
        outcome.write(error)


def run_job(
    plan: LaunchPlan,
    network: "JobNetwork | None" = None,
    *,
    verbosity: int = 0,
    leased: "LeasedPlan | None" = None,
    outcome: JobOutcome | None = None,
) -> int:
    """Run the job, restart it after failures as the plan allows, and return the exit code of the last attempt."""
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
    environ = {**os.environ, **_library_variables(plan)}
    identity: JobIdentity | None = JobIdentity(
        job_id=outcome.job_id,
        restart_count=0,
        began_at_seconds=time.monotonic(),
        network=network,
        leases=leases,
        given=None if leased is None else leased.given,
        open_files=users_open_files(),
    )
    ends = outcome.ends
    with ReceivedSignals() as signals, reported(outcome):
        while identity is not None:
            on_look = outcome.note_progress if plan.has_curves else None
            ends.append(_run_attempt(plan, environ, identity, signals, verbosity, on_look))
            _collect_trace(plan, identity, ends[-1], signals)
            identity = _next_attempt(plan, identity, ends, signals, leased)
        _log_summary(ends, plan)
        return exit_code(ends[-1])


def _run_attempt(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    identity: JobIdentity,
    signals: ReceivedSignals,
    verbosity: int,
    on_look: Callable[[Attempt], object] | None,
) -> JobEnd:
    """Run one attempt and return its end; if no program has started, remove the job's key from the hosts."""
    has_started = False
    try:
        if plan.trace.folder is not None:
            from poprun.observe.show.trace.collection import prepare_folder

            prepare_folder(plan, identity.job_id, identity.restart_count)
        end = Attempt(plan, environ, identity, signals, verbosity, on_look).run()
        has_started = end.has_started
        return end
    finally:
        if not has_started:
            forget_key(plan, identity.network)


def _collect_trace(plan: LaunchPlan, identity: JobIdentity, end: JobEnd, signals: ReceivedSignals) -> None:
    """Merge what the programs of an attempt recorded and log where the trace is; a signal stops the merge."""
    if plan.trace.folder is None:
        return
    from poprun.observe.show.trace.collection import collect_trace

    rounds = end.clock_rounds if end.has_started else None
    before = signals.num_interrupts, signals.is_terminated

    def is_stopped() -> bool:
        return (signals.num_interrupts, signals.is_terminated) != before

    for line in collect_trace(plan, identity.job_id, identity.restart_count, rounds, is_stopped):
        screen.log(line)


def _library_variables(plan: LaunchPlan) -> Mapping[str, str]:
    """Return variables for a script of Lightning Fabric that takes the number of devices from its launcher."""
    if not any(word.endswith(".py") for word in plan.program):
        return {}
    counts = plan.num_instances_per_host, len(plan.hosts)
    return fabric_variables(plan.program, plan.working_directory, counts, os.environ, on_cpu=not plan.devices)


def restart_pause_seconds(end: JobEnd, restart_count: int, max_restarts: int) -> float | None:
    """Return the pause, at most 30 s, before the restart of a job that ended with ``end``; None for no restart."""
    # no restart of a job that somebody asked to end, or whose program forbids a restart or cannot be executed
    was_asked = end.num_interrupts or end.is_terminated or end.is_output_closed or end.is_timed_out
    failed = first_failure(end.statuses)
    is_hopeless = failed is not None and failed.cannot_run
    if restart_count >= max_restarts or exit_code(end) == 0 or was_asked or has_left(end) or is_hopeless:
        return None
    return min(2.0**restart_count, _LONGEST_PAUSE_SECONDS)


def _next_attempt(
    plan: LaunchPlan,
    identity: JobIdentity,
    ends: Sequence[JobEnd],
    signals: ReceivedSignals,
    leased: "LeasedPlan | None",
) -> JobIdentity | None:
    """Wait, give the hosts a new key, and return the identity of the next attempt; None if no attempt follows."""
    network = identity.network
    while True:
        pause_seconds = restart_pause_seconds(ends[-1], identity.restart_count, plan.ending.max_restarts)
        if pause_seconds is None or (not plan.ending.restarts_anyway and _is_in_vain(ends)):
            return None
        # an attempt without some hosts also counts as a restart: a later attempt may find these hosts again
        identity = replace(identity, restart_count=identity.restart_count + 1)
        screen.log(
            f"restart {identity.restart_count} of at most {plan.ending.max_restarts} in {pause_seconds:g} s"
        )
        if not _pause(pause_seconds, signals):
            return None
        try:
            if network is not None:
                network = _found_again(plan, network, leased)
        except HostsError as error:
            if identity.restart_count >= plan.ending.max_restarts:
                raise
            screen.log(str(error))
        else:
            if not plan.ending.restarts_anyway and _has_lost_devices(plan, identity):
                return None
            return replace(identity, network=network) if _pause(0.0, signals) else None


def _has_lost_devices(plan: LaunchPlan, identity: JobIdentity) -> bool:
    """Whether a device of the job has disappeared from this machine since the start; log the devices left."""
    if not plan.devices or identity.network is not None:
        return False
    from poprun.hosts.probe.gpus import find_devices

    found = find_devices(os.environ)
    there = [gpu.name for gpu in found.gpus]
    lost = [name for name in identity.devices_of(plan, 0).devices if name not in there]
    if lost:
        left = "; ".join(found.problems) or f"{named('GPU', there)} {'is' if len(there) == 1 else 'are'} left"
        screen.log(
            f"not started again: {named('GPU', lost)} of the job cannot be found any more: {left}; reset the "
            "device, or start the job on what is left (--restart-anyway starts it all the same)"
        )
    return bool(lost)


def _is_in_vain(ends: Sequence[JobEnd]) -> bool:
    """Whether another attempt would fail as the last attempt did; if so, log the reason."""
    from poprun.observe.judge.restarts import reason_to_end

    reason = reason_to_end(ends)
    if reason:
        screen.log(f"not started again: {reason} (--restart-anyway starts it all the same)")
    return bool(reason)


def _found_again(plan: LaunchPlan, network: "JobNetwork", leased: "LeasedPlan | None") -> "JobNetwork":
    """Check the hosts again and return the network of the next attempt. Raises HostsError if a host is missing."""
    network = replace(network, key=_examine(plan)[0].key)
    try:
        return network if leased is None else leased.reacquire(network)
    except HostsError:
        forget_key(plan, network)
        raise


def _pause(seconds: float, signals: ReceivedSignals) -> bool:
    """Wait ``seconds`` and return True; return False as soon as somebody asks for the end of the job."""
    deadline = time.monotonic() + seconds
    while True:
        signals.drain()
        if signals.num_interrupts or signals.is_terminated or signal.SIGHUP in signals.passed_on:
            return False
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        select.select((signals.descriptor,), (), (), left)


def _log_summary(ends: Sequence[JobEnd], plan: LaunchPlan) -> None:
    """Log how each attempt ended, and a warning, if there is one, about a job that ended well."""
    if len(ends) == 1 and plan.num_replicas <= plan.num_instances and not num_lone(ends[-1].statuses):
        return
    from poprun.observe.show.printed_report import render_attempts, render_warning

    for line in render_attempts(ends):
        screen.log(line)
    if exit_code(ends[-1]) == 0 and (line := render_warning(ends[-1], plan)):
        screen.log(line)
