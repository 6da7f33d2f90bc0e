"""The record of one attempt of a job: the events of its agents until now, and the snapshot for the policy.

The record starts, reads and writes nothing; each time is an argument.
"""

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from popdist.ground.contract import Endpoint
from popdist.ground.progress import PhaseCounters, Progress
from poprun.errors import SHORTAGES, describe_error
from poprun.launch.messages.control import LOST
from poprun.observe.account.job_identity import JobIdentity
from poprun.observe.account.state import (
    AGENT_FROZEN,
    AGENT_KILLED,
    FROZEN_SECONDS,
    HOST_LOST,
    NOT_BOUND,
    NOT_EXECUTABLE,
    NOT_FOUND,
    OWN_NETWORK_LOST,
    RUNTIME_KILLED,
    SHIM_KILLED,
    InstanceState,
    InstanceStatus,
    JobSnapshot,
    MachineTotals,
    Phase,
    Usage,
)
from poprun.observe.judge.hangs import HangWatch
from poprun.observe.judge.job_end import first_failure
from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import fold_numbers

if TYPE_CHECKING:
    from poprun.job.policy import Decision
    from poprun.job.signals import ReceivedSignals
    from poprun.launch.launchers import StartWatch
    from poprun.observe.account.curves import JobCurves
    from poprun.observe.account.evidence import InstanceEvidence
    from poprun.observe.judge.watch import PerformanceWatch

_NO_PROGRAM: Final = "it is neither a program for this machine nor a script that begins with #!"


def after_event(status: InstanceStatus, event: dict[str, Any], phase: Phase, now_seconds: float) -> InstanceStatus:
    """Return the status of an instance after ``event``, a message from or about its parent process (agent)."""
    change = _CHANGES.get(event["event"])
    return status if change is None else change(status, event, phase, now_seconds)


def _after_lost_shim(
    status: InstanceStatus, _: dict[str, Any], phase: Phase, now_seconds: float
) -> InstanceStatus:
    if phase >= Phase.INTERRUPTED or status.state is InstanceState.ENDED:
        return status
    return _with_problem(status, SHIM_KILLED, now_seconds)


def _after_lost_runtime(
    status: InstanceStatus, _: dict[str, Any], __: Phase, now_seconds: float
) -> InstanceStatus:
    if status.state is InstanceState.ENDED:
        return status
    is_awaited = status.state is InstanceState.AWAITED  # no agent exists whose end could come later
    changed = replace(status, state=InstanceState.ENDED) if is_awaited else status
    return _with_problem(changed, RUNTIME_KILLED, now_seconds)


def _after_loss(status: InstanceStatus, event: dict[str, Any], phase: Phase, now_seconds: float) -> InstanceStatus:
    if status.state is InstanceState.ENDED:
        is_heard = event["event"] == "agent_lost" and status.problem == HOST_LOST  # a message from the same host
        return replace(status, problem=AGENT_KILLED) if is_heard else status
    ended = replace(status, state=InstanceState.ENDED)
    if phase >= Phase.STOPPING:
        return ended
    if event.get("errno") and status.state in (InstanceState.AWAITED, InstanceState.READY):
        problem = f"its agent cannot start: {describe_error(event['errno'])}"
        return replace(ended, exit_code=NOT_BOUND, problem=problem, exited_at_seconds=now_seconds)
    problem = AGENT_FROZEN if event.get("is_frozen") else HOST_LOST if event.get("is_silent") else AGENT_KILLED
    return _with_problem(ended, problem, now_seconds)


def _after_evidence_of_machine(
    status: InstanceStatus, event: dict[str, Any], _: Phase, __: float
) -> InstanceStatus:
    from poprun.launch.process.machine_evidence import read_evidence_of_machine

    return replace(status, machine_evidence=read_evidence_of_machine(event))


