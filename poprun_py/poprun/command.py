"""The actions of poprun for a command line: print help, a version, findings or a plan, or start a job."""

import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from popdist.ground.contract import NUM_THREADS
from poprun.cli.command_line import CommandLine, misspelled_variables, origins, read_command_line
from poprun.cli.options import COMPLETION
from poprun.errors import PoprunError, ProgramNotExecutableError, ProgramNotFoundError, UsageError
from poprun.hosts.job_network import find_network, forget_key
from poprun.hosts.probe.machine import find_allocation, machine_facts, own_names, starter_of_many
from poprun.hosts.probe.program import program_on_another_machine, resolve_program, script_of
from poprun.launch.process.limits import check_system
from poprun.outcome import JobOutcome, reported
from poprun.plan.advice import check_fitness, check_gpus, idle_options
from poprun.plan.frameworks import by_framework, contradictions, example_start
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import make_advised_plan
from poprun.plan.program_environment import hash_seed, program_environment
from poprun.plan.request import LauncherChoice, VipuSettings
from poprun.plan.topology import MachineFacts
from poprun.text import screen
from poprun.text.screen import VersionFormat

if TYPE_CHECKING:
    from poprun.plan.inventory import Cluster
    from poprun.plan.render.table import Details

_OF_POPRUN: Final = "(-n|--num-instances|--num-replicas)(=.*)?"
_ENGINES_OWN: Final = ("host", "num-instances", "image")  # options that a batch script gives to Slurm


def run(words: Sequence[str]) -> int:
    """Run poprun with the command-line arguments ``words``, without the name poprun; return poprun's exit code."""
    if (instruction := os.environ.get(COMPLETION)) is not None:
        from poprun.cli.completion import answer

        screen.print_out(answer(instruction))
        return 0
    line = read_command_line(words)
    if not (line.program or line.starts_job) and words[-1:] in (["true"], ["false"]) and words[-2:-1]:
        screen.log(f"warning: {words[-1]} is the value of {words[-2]}: write -- before the program {words[-1]}")
    if line.shows_help:
        from poprun.cli.help_page import help_page

        screen.print_out(help_page(is_whole=line.shows_whole_help))
        return 0
    if line.prints_version or line.version_format is not None:
        from poprun.hosts.doctor.facts import version_text

        screen.print_out(version_text(line.version_format or VersionFormat.TEXT, os.environ))
        return 0
    if line.asks_doctor:
        return _examine_machine(line)
    if not (line.program or line.given):
        raise _no_program(line)
    if line.starts_job:
        outcome = JobOutcome(files=line.values.get("ending", {}).get("report_files", ()))
        with reported(outcome):
            return _start(line, outcome)
    plan, facts = _find_plan(line)
    _preview_lease(plan, facts, line)
    screen.print_out(_rendered(plan, line))
    return 0


def _no_program(line: CommandLine) -> UsageError:
    """Return the error for a command line of poprun that names no program to start."""
    has_switch = any(one.option.kind.is_switch for one in line.given)
    hint = "\n  true, 1 and the like after a switch are its value: write -- before the program"
    return UsageError(
        "there is no PROGRAM to start: poprun [OPTIONS] PROGRAM [ARGS]...\n"
        "  poprun --help      the options that most jobs use, and examples\n"
        "  poprun --dry-run   the plan alone, which needs no PROGRAM\n"
        f"  poprun --doctor    what this machine has for a job, and what is missing{hint if has_switch else ''}"
    )


def _examine_machine(line: CommandLine) -> int:
    """Check this machine and the hosts of the command line, and print the results; return 0 if a job can run on
    them, otherwise 1, as poprun's exit code.
    """
    from poprun.hosts.doctor.diagnosis import can_run, diagnose, judge_hosts, render_findings
    from poprun.hosts.doctor.facts import examine

    check_system()
    findings = diagnose(examine(os.environ))
    if hosts := line.request((), os.sep).hosts:
        findings = (*findings, judge_hosts(hosts, _problems_of_hosts(line)))
    text = render_findings(findings, line.report_format, width=screen.width(), has_color=screen.has_color())
    screen.print_out(text)
    return 0 if can_run(findings) else 1


def _problems_of_hosts(line: CommandLine) -> str:
    """Return why a job cannot run on the hosts of the command line ``line``; an empty text if it can run there."""
    try:
        plan, _ = _plan(line)
        plan = replace(plan, program=plan.program or (sys.executable,))
        forget_key(plan, find_network(plan, os.environ, 0))
    except PoprunError as error:
        return str(error)
    return ""


def _find_plan(line: CommandLine) -> tuple[LaunchPlan, MachineFacts | None]:
    """Return the job's plan for the command line ``line``, and what poprun has measured on this machine (cores,
    GPUs, MPI); None instead of the measurements if the plan comes from a file.
    """
    plan, facts = _plan(line) if line.plan_file is None else (_read_plan(line, line.plan_file), None)
    if plan.num_instances > 1 and script_of(plan.program) == "-":
        raise UsageError(
            f"{os.path.basename(plan.program[0])} reads its program from the standard input, which only "
            "instance 0 of several gets: save the program as a file, and give that"
        )
    for text in contradictions(plan, os.environ):
        screen.log(f"warning: {text}")
    return plan, facts


