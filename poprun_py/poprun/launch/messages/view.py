"""The view of a running job: one value, which poprun sends and a monitor draws. Pure.

poprun and the monitor use the view as a dataclass; the connection contains it as JSON.
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
    """The state of one instance at one moment, for the monitors that show the job to users."""

    index: int
    host: str
    state: str  # the state of its process, in a word
    exit_code: int | None = None  # negative for a signal; None while the instance runs
    looked_at_seconds: float | None = None  # monotonic time of its agent's last measurement
    num_steps: int = 0  # optimizer steps that were counted; 0 if not counted
    step: int | None = None  # the step that the program reported last, with its loss
    loss: float | None = None
    waits_in: str = ""  # the collective in which the instance waits
    cpu_seconds: float | None = None  # of all its processes, like the memory; None if not yet measured
    memory_bytes: int | None = None
    last_line: str = ""  # the last line that the instance printed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The state of a job at one moment, for the monitors that show the job to users."""

    pid: int  # process id of poprun
    job_id: str
    restart_count: int
    phase: str  # the phase of the job, in a word
    seconds: Annotated[float, between(0, float_info.max)]
    program: tuple[str, ...]
    num_replicas: int
    parallelism: Parallelism
    instances: tuple[InstanceView, ...]
    slow: str = ""  # the instance for which all others wait now, and why; empty if none
    said: str = ""  # messages of poprun about the programs' state since the last view

    def to_message(self) -> Message:
        """Return this state of a job as a message for JSON; :meth:`from_message` makes the state from it."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the state of a job in ``message``. Raise ProtocolError if another version of poprun sent it."""
        try:
            return read_record(cls, message, "the view", noun="a view")
        except PlanError:
            raise ProtocolError("this job is one of another version of poprun") from None