def _after_stats(status: InstanceStatus, event: dict[str, Any], _: Phase, now_seconds: float) -> InstanceStatus:
    if "memory_bytes" in event:
        usage = Usage(
            at_seconds=now_seconds,
            memory_bytes=event["memory_bytes"],
            cpu_seconds=event["cpu_seconds"],
            num_processes=event["num_processes"],
        )
        busy_at_seconds = status.busy_at_seconds if _is_idle(status.usage, usage) else now_seconds
        memory = status.memory.after(now_seconds, usage.memory_bytes)
        status = replace(status, usage=usage, busy_at_seconds=busy_at_seconds, memory=memory)
        machine = MachineTotals.read(event)
        status = replace(status, machine=machine, first_machine=status.first_machine or machine)
    page = bytes.fromhex(event["progress"])
    status = replace(status, counters=PhaseCounters.read(page) or status.counters)
    progress = Progress.read(page)
    if progress is None or progress == status.progress:
        return status
    return replace(status, progress=progress, progressed_at_seconds=now_seconds)


def _is_idle(before: Usage | None, after: Usage) -> bool:
    """Whether an instance used almost no processor time between the measurements ``before`` and ``after``."""
    if before is None or before.num_processes != after.num_processes:
        return False
    seconds = after.at_seconds - before.at_seconds
    return 0.0 <= after.cpu_seconds - before.cpu_seconds <= _IDLE_SHARE * seconds


def _after_exit(status: InstanceStatus, event: dict[str, Any], phase: Phase, _: float) -> InstanceStatus:
    return replace(
        status,
        state=InstanceState.EXITED,
        exit_code=event["code"],
        exited_at_seconds=event["at_seconds"],
        was_stopped=phase is Phase.INTERRUPTED or event["was_stopped"],
        memory=status.memory.with_peak(event["peak_bytes"]),
    )


def _after_failed_start(
    status: InstanceStatus, event: dict[str, Any], _: Phase, now_seconds: float
) -> InstanceStatus:
    code, problem = NOT_BOUND, os.strerror(event["errno"])
    match event:
        case {"event": "failed_to_start", "errno": number, "place": place}:
            reason = _NO_PROGRAM if number == errno.ENOEXEC else describe_error(number)
            code = NOT_BOUND if number in SHORTAGES else NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE
            problem = f"cannot run {place}: {reason}"
        case {"event": "failed_to_bind", "cores": cores}:
            problem = (
                f"cannot be bound to cores {fold_numbers(sorted(cores))}, not all of which are to be had here "
                f"({problem}): make the plan on such a machine, or use --process-placement disabled"
            )
        case {"event": "failed_to_hold"}:
            problem = f"who kept the job's lease on this host has ended ({problem}): start it again"
    ended = replace(status, state=InstanceState.EXITED, exit_code=code, problem=problem)
    return replace(ended, exited_at_seconds=now_seconds)


_CHANGES: Final[Mapping[str, Callable[[InstanceStatus, dict[str, Any], Phase, float], InstanceStatus]]] = {
    "hello": lambda status, *_: replace(status, state=InstanceState.READY),
    "started": lambda status, _, __, now: replace(status, state=InstanceState.RUNNING, started_at_seconds=now),
    "failed_to_start": _after_failed_start,
    "failed_to_hold": _after_failed_start,
    "failed_to_bind": _after_failed_start,
    "stats": _after_stats,
    "exited": _after_exit,
    "machine": _after_evidence_of_machine,
    "shim_lost": _after_lost_shim,
    "runtime_lost": _after_lost_runtime,
    "agent_lost": _after_loss,
    LOST: _after_loss,
    "ended": lambda status, *_: replace(status, state=InstanceState.ENDED),
}
"""For each kind of event that changes an instance's status, the function that returns the changed status."""


def _with_problem(status: InstanceStatus, problem: str, now_seconds: float) -> InstanceStatus:
    if status.problem or status.exit_code is not None:
        return status
    return replace(status, problem=problem, exited_at_seconds=status.exited_at_seconds or now_seconds)


