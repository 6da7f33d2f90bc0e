"""The state of a job and of its instances at one moment, the job's identity, and names of exit codes. Pure."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final, Self

from popdist.errors import name_instances
from popdist.ground.layout import Parallelism
from popdist.ground.progress import PhaseCounters, Progress
from popdist.ground.values import dataclass

if TYPE_CHECKING:
    from poprun.launch.process.machine_evidence import Evidence

MAX_SAMPLES: Final = 64  # samples of memory that are kept of an instance
AGENT_KILLED: Final = "its agent was killed"
"""The problem of an instance whose agent (parent process) was killed; the kernel has then killed its program."""

AGENT_FROZEN: Final = "nothing was heard of its agent for 30 s: it is stopped, or its host stands still"
"""The problem of an instance whose agent (parent process) was stopped by SIGSTOP and could not be continued."""

FROZEN_SECONDS: Final = 30.0
"""The time without a message of an agent after which its instance is lost. Agents send a message each second."""

HOST_LOST: Final = "its host does not answer any more"
"""The problem of an instance whose host failed, or cannot be reached; the agent on the host ends the program."""

OWN_NETWORK_LOST: Final = "no other host answers any more: the network of the machine that poprun runs on was cut"
"""The problem of all instances on other hosts, if poprun loses several other hosts, and all at once."""

SHIM_KILLED: Final = "its shim was killed"
"""The problem of an instance whose shim (the launcher's child) was killed, alone or with the MPI runtime."""

RUNTIME_KILLED: Final = "the MPI launcher's process on its host was killed"
"""The problem of an instance if the MPI process that started its shim, such as Hydra's proxy, has ended."""

NOT_EXECUTABLE: Final = 126  # a shell's exit code for a program that the shell cannot execute
NOT_FOUND: Final = 127  # a shell's exit code for a program that does not exist
EXIT_OF_SIGNAL: Final = 128  # a shell adds this to the number of the signal that ended a program
NOT_BOUND: Final = 70  # EX_SOFTWARE of sysexits.h: poprun's exit code for an instance that it could not start


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """The memory of an instance over time: the first and the last sample, and some between them."""

    # (time, bytes), by time; at most ``MAX_SAMPLES``. The times are monotonic seconds
    samples: tuple[tuple[float, int], ...] = ()
    peak_bytes: int = 0  # the largest value of all samples, including samples that were dropped
    gap_seconds: float = 0.0  # the least time between two kept samples, except before the last sample

    def after(self, at_seconds: float, num_bytes: int) -> Self:
        """Return the curve with a new sample of memory; drop samples that are too close together or too many."""
        before = self.samples
        is_last_kept = len(before) < 2 or before[-1][0] - before[-2][0] >= self.gap_seconds
        samples = (*(before if is_last_kept else before[:-1]), (at_seconds, num_bytes))
        gap_seconds = self.gap_seconds
        if len(samples) > MAX_SAMPLES:
            gap_seconds = (samples[-1][0] - samples[0][0]) * 2 / MAX_SAMPLES
            samples = (*samples[:-1:2], samples[-1])
        peak_bytes = max(self.peak_bytes, num_bytes)
        return type(self)(samples=samples, peak_bytes=peak_bytes, gap_seconds=gap_seconds)

    def with_peak(self, num_bytes: int) -> Self:
        """Return the curve with its peak raised to ``num_bytes``, unless the peak is already larger."""
        return replace(self, peak_bytes=max(self.peak_bytes, num_bytes))


_NO_MEMORY: Final = MemoryCurve()


class InstanceState(StrEnum):
    """The state of an instance, from awaited to ended, in the order in which an instance passes through them."""

    AWAITED = "awaited"  # no agent has reported
    READY = "ready"  # the agent waits for the start order
    RUNNING = "running"
    EXITED = "exited"  # the program has ended; poprun ends the processes that the program left
    ENDED = "ended"  # no process of the instance is left


class Phase(IntEnum):
    """The phase of a job, from start to kill. A job never returns to an earlier phase."""

    STARTING = 0
    RUNNING = 1
    INTERRUPTED = 2
    STOPPING = 3
    KILLING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The memory and processor time of all processes of an instance, at one moment."""

    at_seconds: float  # monotonic time at which poprun received the measurement
    memory_bytes: int  # resident memory; of helper processes, only memory that is not shared
    cpu_seconds: float  # processor time of the running processes, each since its start
    num_processes: int  # number of running processes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTotals:
    """The delays that its host has caused an instance so far, such as waits for a core, and free memory."""

    run_delay_seconds: float = 0.0  # time in which the main thread was ready to run but had no core
    throttled_seconds: float = 0.0  # time in which the control group's CPU quota stopped the instance
    num_major_faults: float = 0.0  # number of pages that the processes had to read from a disk
    num_in_disk_wait: int = 0  # number of processes that wait for a disk at this moment
    room_bytes: int = 0  # free memory of the host or the control group; 0 if unknown
    counters: Mapping[str, float] = field(default_factory=dict)  # values of `machine_counters`, which only grow

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Self:
        """Return the delays and the free memory in ``event``, a message of the instance's agent."""
        return cls(
            run_delay_seconds=event.get("run_delay_seconds", 0.0),
            throttled_seconds=event.get("throttled_seconds", 0.0),
            num_major_faults=event.get("major_faults", 0.0),
            num_in_disk_wait=event.get("num_in_disk_wait", 0),
            room_bytes=event.get("room_bytes", 0),
            counters=event.get("counters", {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """All facts about one instance at one moment. Each event of the instance's agent makes a new status."""

    index: int
    state: InstanceState = InstanceState.AWAITED
    # the program's exit code, negative for a signal; None if the program runs or the code is unknown
    exit_code: int | None = None
    started_at_seconds: float | None = None  # monotonic time at which poprun heard that the program runs, or None
    # monotonic time of the program's end, or of the moment the agent was lost
    exited_at_seconds: float | None = None
    was_stopped: bool = False  # whether the program ended because poprun had asked it to end
    problem: str = ""  # a failure outside of the program, such as `AGENT_KILLED`; empty if there is none
    usage: Usage | None = None  # memory and processor time of its processes when last measured, or None
    # monotonic time of the last measurement at which its processes computed; None before the first
    busy_at_seconds: float | None = None
    memory: MemoryCurve = _NO_MEMORY  # memory of its processes over time
    progress: Progress | None = None  # the last progress that the program reported, or None
    counters: PhaseCounters | None = None  # its time by phase; None if the program has no sampler
    machine: MachineTotals | None = None
    first_machine: MachineTotals | None = None  # the totals of the first measurement
    machine_evidence: "Evidence | None" = None  # facts about a remote host that may explain its failure
    # monotonic time at which the last change of ``progress`` was heard of
    progressed_at_seconds: float | None = None

    @property
    def cannot_run(self) -> bool:
        """Whether the program could not even be executed, for example because no such file exists."""
        return bool(self.problem) and self.exit_code in (NOT_BOUND, NOT_EXECUTABLE, NOT_FOUND)

    @property
    def is_waiting(self) -> bool:
        """Whether the program runs and has reported that it waits for other instances."""
        is_reported = self.progress is not None and self.progress.waiting_since_seconds is not None
        return is_reported and self.state is InstanceState.RUNNING

    @property
    def has_failed(self) -> bool:
        """Whether the instance failed by itself; its exit code does not count if poprun stopped the instance."""
        return bool(self.problem) or (not self.was_stopped and self.exit_code not in (0, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """All facts about a job at one moment from which poprun decides what to do next."""

    phase: Phase  # how far the job has come
    in_phase_seconds: float  # how long the job has been in this phase
    num_instances: int
    in_job_seconds: float = 0.0  # how long the job has been going on, earlier attempts included
    num_ready: int = 0  # instances whose agent has reported
    num_ended: int = 0  # instances of which nothing is left
    failed_instance: int | None = None  # the instance that failed first, or None
    num_interrupts: int = 0  # times that Ctrl-C was pressed
    is_terminated: bool = False  # whether poprun was asked to end
    is_output_closed: bool = False  # whether nobody reads poprun's output any more
    hang_seconds: float = 0.0  # the time without any progress while instances wait for other instances
    is_hang_told: bool = False  # whether poprun has printed that the job hangs
    # whether instances that compute nothing must be asked for their stacks, to find out if they wait
    is_hang_suspected: bool = False
    awaits_stacks: bool = False  # whether programs have been asked for their stacks, and some have not answered
    has_recorders: bool = False  # whether programs record their calls, and were not asked since a failure
    awaits_evidence: bool = False  # whether programs have been asked for recorded calls and may still answer
    # Whether all failed instances only lost a peer: the peer may be about to end with the first failure.
    awaits_culprit: bool = False
    has_lost_shim: bool = False  # whether the MPI runtime has lost a shim that had not reported
    # for how long, while the job starts, the MPI runtime has had no shim that may still report
    no_shim_seconds: float = 0.0
    has_launcher_ended: bool = False  # whether all launcher's processes have ended, or one has failed


def name_with_place(instances: Sequence[int], parallelism: Parallelism) -> str:
    """Return ``instances`` as text, and the stage or shard of a replica, if all of them have the same one."""
    common = parallelism.describe(instances)
    return f"{name_instances(instances)} ({common})" if common else name_instances(instances)


def shell_code(code: int) -> int:
    """Return the exit code that a shell shows for the code ``code``: 128 + n after signal n (``code`` is -n)."""
    return EXIT_OF_SIGNAL - code if code < 0 else code


_REPORTED_BY_SHELLS: Final = frozenset(
    {
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGTERM,
        signal.SIGXCPU,
    }
)
"""The signals n for which the exit code 128 + n means that a shell reports the signal n of its child."""


def signal_of(code: int) -> int | None:
    """Return the signal n in an exit code -n, or in a shell's exit code 128 + n; None if there is no signal."""
    if code < 0:
        return -code
    return code - EXIT_OF_SIGNAL if code - EXIT_OF_SIGNAL in _REPORTED_BY_SHELLS else None


def name_code(code: int) -> str:
    """Return the short name of an exit code, such as ``exit code 3`` or ``SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def describe_code(code: int) -> str:
    """Return an exit code with its meaning, such as ``exit code 3`` or ``SIGSEGV, segmentation fault``."""
    signum = signal_of(code)
    if signum is None:
        return name_code(code)
    if code >= 0:
        return f"{name_code(code)}, which stands for {name_code(-signum)}"
    meaning = signal.strsignal(signum)
    return f"{name_code(code)}, {meaning.lower()}" if meaning else name_code(code)
