"""The network between the hosts of a job: found and checked before a start, and forgotten without one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from popdist.ground.trusted_paths import own_folder_problem
from poprun.errors import PlanError
from poprun.hosts.probe.machine import names_of_this_machine
from poprun.launch.process.limits import raise_open_files
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.program_environment import passed_environment
from poprun.text import screen
from poprun.text.ranges import fold_hosts

if TYPE_CHECKING:
    from poprun.launch.routes import JobNetwork

_MAX_SHOWN_ROUTES: Final = 4


def find_network(plan: LaunchPlan, environ: Mapping[str, str], verbosity: int) -> "JobNetwork | None":
    """Check all hosts of a job; return their addresses and the job's key. None if only this machine is used."""
    if plan.launcher is LauncherKind.SRUN and plan.remote.slurm_job is None:
        raise PlanError(
            "--launcher srun starts processes in an allocation of Slurm, and poprun is in none: call it in a "
            "batch script (--emit sbatch writes one), or in the shell of salloc, or leave --launcher out"
        )
    local_names = names_of_this_machine(plan.hosts) & set(plan.hosts)
    if local_names == set(plan.hosts):
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
    shown_routes = ", ".join([*routes[:_MAX_SHOWN_ROUTES], *(["..."] if len(routes) > _MAX_SHOWN_ROUTES else [])])
    screen.log(f"hosts talk over {shown_routes}: {reason}")
    if verbosity:
        passed = sorted(passed_environment(environ, plan.passed_names()))
        screen.log(f"variables that go to other hosts: {', '.join(passed)}")
    return network


def found_again(plan: LaunchPlan, network: "JobNetwork") -> "JobNetwork":
    """Check all hosts again before a restart; return ``network`` with a new key. Raise HostsError on failure."""
    return replace(network, key=_examine(plan)[0].key)


def _examine(plan: LaunchPlan) -> "tuple[JobNetwork, str]":
    from poprun.hosts.preflight import examine_hosts

    return examine_hosts(plan, names_of_this_machine(plan.hosts) & set(plan.hosts), screen.log)


def forget_key(plan: LaunchPlan, network: "JobNetwork | None") -> None:
    """Make the hosts delete the file with the job's secret key, because the job is not started after all."""
    if network is not None:
        from poprun.hosts import preflight

        preflight.forget_key(plan, network.key, names_of_this_machine(plan.hosts) & set(plan.hosts))