EVIDENCE_SECONDS: Final = 0.4
"""The time in which other programs can report their stacks after a failure, before poprun stops these programs."""

CAUSE_SECONDS: Final = 1.0
"""The time in which another host's shim can report a killed runtime, after the loss of shims or the launcher."""

_LONGEST_STEP_SECONDS: Final = 2.0
"""The longest step between two turns of the loop; poprun itself was stopped in the rest of a longer step."""

_PAUSE_SECONDS: Final = 5.0  # in a longer step the whole job was paused, and no instance hung

_IDLE_SHARE: Final = 0.05  # of a processor's time: a process that waits in torch wakes up sometimes


class _FailureQuestion:
    """The question to all running programs after the first failure: in which collective does the program wait?"""

    def __init__(self, instances: Iterable[int], now_seconds: float) -> None:
        self._awaited = set(instances)
        self._deadline_seconds = now_seconds + EVIDENCE_SECONDS

    def note_answer(self, instance: int) -> None:
        """Record that ``instance`` has answered or ended, so that poprun no longer waits for its answer."""
        self._awaited.discard(instance)

    def is_open(self, now_seconds: float) -> bool:
        """Whether the answer of an instance is still missing and the time limit for answers has not passed."""
        return bool(self._awaited) and now_seconds < self._deadline_seconds


class _Silence:
    """How long the agent (parent) of each instance sent nothing, without the time in which poprun was stopped."""

    def __init__(self, num_instances: int, now_seconds: float) -> None:
        self._awake_seconds = 0.0  # time in which poprun ran
        self._looked_at_seconds = now_seconds
        self._heard_at_seconds = [0.0] * num_instances  # by ``_awake_seconds``

    def pass_time(self, now_seconds: float) -> bool:
        """Add the time since the last call to each agent's silence. Return True if poprun was stopped for 5 s."""
        step_seconds = now_seconds - self._looked_at_seconds
        self._awake_seconds += min(step_seconds, _LONGEST_STEP_SECONDS)
        self._looked_at_seconds = now_seconds
        return step_seconds > _PAUSE_SECONDS

    def end(self, *instances: int) -> None:
        """End the silence of the agents (parents) of ``instances``: measure the time without message anew."""
        for instance in instances:
            self._heard_at_seconds[instance] = self._awake_seconds

    def is_too_long(self, instance: int) -> bool:
        """Whether the agent (parent) of ``instance`` was silent for so long that poprun takes it for frozen."""
        return self._awake_seconds - self._heard_at_seconds[instance] >= FROZEN_SECONDS


