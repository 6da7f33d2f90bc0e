"""From a plan to a job: its hosts looked at, its virtual IPUs and cores leased, its processes started."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poprun.errors import PlanError
from poprun.job.attempts import run_job
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.planner import place
from poprun.plan.program_environment import passed_environment
from poprun.plan.topology import Gpu, MachineFacts
from poprun.probe.hardware import find_gpus
from poprun.probe.machine import names_of_this_machine
from poprun.text import screen
from poprun.text.host_names import fold_hosts

if TYPE_CHECKING:
    from poprun.hosts.preflight import Examination
    from poprun.hosts.routes import JobNetwork
    from poprun.lease.host_leases import HostLeases
    from poprun.pool.records import HeldLease

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
    with _holding(plan, facts, network) as job:
        announce(job.plan)
        if verbosity:
            for lease in job.leases:
                screen.tell(f"holds {lease}")
        return run_job(
            job.plan,
            environ=os.environ,
            verbosity=verbosity,
            leases=job.leases,
            network=job.network,
            look=job.look_again,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HoldingJob:
    """A job that holds what it needs.

    Attributes:
        plan: The job on what it holds.
        leases: What it holds.
        network: How its hosts reach each other in the first attempt; None when there is only this machine.
        on_hosts: Its leases on several hosts, which are renewed before each attempt, or None.
    """

    plan: LaunchPlan
    leases: tuple["HeldLease", ...]
    network: "JobNetwork | None" = None
    on_hosts: "HostLeases | None" = None

    def look_again(self) -> "JobNetwork | None":
        """The network for the next attempt: the hosts have a new key, and hold on each what they held.

        Raises:
            HostsError: If a host cannot take part any more.
        """
        if self.network is None:
            return None
        network = replace(self.network, key=_examine(self.plan).network.key)
        if self.on_hosts is None:
            return network
        self.on_hosts.renew()
        return self.on_hosts.on(network)


@contextmanager
def _holding(plan: LaunchPlan, facts: MachineFacts | None, network: "JobNetwork | None") -> Iterator[_HoldingJob]:
    """Hold the virtual IPUs and the cores of a job: from a server, from this machine's pool, or on each host."""
    leases: list[HeldLease] = []
    with ExitStack() as held:
        if plan.asks_server:
            from poprun.lease.server_lease import leased_from_server  # noqa: PLC0415 - few jobs ask a server

            plan, lease, network = held.enter_context(leased_from_server(plan, find_gpus(os.environ), network))
            leases.append(lease)
        elif plan.takes_lease and network is None:
            from poprun.lease.local_lease import leased  # noqa: PLC0415 - a job on a laptop asks nobody

            gpus = gpus_for(plan, facts)
            plan, lease = held.enter_context(
                leased(plan, gpus, lambda: find_gpus(os.environ), is_fixed=facts is None)
            )
            leases.append(lease)
        if network is not None:
            yield _hold_on_hosts(plan, network, leases, held, is_fixed=facts is None)
            return
        if leases and facts is not None:
            facts = facts.with_cores(plan.cores)
            plan = place(plan, facts)
        if plan.owns_cores:
            from poprun.lease.local_lease import cores_leased  # noqa: PLC0415 - few jobs want cores of their own

            plan, lease = held.enter_context(cores_leased(plan, facts))
            leases.append(lease)
        yield _HoldingJob(plan=plan, leases=tuple(leases))


def _hold_on_hosts(
    plan: LaunchPlan, network: "JobNetwork", leases: Sequence["HeldLease"], held: ExitStack, *, is_fixed: bool
) -> _HoldingJob:
    """Hold what the job needs on each of its hosts, beside the ``leases`` that it has."""
    if not (plan.takes_lease or plan.owns_cores):
        return _HoldingJob(plan=plan, leases=tuple(leases), network=network)
    from poprun.lease.host_leases import leased_on_hosts  # noqa: PLC0415 - most jobs of several hosts hold nothing

    kept = held.enter_context(leased_on_hosts(plan, is_fixed=is_fixed))
    return _HoldingJob(plan=plan, leases=(*leases, *kept.held()), network=kept.on(network), on_hosts=kept)


def gpus_for(plan: LaunchPlan, facts: MachineFacts | None) -> Sequence[Gpu]:
    """All GPUs of this machine; a plan for a part of a pod was made from some of them."""
    return find_gpus(os.environ) if facts is None or plan.vipu.pod is not None else facts.gpus
