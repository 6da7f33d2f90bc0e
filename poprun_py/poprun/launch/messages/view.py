"""The view of a running job: one value, which poprun sends and a monitor draws.

Pure. Both ends of the connection know it as this dataclass, and the connection as JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from sys import float_info
from typing import Annotated, Any, Self

from popdist.ground.layout import Parallelism
from poprun.errors import PlanError
from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import Message
from poprun.text.fields import between, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance at one moment."""

    index: int
    host: str
    state: str  # how far its process has come, in a word
    exit_code: int | None = None  # negative for a signal; None while it runs
    looked_at_seconds: float | None = None  # monotonic time of its agent's last look
    num_steps: int = 0  # optimizer steps that were counted; 0 where nobody counts them
    step: int | None = None  # the step and the loss that the program reported last
    loss: float | None = None
    waits_in: str = ""  # the collective that it waits in
    cpu_seconds: float | None = None  # of all its processes, as the memory; None before the first look
    memory_bytes: int | None = None
    last_line: str = ""  # that it printed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job at one moment."""

    pid: int  # of poprun
    job_id: str
    restart_count: int
    phase: str  # how far it has come, in a word
    seconds: Annotated[float, between(0, float_info.max)]
    program: tuple[str, ...]
    num_replicas: int
    parallelism: Parallelism
    instances: tuple[InstanceView, ...]
    slow: str = ""  # who keeps the others waiting now, and why; empty while nobody does
    said: str = ""  # what poprun has said since the last view of where the programs stand

    def to_message(self) -> Message:
        """The view as JSON values. Inverse of :meth:`from_message`."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """The view that ``message`` holds; a ProtocolError if it is one of another version of poprun."""
        try:
            return read_record(cls, message, "the view", noun="a view")
        except PlanError:
            raise ProtocolError("this job is one of another version of poprun") from None
