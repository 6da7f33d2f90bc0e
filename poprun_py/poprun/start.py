"""From a plan to a job: its hosts looked at, its virtual IPUs and cores leased, its processes started."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poprun.cli.command_line import CommandLine, origins
from poprun.errors import PlanError
from poprun.hosts.routes import JobKey, JobNetwork
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.planner import place
from poprun.plan.program_environment import passed_environment
from poprun.plan.topology import Gpu, MachineFacts
from poprun.pool.records import HeldLease
from poprun.probe.gpus import find_gpus
from poprun.probe.machine import names_of_this_machine
from poprun.render import render_plan
from poprun.text import screen
from poprun.text.host_names import fold_hosts

if TYPE_CHECKING:
    from poprun.hosts.preflight import Examination
    from poprun.lease.host_leases import HostLeases
    from poprun.render.table import Details

_MOST_TOLD: Final = 4


def look_at_hosts(plan: LaunchPlan, verbosity: int) -> JobNetwork | None:
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
    screen.tell(f"hosts talk over {_ways(found.network)}: {found.reason}")
    if verbosity:
        passed = sorted(passed_environment(os.environ, plan.passed_names()))
        screen.tell(f"variables that go to other hosts: {', '.join(passed)}")
    return found.network


def look_again(plan: LaunchPlan) -> JobKey:
    """See that the hosts of ``plan`` can still take part, and give them a new key, which is returned.

    Raises:
        HostsError: If one cannot.
    """
    return _examine(plan).network.key


def _examine(plan: LaunchPlan) -> "Examination":
    from poprun.hosts.preflight import examine_hosts  # noqa: PLC0415 - jobs of one host go without

    return examine_hosts(plan, names_of_this_machine(plan.hosts) & set(plan.hosts), screen.tell)


def _ways(network: JobNetwork) -> str:
    """The interfaces and addresses, of many hosts the first ones."""
    told = [f"{route.interface} {route.address} ({route.name})" for route in network.hosts[:_MOST_TOLD]]
    return ", ".join([*told, *(["..."] if len(network.hosts) > _MOST_TOLD else [])])


_ENGINES_OWN: Final = ("host", "num-instances", "image")
"""Options that a batch script leaves to what it asks Slurm for."""


def print_out(plan: LaunchPlan, line: CommandLine) -> str:
    """``plan`` in the form that the command line asks for."""
    if line.emitted is not None:
        from poprun.emit import Surroundings, emit_job  # noqa: PLC0415 - most jobs run here

        return emit_job(
            plan, line.emitted, Surroundings(image=line.image, python=sys.executable, options=_options_again(line))
        )
    return render_plan(
        plan,
        line.topology_format,
        width=screen.width(),
        has_color=screen.has_color(),
        details=_details(plan, line) if line.verbosity else None,
    )


def _details(plan: LaunchPlan, line: CommandLine) -> "Details":
    from poprun.launch.launchers import launch_commands  # noqa: PLC0415 - only -v asks for it
    from poprun.plan.program_environment import program_environment  # noqa: PLC0415 - only -v asks for it
    from poprun.render.table import Details  # noqa: PLC0415 - only -v asks for it

    commands = launch_commands(plan)
    return Details(
        command=commands[0].words,
        num_commands=len(commands),
        origins=origins(line.given, with_defaults=line.verbosity > 1),
        environment=program_environment(plan, 0, os.environ),
    )


def _options_again(line: CommandLine) -> tuple[str, ...]:
    """The words with which poprun makes the same plan again, where the hosts come from the cluster's engine."""
    if line.plan_file is not None:
        return (f"--plan={os.path.abspath(line.plan_file)}",)
    kept = (one for one in line.given if not one.option.is_local and one.option.name not in _ENGINES_OWN)
    return tuple(f"--{one.option.name}={text}" for one in kept for text in one.texts)


