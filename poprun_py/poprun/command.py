"""From a command line to a plan, and from a plan to a print-out or a job."""

import os
import socket
import sys
from dataclasses import replace

from poprun.cli.command_line import CommandLine, misspelled_variables
from poprun.cli.versions import VersionFormat, version_text
from poprun.doctor import ReportFormat
from poprun.doctor.diagnosis import can_run, diagnose, render_findings
from poprun.doctor.facts import examine
from poprun.errors import PlanError, ProgramNotExecutableError, ProgramNotFoundError, UsageError
from poprun.plan.advice import advise, advise_of_hosts, advise_of_words, idle_vipu_options
from poprun.plan.inventory import Cluster
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import facts_within, job_words, make_plan, within
from poprun.plan.request import LauncherChoice
from poprun.plan.settings import VipuSettings
from poprun.plan.topology import MachineFacts
from poprun.probe.machine import machine_facts, own_names
from poprun.probe.program import as_elsewhere, resolve_program
from poprun.probe.slurm import find_allocation
from poprun.start import gpus_for, look_at_hosts, print_out, start_job
from poprun.text import screen


def consult(report_format: ReportFormat) -> int:
    """Tell what poprun would use on this machine, and what is missing.

    Returns:
        1 when no job can run on it, else 0.
    """
    findings = diagnose(examine(os.environ))
    screen.show(render_findings(findings, report_format, width=screen.width(), has_color=screen.has_color()))
    return 0 if can_run(findings) else 1


def run(line: CommandLine) -> int:
    """Do what ``line`` asks for.

    Returns:
        poprun's exit code: that of the job, or 0 after a dry run.

    Raises:
        PoprunError: If there is no such plan or program, or the job cannot be started.
    """
    if line.prints_version or line.version_format is not None:
        screen.show(version_text(line.version_format or VersionFormat.TEXT))
        return 0
    if line.asks_doctor:
        return consult(line.report_format)
    plan, facts = _plan(line) if line.plan_file is None else (_read_plan(line, line.plan_file), None)
    if line.is_dry_run or line.emitted is not None:
        _foresee(plan, facts, line)
        screen.show(print_out(plan, line))
        return 0
    if not plan.program:
        raise UsageError(
            "there is no PROGRAM to start: poprun [OPTIONS] PROGRAM [ARGS]..., or --dry-run to look only "
            "(a word such as true or 1 after a switch is its value: write -- before such a program)"
        )
    if plan.output.has_monitor and not sys.stderr.isatty():
        raise UsageError(
            "--monitor draws on a terminal, and standard error is none: leave it out, and look with poprun-top"
        )
    network = look_at_hosts(plan, line.verbosity)
    if line.plan_file is not None and network is None:
        _check_fitness(plan, line.plan_file)
    return start_job(plan, facts, line, network)


def _foresee(plan: LaunchPlan, facts: MachineFacts | None, line: CommandLine) -> None:
    """Say what the job would take from the pool, if it takes anything and is to run here."""
    if plan.asks_server and line.emitted is None:
        screen.tell(f"the server of virtual IPUs at {plan.vipu.server_host} is not asked: nothing starts")
    if line.emitted is not None or not plan.takes_lease:
        return
    from poprun.lease.local_lease import would_hold  # noqa: PLC0415 - most jobs take nothing

    gpus = gpus_for(plan, facts)
    is_here = len(plan.hosts) == 1 and plan.hosts[0] in own_names(socket.gethostname())
    screen.tell(would_hold(plan, gpus, is_here=is_here, tell=screen.tell))


def _plan(line: CommandLine) -> tuple[LaunchPlan, MachineFacts]:
    """The plan for the options of ``line`` and the facts that it was made from, with advice on stderr."""
    working_directory = _working_directory()
    program = _program(line, working_directory)
    request = line.request(program, working_directory)
    for misspelled in misspelled_variables(os.environ):
        screen.tell(f"warning: {misspelled}")
    allocation = find_allocation(os.environ)
    request = within(request, allocation, is_counted="num_instances" in line.values.get("request", {}))
    has_mpi = request.launcher not in (LauncherChoice.LOCAL, LauncherChoice.SRUN)
    facts = facts_within(machine_facts(os.environ, with_mpi=has_mpi), allocation)
    asks = not (line.is_dry_run or line.emitted)
    facts, pod = _under_pool(request.vipu, facts, asks_server=asks)
    plan = make_plan(request, facts, pod)
    if line.exported_file is not None:
        _export(line, line.exported_file)
    of_words = advise_of_words(job_words(request, plan.mpi).left_out, plan.mpi)
    of_hosts = advise_of_hosts(plan) if line.is_dry_run or line.emitted is not None else None
    for advice in (*advise(plan, facts), *filter(None, [of_words, of_hosts])):
        screen.tell(f"warning: {advice}")
    if line.verbosity:
        idle = idle_vipu_options(plan)
        for option in (one.option for one in line.given):
            if why := option.why_no_effect or idle.get(option.name):
                screen.tell(f"--{option.name} has no effect: {why}")
        for found in facts.unknown_mpi:
            screen.tell(f"{found} is neither MPICH's nor Open MPI's: not used")
        screen.tell(f"launcher {plan.launcher}: {_why(request.launcher, plan)}")
    return plan, facts


