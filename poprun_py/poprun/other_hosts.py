"""What poprun does before a job of other hosts starts, and what it says of it."""

import os
from typing import TYPE_CHECKING, Final

from poprun.errors import PlanError
from poprun.hosts.routes import JobKey, JobNetwork
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.program_environment import passed_environment
from poprun.probe.machine import names_of_this_machine
from poprun.text import screen
from poprun.text.host_names import fold_hosts

if TYPE_CHECKING:
    from poprun.hosts.preflight import Examination

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
