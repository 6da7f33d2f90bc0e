"""The identity of an attempt: the job that it belongs to, which attempt of it, and what it has from the start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poprun.plan.plan import LaunchPlan, LeasedDevices

if TYPE_CHECKING:
    from poprun.devices.pool.records import HeldLease
    from poprun.hosts.routes import HostRoute, JobNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """A job, and which attempt of it this is."""

    job_id: str  # the same for all instances and all attempts
    restart_count: int
    began_at_seconds: float  # monotonic time at which the first attempt began
    network: "JobNetwork | None" = None  # None when there is only this machine
    leases: "tuple[HeldLease, ...]" = ()
    given: LeasedDevices | None = None  # what leases gave the job on this machine; None for what its plan names
    open_files: int = 0  # the user's soft limit, above which poprun may have raised its own; 0 for none

    def with_leases(self, streams: Sequence[int]) -> list[int]:
        """The descriptors to send to an agent: the streams of its program, and the leases, which it keeps open."""
        leases = [lease.descriptor for lease in self.leases if lease.descriptor is not None]
        return [*streams, *leases] if streams else []

    def devices_of(self, plan: LaunchPlan, index: int) -> LeasedDevices:
        """The devices and cores of the job on the host of instance ``index``: those leased, or those planned."""
        given, route = self.given or plan.named_devices, self.route(plan, index)
        return replace(given, devices=route.devices) if route is not None and route.devices else given

    def route(self, plan: LaunchPlan, index: int) -> "HostRoute | None":
        """How to reach the host of instance ``index``; None if there is only this machine."""
        return None if self.network is None else self.network.hosts[plan.instance(index).host_index]