def _start(line: CommandLine, outcome: JobOutcome) -> int:
    """Plan the job, lease its devices, start the job and wait for its end; return poprun's exit code."""
    from poprun.start import run_job

    check_system()
    if launcher := starter_of_many(os.environ):
        raise UsageError(
            f"{launcher} has started poprun several times, each of which would start the whole job: call poprun "
            f"without {launcher}, since it starts the instances itself"
        )
    plan, facts = _find_plan(line)
    if not plan.program:
        raise _no_program(line)
    if plan.output.has_monitor and not sys.stderr.isatty():
        raise UsageError(
            "--monitor draws on a terminal, and standard error is none: leave it out, and look with poprun-top"
        )
    outcome.begin(plan)
    network = find_network(plan, os.environ, line.verbosity)
    if line.plan_file is not None and network is None:
        _check_fitness(plan, line.plan_file)
    leased = None
    with ExitStack() as stack:
        try:
            if plan.asks_server or plan.takes_lease or plan.owns_cores:
                from poprun.devices.lease.pool_client import hold

                leased = stack.enter_context(hold(plan, facts, network))
                network = leased.network
            if line.prints_topology:
                screen.print_out(_rendered(plan if leased is None else leased.shown_plan, line))
        except BaseException:  # also at Ctrl-C, while poprun waits for devices
            forget_key(plan, network)
            raise
        return run_job(plan, network, verbosity=line.verbosity, leased=leased, outcome=outcome)


def _plan(line: CommandLine) -> tuple[LaunchPlan, MachineFacts]:
    """Make the job's plan for the command line ``line``; return the plan and this machine's measured facts."""
    try:
        working_directory = os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory is gone: change to one that exists") from None
    program = _program(line, working_directory)
    request = line.request(program, working_directory)
    for misspelled in misspelled_variables(os.environ):
        screen.log(f"warning: {misspelled}")
    has_mpi = request.launcher not in (LauncherChoice.LOCAL, LauncherChoice.SRUN)
    facts = machine_facts(os.environ, with_mpi=has_mpi).within(find_allocation(os.environ))
    facts, pod = _seen_by_pool(request.vipu, facts, asks_server=line.starts_job)
    is_counted = "num_instances" in line.values.get("request", {})
    plan, advice = make_advised_plan(request, facts, pod, is_counted=is_counted, are_hosts_seen=line.starts_job)
    if line.emitted is None:
        check_gpus(plan, facts)
    if plan.trace.folder is None:
        plan = _with_popvisions_trace(plan)
    if line.exported_file is not None:
        from poprun.cli.config_file import export_config

        kept = [one for one in line.given if not one.option.is_local]
        export_config(kept, line.exported_file, may_overwrite=line.may_overwrite)
    for text in advice:
        screen.log(f"warning: {text}")
    if line.verbosity:
        _log_decisions(plan, facts, request.launcher, line)
    return plan, facts


def _with_popvisions_trace(plan: LaunchPlan) -> LaunchPlan:
    """Return ``plan``, with a trace if environment variables of PopVision, Graphcore's profiler, ask for one."""
    variables = {**os.environ, **plan.variables_of(0)}
    if not any(name in variables for name in ("POPLAR_ENGINE_OPTIONS", "PVTI_OPTIONS")):
        return plan
    from poprun.plan.popvision import asked_trace

    trace = asked_trace(variables)
    if trace is None:
        return plan
    screen.log(f"variables for PopVision ask for a profile: the trace of some seconds goes to {trace.folder}")
    return replace(plan, trace=trace)


def _log_decisions(plan: LaunchPlan, facts: MachineFacts, choice: LauncherChoice, line: CommandLine) -> None:
    """Log, for the option ``-v``, which options have no effect and why poprun chose the plan's launcher."""
    idle = idle_options(plan)
    for option in (one.option for one in line.given):
        if why := option.why_no_effect or idle.get(option.name):
            screen.log(f"--{option.name} has no effect: {why}")
    for found in facts.unknown_mpi:
        screen.log(f"{found} is neither MPICH's nor Open MPI's: not used")
    if plan.parallelism.is_shared:
        from poprun.plan.render.words import size_of

        screen.log(f"{size_of(plan)}: neighbours are shards, then stages, then replicas")
    if choice is LauncherChoice.AUTO:
        why = f"auto takes MPI where there is one, and {f'found {plan.mpi}' if plan.mpi else 'there is none'}"
    else:
        why = f"asked for, found {plan.mpi}" if plan.mpi else "asked for"
    screen.log(f"launcher {plan.launcher}: {why}")
    for name, value in hash_seed(os.environ | plan.variables_of(0)).items():
        screen.log(f"{name}={value} for the programs: sets of strings have the same order in all of them")