class Record:
    """All that poprun knows about one start of a job, such as each instance's status and evidence of failures."""

    def __init__(self, plan: LaunchPlan, identity: JobIdentity, now_seconds: float) -> None:
        self.plan = plan
        self.identity = identity  # the identity of the job and of this attempt
        # the status of every instance, by index
        self.statuses = [InstanceStatus(index=index) for index in range(plan.num_instances)]
        self._began = {Phase.STARTING: now_seconds}  # the start of each phase, the present phase last
        self._hellos: dict[int, dict[str, Any]] = {}  # the first event of each agent, by instance
        self.hang_watch = HangWatch()  # finds out whether all instances wait
        self.stop: Decision | None = None  # why poprun stops the attempt; None if it does not
        # the last answers of instances, or the evidence that failed programs have left, by instance
        self.evidence: dict[int, InstanceEvidence] = {}
        # the measurements of all instances over time, if the plan asks for them
        self.curves = _empty_curves(plan.num_instances, now_seconds) if plan.has_curves else None
        self.performance: PerformanceWatch | None = None  # finds slow instances; None before the first update
        self._question: _FailureQuestion | None = None
        self._silence = _Silence(plan.num_instances, now_seconds)

    @property
    def phase(self) -> Phase:
        """The present state of the job: starting, running, interrupted (after Ctrl-C), stopping or killing."""
        return next(reversed(self._began))

    @property
    def began_at_seconds(self) -> float:
        """The time at which this start of the job began, in seconds of the monotonic clock."""
        return self._began[Phase.STARTING]

    @property
    def has_started(self) -> bool:
        """Whether poprun has ordered the agents (the instances' parent processes) to start the programs."""
        return Phase.RUNNING in self._began

    @property
    def endpoints(self) -> dict[int, tuple[Endpoint, ...]]:
        """{instance: its TCP addresses}: for TensorFlow, and on instance 0 also for torch, JAX and popdist."""
        return {
            index: tuple(Endpoint(host=hello["address"], port=port) for port in hello["ports"])
            for index, hello in self._hellos.items()
        }

    @property
    def reported(self) -> set[int]:
        """The process ids of the agents (instances' parents) that have connected, and of these agents' parents."""
        return {hello[whose] for hello in self._hellos.values() for whose in ("shim", "pid")}

    def runtime_of(self, instance: int) -> int | None:
        """Return the id of the launcher's process that started ``instance``; None until ``instance`` connects."""
        hello = self._hellos.get(instance)
        return None if hello is None else hello["runtime"]

    def add_event(self, instance: int, event: dict[str, Any], now_seconds: float) -> None:
        """Add ``event``, a message of the parent process of ``instance``, received at ``now_seconds``."""
        kind, phase = event["event"], self.phase
        if kind == "exited" and self.identity.network is not None:
            event = {**event, "at_seconds": now_seconds}
        if kind == LOST and any(status.problem == HOST_LOST for status in self.statuses):
            phase = Phase.RUNNING  # after a lost host, every lost agent counts as a failure
        self.statuses[instance] = after_event(self.statuses[instance], event, phase, now_seconds)
        self._silence.end(instance)
        if kind == LOST and self.statuses[instance].problem == HOST_LOST:
            self._blame_own_network()
        if kind == "hello":
            self._hellos[instance] = event
        elif kind == "stats" and self.curves is not None:
            self.curves.add_look(self.statuses[instance], event, now_seconds)
        elif kind == "calls" and self.performance is not None:
            self.performance.round.add(event, self.statuses[instance], now_seconds)
        elif kind in ("stacks", "exited", "ended", LOST):
            self._add_evidence(instance, event)

    def _add_evidence(self, instance: int, event: dict[str, Any]) -> None:
        """Store what ``event`` says about a failure or hang; wait no longer for an answer of ``instance``."""
        if self._question is not None:
            self._question.note_answer(instance)
        if event["event"] == "exited" and not event["was_stopped"]:
            self.evidence.pop(instance, None)  # an earlier answer does not explain the end
        if event["event"] == "stacks" or any(event.get(name) for name in _REMAINS):
            from poprun.observe.account.evidence import read_evidence

            self.evidence[instance] = read_evidence(event, self.evidence.get(instance))

    def _blame_own_network(self) -> None:
        """Record this machine's network as the cause if all instances on several other hosts were lost."""
        network = self.identity.network
        if network is None:
            return
        routes = [self.identity.route(self.plan, status.index) for status in self.statuses]
        others = [
            it.index
            for it, route in zip(self.statuses, routes, strict=True)
            if route and route.address != network.control_host
        ]
        names = {self.plan.instance(index).host for index in others}
        if len(names) > 1 and all(self.statuses[index].problem == HOST_LOST for index in others):
            for index in others:
                self.statuses[index] = replace(self.statuses[index], problem=OWN_NETWORK_LOST)

    @property
    def failed(self) -> dict[int, InstanceStatus]:
        """The status of each instance that has failed, by index."""
        return {status.index: status for status in self.statuses if status.has_failed}

    @property
    def reachable(self) -> set[int]:
        """The indices of the instances whose parent processes have connected to poprun and have not ended."""
        gone = (InstanceState.AWAITED, InstanceState.ENDED)
        return {status.index for status in self.statuses if status.state not in gone}

    def ask(self, now_seconds: float) -> list[int]:
        """Begin to ask, after a failure, in which collective the programs wait; return the instances to ask."""
        instances = self._recording_instances()
        self._question = _FailureQuestion(instances, now_seconds)
        for status in self.statuses:
            if status.state is InstanceState.RUNNING:
                self.evidence.pop(status.index, None)  # the evidence of an earlier hang
        return instances

    def awaits_evidence(self, now_seconds: float) -> bool:
        """Whether an instance that poprun asked after a failure may still answer within the time limit."""
        return self._question is not None and self._question.is_open(now_seconds)

    def _recording_instances(self) -> list[int]:
        """Return the instances whose programs run and record their collectives with torch's flight recorder."""
        statuses = self.statuses
        running = (status for status in statuses if status.state is InstanceState.RUNNING)
        return [status.index for status in running if status.progress is not None and status.progress.recorder]

    def enter(self, phase: Phase, now_seconds: float) -> None:
        """Record that the job now enters the state ``phase``, such as running or stopping."""
        self._began[phase] = now_seconds
        self._silence.end(*range(len(self.statuses)))

    def frozen_instances(self, now_seconds: float) -> list[int]:
        """Return the running instances whose agents (parent processes) were silent for ``FROZEN_SECONDS``."""
        if self._silence.pass_time(now_seconds):
            self.hang_watch.begin_anew(now_seconds)
        if self.phase is not Phase.RUNNING:
            return []
        states = (InstanceState.READY, InstanceState.RUNNING)
        return [it.index for it in self.statuses if it.state in states and self._silence.is_too_long(it.index)]

    def give_up_awaited(self) -> None:
        """Mark each instance that has not connected to poprun as ended, because poprun stops waiting for it."""
        for index, status in enumerate(self.statuses):
            if status.state is InstanceState.AWAITED:
                self.statuses[index] = replace(status, state=InstanceState.ENDED)

    def snapshot(
        self,
        signals: "ReceivedSignals",
        start_watch: "StartWatch",
        *,
        awaits_stacks: bool,
        awaits_culprit: bool,
        has_launcher_ended: bool,
        now_seconds: float,
    ) -> JobSnapshot:
        """Return the facts about the job's present state from which `policy.decide` chooses the next action."""
        failed = first_failure(self.statuses)
        if failed is not None and failed.problem == SHIM_KILLED and self.identity.network is not None:
            lost_at_seconds = failed.exited_at_seconds or 0.0
            failed = failed if now_seconds - lost_at_seconds >= CAUSE_SECONDS else None
        return JobSnapshot(
            phase=self.phase,
            in_phase_seconds=now_seconds - self._began[self.phase],
            in_job_seconds=now_seconds - self.identity.began_at_seconds,
            num_instances=len(self.statuses),
            num_ready=sum(status.state is InstanceState.READY for status in self.statuses),
            num_ended=sum(status.state is InstanceState.ENDED for status in self.statuses),
            failed_instance=None if failed is None else failed.index,
            num_interrupts=signals.num_interrupts,
            is_terminated=signals.is_terminated,
            is_output_closed=signals.is_output_closed,
            hang_seconds=self.hang_watch.idle_seconds,
            is_hang_told=self.hang_watch.is_told,
            is_hang_suspected=self.hang_watch.is_suspected,
            awaits_stacks=awaits_stacks,
            has_recorders=failed is not None and self._question is None and bool(self._recording_instances()),
            awaits_evidence=self.awaits_evidence(now_seconds),
            awaits_culprit=awaits_culprit,
            has_lost_shim=start_watch.has_lost_one,
            no_shim_seconds=start_watch.idle_seconds,
            has_launcher_ended=has_launcher_ended,
        )


def _empty_curves(num_instances: int, now_seconds: float) -> "JobCurves":
    from poprun.observe.account.curves import JobCurves

    return JobCurves(num_instances, now_seconds)


_REMAINS: Final = ("recorder", "crash", "full_disks")  # evidence in the event of an exit
