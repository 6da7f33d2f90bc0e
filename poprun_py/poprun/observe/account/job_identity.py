"""The identity of a job, which poprun knows before the job starts. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from popdist.ground.values import dataclass
from poprun.plan.plan import LaunchPlan, LeasedDevices

if TYPE_CHECKING:
    from poprun.devices.pool.records import HeldLease
    from poprun.launch.routes import HostRoute, JobNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """The facts about a job that an attempt needs: its id, number of restarts, network and leased devices."""

    job_id: str  # the same for all instances and all attempts
    restart_count: int
    began_at_seconds: float  # monotonic time at which the first attempt began
    network: "JobNetwork | None" = None  # None if the job runs only on this machine
    leases: "tuple[HeldLease, ...]" = ()
    given: LeasedDevices | None = None  # devices that are leased on this machine; None: the plan's devices
    open_files: int = 0  # the user's soft limit, above which poprun may have raised its own; 0 for none

    def with_leases(self, streams: Sequence[int]) -> list[int]:
        """Return the file descriptors to send to an agent, which starts a program: ``streams``, the program's
        standard streams, and the lock files of the job's leased devices; [] for an agent on another host.
        """
        if not streams:  # the agent is on another host, to which no descriptor can be sent
            return []
        return [*streams, *(lease.descriptor for lease in self.leases if lease.descriptor is not None)]

    def devices_of(self, plan: LaunchPlan, index: int) -> LeasedDevices:
        """Return the GPUs and cores that the job uses on the host of instance ``index``."""
        leased, route = self.given or plan.named_devices, self.route(plan, index)
        return replace(leased, devices=route.devices) if route is not None and route.devices else leased

    def route(self, plan: LaunchPlan, index: int) -> "HostRoute | None":
        """Return name and address of the host of instance ``index``; None if the job uses only this machine."""
        return None if self.network is None else self.network.hosts[plan.instance(index).host_index]
