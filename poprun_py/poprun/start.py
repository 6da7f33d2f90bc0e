"""From a plan to a job: with the virtual IPUs and the cores that it is to have to itself."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from poprun.cli.command_line import CommandLine
from poprun.other_hosts import look_again
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import place
from poprun.plan.topology import Gpu, MachineFacts
from poprun.pool.held_lease import HeldLease
from poprun.print_out import print_out
from poprun.probe.gpus import find_gpus
from poprun.text import screen

if TYPE_CHECKING:
    from poprun.hosts.routes import JobNetwork
    from poprun.lease.host_leases import HostLeases


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
    from poprun.lease.ipus import leased  # noqa: PLC0415 - a job on a laptop asks nobody

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
    from poprun.lease.cores import cores_leased  # noqa: PLC0415 - few jobs want cores of their own

    with cores_leased(plan, facts) as (placed, lease):
        return _start(placed, line, None, *leases, lease)


def _start(
    plan: LaunchPlan,
    line: CommandLine,
    network: "JobNetwork | None",
    *leases: HeldLease,
    kept: "HostLeases | None" = None,
) -> int:
    from poprun.job.run import run_job  # noqa: PLC0415 - a dry run starts nothing

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