def _under_pool(
    vipu: VipuSettings, facts: MachineFacts, *, asks_server: bool
) -> tuple[MachineFacts, Cluster | None]:
    """The facts with the GPUs that the job may get, and the pod to plan for, if there is one."""
    pod = _pod(vipu.pod)
    if pod is not None:
        facts = _within_pod(pod, vipu, facts)
    if vipu.server_host is not None and asks_server:
        from poprun.lease.server_lease import under_server  # noqa: PLC0415 - few jobs ask a server

        return under_server(vipu, facts)
    if facts.gpus and not vipu.is_offline:
        from poprun.lease.local_lease import mark_leased  # noqa: PLC0415 - a machine without GPUs asks nobody

        facts = replace(facts, gpus=mark_leased(facts.gpus, vipu.pool))
    return facts, pod


def _pod(name: str | None) -> Cluster | None:
    """The pod to plan for in place of this machine."""
    if name is None:
        return None
    from poprun.pool.clusters import pod_of  # noqa: PLC0415 - most jobs know no pod

    return pod_of(name)


def _within_pod(pod: Cluster, vipu: VipuSettings, facts: MachineFacts) -> MachineFacts:
    """The facts with those GPUs that stand for IPUs of the pod, in the part of it that is asked for."""
    from poprun.pool.clusters import allocation_of, gpus_within  # noqa: PLC0415 - most jobs know no pod

    return replace(facts, gpus=gpus_within(pod, allocation_of(pod, vipu), facts.hostname, facts.gpus))


def _export(line: CommandLine, file: str) -> None:
    from poprun.cli.config_file import export_config  # noqa: PLC0415 - yaml is expensive

    kept = (one for one in line.given if not one.option.is_local)
    export_config(kept, file, may_overwrite=line.may_overwrite)


def _program(line: CommandLine, working_directory: str) -> tuple[str, ...]:
    """The words to start; in a dry run the program may be one that only other machines have."""
    if line.emitted is not None:
        return as_elsewhere(line.program)
    try:
        return resolve_program(line.program, working_directory, os.environ.get("PATH", os.defpath))
    except (ProgramNotFoundError, ProgramNotExecutableError) as error:
        if not line.is_dry_run:
            raise
        screen.tell(f"warning: {error}")
        return line.program


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory is gone: change to one that exists") from None


def _why(choice: LauncherChoice, plan: LaunchPlan) -> str:
    if choice is LauncherChoice.AUTO:
        return f"auto takes MPI where there is one, and {f'found {plan.mpi}' if plan.mpi else 'there is none'}"
    return f"asked for, found {plan.mpi}" if plan.mpi else "asked for"


def _read_plan(line: CommandLine, file: str) -> LaunchPlan:
    """The plan in ``file``; the command line gives the program if that plan has none."""
    from poprun.plan.plan_file import read_plan  # noqa: PLC0415 - most jobs have no plan file

    source = "standard input" if file == "-" else file
    if line.verbosity:
        screen.tell(f"reading the plan from {source}")
    try:
        text = sys.stdin.read() if file == "-" else _read(file)
    except (OSError, UnicodeError) as error:
        raise PlanError(f"--plan {file}: {getattr(error, 'strerror', None) or error}") from None
    plan = read_plan(text, source)
    if not line.program:
        return plan
    if plan.program:
        raise UsageError(f"--plan: {source} names its program: leave out {line.program[0]}")
    return replace(plan, program=_program(line, plan.working_directory))


def _check_fitness(plan: LaunchPlan, file: str) -> None:
    """See that the machine has what a plan of another time or place counts on."""
    from poprun.plan.advice import check_fitness  # noqa: PLC0415 - most jobs have no plan file

    source = "standard input" if file == "-" else file
    for difference in check_fitness(plan, machine_facts(os.environ, with_mpi=False), source):
        screen.tell(f"warning: {difference}")


def _read(file: str) -> str:
    with open(file, encoding="utf-8") as stream:
        return stream.read()
