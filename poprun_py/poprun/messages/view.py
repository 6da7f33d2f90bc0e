"""The view of a running job: one value, which poprun sends and a monitor draws.

Pure. Both ends of the connection know it as this dataclass, and the connection as JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from sys import float_info
from typing import Annotated, Any, Self

from poprun.errors import PlanError
from poprun.messages.json_lines import Message, ProtocolError
from poprun.text.fields import between, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance at one moment.

    Attributes:
        index: Global index.
        host: Name of the host it runs on.
        state: How far its process has come, in a word.
        exit_code: Its exit code, negative for a signal; None while it runs.
        looked_at_seconds: Monotonic time at which its agent looked at it last, or None before the first look.
        num_steps: Optimizer steps that popdist saw; 0 without popdist.
        step: The step that the program reported last, or None.
        loss: The loss that it reported last, or None.
        waits_in: The collective that it waits in, in words; empty when it does not.
        cpu_seconds: Processor time of its processes, or None before the first look.
        memory_bytes: Their memory, or None before the first look.
        last_line: The last line that it printed.
    """

    index: int
    host: str
    state: str
    exit_code: int | None = None
    looked_at_seconds: float | None = None
    num_steps: int = 0
    step: int | None = None
    loss: float | None = None
    waits_in: str = ""
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job at one moment.

    Attributes:
        pid: poprun's own process.
        job_id: The job's name.
        restart_count: How often it has been started again.
        phase: How far it has come, in a word.
        seconds: How long it has been going on.
        program: Its argv.
        num_replicas: Replicas of the whole job.
        instances: Its instances, by index.
        said: What poprun has said of where the programs stand since the last view; empty for nothing.
    """

    pid: int
    job_id: str
    restart_count: int
    phase: str
    seconds: Annotated[float, between(0, float_info.max)]
    program: tuple[str, ...]
    num_replicas: int
    instances: tuple[InstanceView, ...]
    said: str = ""

    def to_message(self) -> Message:
        """The view as JSON values. Inverse of :meth:`from_message`."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """The view that ``message`` holds.

        Raises:
            ProtocolError: If it holds none, as that of another version of poprun would.
        """
        try:
            return read_record(cls, message, "the view", noun="a view")
        except PlanError:
            raise ProtocolError("this job is one of another version of poprun") from None
