"""The order that starts a program: its words, environment and placement, and the job that it belongs to. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from popdist.contract import HYDRA_DESCRIPTOR, PROGRESS_DESCRIPTOR, STORE_DESCRIPTOR, Endpoint
from popdist.progress import ANNOUNCEMENT_AT, ANNOUNCEMENT_FORMAT, USED_BYTES
from poprun.messages.control import Message
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.plan.program_environment import (
    interface_environment,
    launcher_environment,
    passed_environment,
    program_environment,
)

if TYPE_CHECKING:
    from poprun.hosts.routes import HostRoute, JobNetwork
    from poprun.pool.records import HeldLease


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """A job, and which attempt of it this is.

    Attributes:
        job_id: The same for all instances and all attempts.
        restart_count: Attempts before this one.
        began_at_seconds: Monotonic time at which the first attempt began.
        network: How the hosts of the job reach each other; None when there is only this machine.
        leases: What the job holds.
        open_files: The user's soft limit of open files, above which poprun may have raised its own; 0 for none.
    """

    job_id: str
    restart_count: int
    began_at_seconds: float
    network: "JobNetwork | None" = None
    leases: "tuple[HeldLease, ...]" = ()
    open_files: int = 0

    def launcher_environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The part of ``environ`` that the launcher gets."""
        return environ if self.network is None else launcher_environment(environ)

    def with_leases(self, streams: Sequence[int]) -> list[int]:
        """The descriptors that an agent is given: those of its program, and the leases, which it keeps."""
        leases = [lease.descriptor for lease in self.leases if lease.descriptor is not None]
        return [*streams, *leases] if streams else []

    @property
    def open_files_of_launcher(self) -> int:
        """The soft limit of open files for the launcher; 0 for poprun's own.

        On one machine it needs as many as poprun, and the agents give the programs the user's. Other hosts have
        limits of their own, and nothing is passed on to them.
        """
        return 0 if self.network is None else self.open_files

    @property
    def keepers(self) -> tuple[int, ...]:
        """Children of poprun that keep the leases on other hosts from one attempt to the next."""
        return () if self.network is None else self.network.keepers

    def route(self, plan: LaunchPlan, index: int) -> "HostRoute | None":
        """The route to the host of instance ``index``; None when there is only this machine."""
        return None if self.network is None else self.network.hosts[plan.instance(index).host_index]


def start_order(
    plan: LaunchPlan, index: int, environ: Mapping[str, str], identity: JobIdentity, meeting: Sequence[Endpoint]
) -> Message:
    """The order that starts the program of instance ``index``.

    ``meeting`` is where torch's own store and popdist's will listen, on instance 0's host.
    """
    master, store = meeting
    binding = plan.instance(index).binding
    start = StartFacts(job_id=identity.job_id, restart_count=identity.restart_count, master=master, store=store)
    route = identity.route(plan, index)
    return {
        "order": "start",
        "words": plan.program,
        "working_directory": plan.working_directory,
        "environment": _added_environment(plan, index, environ, route, start),
        "keeper": route.keeper if route else "",
        "cores": binding.cores if binding else (),
        "memory_nodes": binding.memory_nodes if binding else (),
        "descriptor_variables": [HYDRA_DESCRIPTOR, STORE_DESCRIPTOR, PROGRESS_DESCRIPTOR],
        "store_variable": STORE_DESCRIPTOR,
        "progress_variable": PROGRESS_DESCRIPTOR,
        "progress_bytes": USED_BYTES,
        "announcement_at": ANNOUNCEMENT_AT,
        "announcement_format": ANNOUNCEMENT_FORMAT,
        "open_files": identity.open_files if identity.network is None else 0,
        "grace_seconds": plan.ending.stop_timeout_seconds,
    }


def _added_environment(
    plan: LaunchPlan, index: int, environ: Mapping[str, str], route: "HostRoute | None", start: StartFacts
) -> dict[str, str]:
    """The variables that an agent adds to its own environment: on one machine that is the user's already."""
    if route is None:
        return program_environment(plan, index, environ, start)
    if route.devices:
        plan = replace(plan, devices=route.devices)
    return {
        **passed_environment(environ, plan.passed_names(index)),
        **interface_environment(environ, route.interface),
        **program_environment(plan, index, environ, start),
    }
