"""The identity of an attempt: the job that it belongs to, which attempt of it, and what it has from the start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poprun.plan.plan import LaunchPlan, LeasedDevices
from poprun.plan.program_environment import launcher_environment

if TYPE_CHECKING:
    from poprun.devices.pool.records import HeldLease
    from poprun.hosts.routes import HostRoute, JobNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """A job, and which attempt of it this is.

    Attributes:
        job_id: The same for all instances and all attempts.
        restart_count: Attempts before this one.
        began_at_seconds: Monotonic time at which the first attempt began.
        network: How the hosts of the job reach each other; None when there is only this machine.
        leases: What the job holds.
        given: The devices and cores that leases gave it on this machine; None for those that its plan names.
        open_files: The user's soft limit of open files, above which poprun may have raised its own; 0 for none.
    """

    job_id: str
    restart_count: int
    began_at_seconds: float
    network: "JobNetwork | None" = None
    leases: "tuple[HeldLease, ...]" = ()
    given: LeasedDevices | None = None
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

    def devices_of(self, plan: LaunchPlan, index: int) -> LeasedDevices:
        """What the job has on the host of instance ``index``, by its leases there or as its plan names it."""
        given, route = self.given or plan.named_devices, self.route(plan, index)
        return replace(given, devices=route.devices) if route is not None and route.devices else given

    def route(self, plan: LaunchPlan, index: int) -> "HostRoute | None":
        """The route to the host of instance ``index``; None when there is only this machine."""
        return None if self.network is None else self.network.hosts[plan.instance(index).host_index]