def start_job(
    plan: LaunchPlan, facts: MachineFacts | None, line: CommandLine, network: "JobNetwork | None"
) -> int:
    """Start the job with what it holds, and see it to its end; poprun's exit code.

    Args:
        plan: The job.
        facts: What the plan was made from; None for one that was read.
        line: The command line.
        network: How the hosts reach each other; None when there is only this machine.

    Raises:
        PoprunError: If it cannot have what it needs, or cannot be started.
    """
    if plan.asks_server:
        return _start_under_server(plan, facts, line, network)
    if network is not None:
        return _start_on_hosts(plan, line, network)
    if not plan.takes_lease:
        return _start_on_cores(plan, facts, line)
    from poprun.lease.local_lease import leased  # noqa: PLC0415 - a job on a laptop asks nobody

    gpus = gpus_for(plan, facts)
    with leased(plan, gpus, lambda: find_gpus(os.environ), is_fixed=facts is None) as (held, lease):
        return _start_as_held(held, facts, line, lease)


def gpus_for(plan: LaunchPlan, facts: MachineFacts | None) -> Sequence[Gpu]:
    """All GPUs of this machine; a plan for a part of a pod was made from some of them."""
    return find_gpus(os.environ) if facts is None or plan.vipu.pod is not None else facts.gpus


def _start_under_server(
    plan: LaunchPlan, facts: MachineFacts | None, line: CommandLine, network: "JobNetwork | None"
) -> int:
    """Start the job on virtual IPUs that a server hands out."""
    from poprun.lease.server_lease import leased_from_server  # noqa: PLC0415 - few jobs ask a server

    with leased_from_server(plan, find_gpus(os.environ), network) as (held, lease, given):
        if given is not None:
            return _start_on_hosts(held, line, given, lease)
        return _start_as_held(held, facts, line, lease)


def _start_as_held(plan: LaunchPlan, facts: MachineFacts | None, line: CommandLine, lease: HeldLease) -> int:
    """Start the job on the devices, or on the part of the cores, that it was given."""
    if facts is None:
        return _start_on_cores(plan, None, line, lease)
    facts = facts.with_cores(plan.cores)
    return _start_on_cores(place(plan, facts), facts, line, lease)


def _start_on_hosts(plan: LaunchPlan, line: CommandLine, network: "JobNetwork", *leases: HeldLease) -> int:
    """Start the job on several hosts, with what it holds on each of them."""
    if not (plan.takes_lease or plan.owns_cores):
        return _start(plan, line, network, *leases)
    from poprun.lease.host_leases import leased_on_hosts  # noqa: PLC0415 - most jobs of several hosts hold nothing

    with leased_on_hosts(plan, is_fixed=line.plan_file is not None) as kept:
        return _start(plan, line, network, *leases, *kept.held(), kept=kept)


def _start_on_cores(plan: LaunchPlan, facts: MachineFacts | None, line: CommandLine, *leases: HeldLease) -> int:
    """Start the job, on cores that no other job has if it wants such; None for facts: on those of the plan."""
    if not plan.owns_cores:
        return _start(plan, line, None, *leases)
    from poprun.lease.local_lease import cores_leased  # noqa: PLC0415 - few jobs want cores of their own

    with cores_leased(plan, facts) as (placed, lease):
        return _start(placed, line, None, *leases, lease)


def _start(
    plan: LaunchPlan,
    line: CommandLine,
    network: "JobNetwork | None",
    *leases: HeldLease,
    kept: "HostLeases | None" = None,
) -> int:
    from poprun.job.attempts import run_job  # noqa: PLC0415 - a dry run starts nothing

    if line.prints_topology:
        screen.show(print_out(plan, line))
    if line.verbosity:
        for lease in leases:
            screen.tell(f"holds {lease}")
    first = network if network is None or kept is None else kept.on(network)
    return run_job(
        plan,
        environ=os.environ,
        verbosity=line.verbosity,
        leases=leases,
        network=first,
        look=lambda: None if network is None else _look(plan, network, kept),
    )


def _look(plan: LaunchPlan, network: "JobNetwork", kept: "HostLeases | None") -> "JobNetwork":
    """The network for the next attempt: with a new key, and what is held on each host."""
    network = replace(network, key=look_again(plan))
    if kept is None:
        return network
    kept.renew()
    return kept.on(network)