def _seen_by_pool(
    vipu: VipuSettings, facts: MachineFacts, *, asks_server: bool
) -> "tuple[MachineFacts, Cluster | None]":
    """Return this machine's ``facts``, with a mark on each GPU that other jobs use according to the pool (file of
    all leases); and the pod (named shape of virtual IPUs) to plan for, or None if the job has no pod.
    """
    if vipu.pod is None and not (vipu.server_host is not None and asks_server) and not facts.gpus:
        return facts, None
    from poprun.devices.lease.pool_client import facts_under_pool

    return facts_under_pool(vipu, facts, asks_server=asks_server)


def _program(line: CommandLine, working_directory: str) -> tuple[str, ...]:
    """Return the user's command line with the program's absolute path; a dry run only warns if it is missing."""
    if line.emitted is not None:
        return program_on_another_machine(line.program)
    try:
        words = resolve_program(line.program, working_directory, os.environ.get("PATH", os.defpath))
    except (ProgramNotFoundError, ProgramNotExecutableError) as error:
        if not line.is_dry_run:
            raise
        screen.log(f"warning: {error}")
        return line.program
    script = script_of(words)
    if line.is_dry_run and script not in ("", "-") and not os.path.exists(os.path.join(working_directory, script)):
        screen.log(f"warning: there is no file {script} in {working_directory}, which {words[0]} shall run")
    is_counted = "num_instances" in line.values.get("request", {})
    for word, following in pairwise(words):
        is_interpreter = word == words[0] and os.path.basename(word).startswith("python")
        if (is_interpreter or word == script) and re.fullmatch(_OF_POPRUN, following) and not is_counted:
            screen.log(f"warning: {following} goes to {word}: poprun's own options stand before the program")
    return words


def _read_plan(line: CommandLine, file: str) -> LaunchPlan:
    """Return the plan in ``file``; if this plan names no program, add the program of the command line."""
    from poprun.plan.plan_file import read_plan
    from poprun.text.input_files import STDIN, read_text

    source = _name_of(file)
    if line.verbosity:
        screen.log(f"reading the plan from {source}")
    if file != STDIN and not os.path.exists(file):
        raise UsageError(
            f"--plan {file}: No such file or directory. To write a plan: poprun --dry-run --topology-format json"
        )
    plan = read_plan(read_text(file, "--plan"), source)
    if not line.program:
        return plan
    if plan.program:
        raise UsageError(f"--plan: {source} names its program: leave out {line.program[0]}")
    return replace(plan, program=_program(line, plan.working_directory))


def _check_fitness(plan: LaunchPlan, file: str) -> None:
    """Raise PlanError if the plan in ``file`` names GPUs, or cores for bindings, that this machine lacks; only
    warn if the machine has fewer cores than the plan counts on.
    """
    for difference in check_fitness(plan, machine_facts(os.environ, with_mpi=False), _name_of(file)):
        screen.log(f"warning: {difference}")


def _name_of(plan_file: str) -> str:
    return "standard input" if plan_file == "-" else plan_file


def _preview_lease(plan: LaunchPlan, facts: MachineFacts | None, line: CommandLine) -> None:
    """Log which devices of this machine the job would reserve if it started now; nothing is reserved."""
    if line.emitted is not None:
        return
    if plan.asks_server:
        screen.log(f"the server of virtual IPUs at {plan.vipu.server_host} is not asked: nothing starts")
        return
    if not plan.takes_lease:
        return
    from poprun.devices.lease.pool_client import would_hold

    is_here = len(plan.hosts) == 1 and plan.hosts[0] in own_names(socket.gethostname())
    screen.log(would_hold(plan, facts, is_here=is_here))


def _rendered(plan: LaunchPlan, line: CommandLine) -> str:
    """Return ``plan`` as text in the format, such as JSON, that the command line ``line`` asks for."""
    if line.emitted is not None:
        from poprun.plan.emit import emit_job

        command = (sys.executable, "-P", "-m", "poprun", *_options_again(line))
        user_num_threads = os.environ.get(NUM_THREADS, "")
        return emit_job(plan, line.emitted, image=line.image, command=command, user_num_threads=user_num_threads)
    from poprun.plan.render import render_plan

    return render_plan(
        plan,
        line.topology_format,
        width=screen.width(),
        has_color=screen.has_color(),
        details=_details(plan, line) if line.verbosity else None,
    )


def _details(plan: LaunchPlan, line: CommandLine) -> "Details":
    """Return what option ``-v`` adds to a printed plan: launch command, environment, and each option's source."""
    from poprun.launch.launchers import launch_commands
    from poprun.plan.render.table import Details

    commands = launch_commands(plan)
    return Details(
        command=commands[0].words,
        num_commands=len(commands),
        origins=origins(line.given, with_defaults=line.verbosity > 1),
        environment=program_environment(plan, 0, os.environ),
        frameworks=by_framework(program_environment(plan, 0, os.environ, example_start(plan)))
        if line.verbosity > 1
        else {},
    )


def _options_again(line: CommandLine) -> tuple[str, ...]:
    """Return the options to write into a batch script, so that poprun makes the same plan when the script runs."""
    if line.plan_file is not None:
        return (f"--plan={os.path.abspath(line.plan_file)}",)
    kept = (one for one in line.given if not one.option.is_local and one.option.name not in _ENGINES_OWN)
    return tuple(f"--{one.option.name}={text}" for one in kept for text in one.texts)
