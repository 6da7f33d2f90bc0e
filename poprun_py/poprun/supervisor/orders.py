"""What an agent is told when its program is to start. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from popdist.contract import HYDRA_DESCRIPTOR, PROGRESS_DESCRIPTOR, STORE_DESCRIPTOR, Endpoint
from popdist.progress import ANNOUNCEMENT_AT, ANNOUNCEMENT_FORMAT, USED_BYTES
from poprun.control import Message
from poprun.environment import program_environment
from poprun.plan import LaunchPlan, StartFacts

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Which job an attempt belongs to.

    Attributes:
        job_id: The same for all instances and all attempts.
        restart_count: Attempts before this one.
        began_at_seconds: Monotonic time at which the first attempt began.
        control_host: Address of this host at which the agents of other hosts report; None when there are none.
        lease: Descriptor that the agents of this host keep open until their programs have ended, or None.
    """

    job_id: str
    restart_count: int
    began_at_seconds: float
    control_host: str | None = None
    lease: int | None = None

    def with_lease(self, streams: Sequence[int]) -> list[int]:
        """The descriptors that an agent is given: those of its program, and the lease, which it keeps."""
        return [*streams, self.lease] if self.lease is not None and streams else list(streams)


def start_order(
    plan: LaunchPlan, index: int, environ: Mapping[str, str], identity: JobIdentity, ports: Sequence[int]
) -> Message:
    """The order that starts the program of instance ``index``.

    Args:
        plan: The job.
        index: Global index of the instance.
        environ: The environment that poprun was called in.
        identity: Which job this is, and which attempt.
        ports: Where torch's own store and popdist's will listen, on instance 0's host.
    """
    master, store = (Endpoint(host=_LOOPBACK, port=port) for port in ports)
    binding = plan.instance(index).binding
    start = StartFacts(job_id=identity.job_id, restart_count=identity.restart_count, master=master, store=store)
    return {
        "order": "start",
        "words": plan.program,
        "working_directory": plan.working_directory,
        "environment": program_environment(plan, index, environ, start),
        "cores": binding.cores if binding else (),
        "memory_nodes": binding.memory_nodes if binding else (),
        "descriptor_variables": [HYDRA_DESCRIPTOR, STORE_DESCRIPTOR, PROGRESS_DESCRIPTOR],
        "store_variable": STORE_DESCRIPTOR,
        "progress_variable": PROGRESS_DESCRIPTOR,
        "progress_bytes": USED_BYTES,
        "announcement_at": ANNOUNCEMENT_AT,
        "announcement_format": ANNOUNCEMENT_FORMAT,
        "grace_seconds": plan.ending.stop_timeout_seconds,
    }
