"""The supervisor's loop: listen, take a snapshot, decide, act, until nothing is left."""

import os
import selectors
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from poprun.job.agents import AgentLinks
from poprun.job.inquiry import Inquiry
from poprun.job.launcher_processes import LauncherProcesses
from poprun.job.orders import JobIdentity, start_order
from poprun.job.outcome import JobEnd, exit_code
from poprun.job.output.streams import Traffic
from poprun.job.policy import Action, Decision, decide
from poprun.job.record import Record
from poprun.job.session_folders import remove_abandoned_sessions, session_parent
from poprun.job.signal_passing import Courier
from poprun.job.signals import SignalBox
from poprun.job.start_watch import StartWatch
from poprun.job.state import Limits, Phase
from poprun.job.sweep import sweep
from poprun.job.voice import say
from poprun.launch.launchers import launch_commands
from poprun.launch.shared_memory import remove_abandoned
from poprun.messages.control import CONTROL_ADDRESS, CONTROL_KEY_FILE
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.topology import MpiKind
from poprun.probe.kernel_kills import kill_counts
from poprun.text.log_line import Level

if TYPE_CHECKING:
    from poprun.job.monitor_process import MonitorProcess
    from poprun.process.tree import ProcessKey

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_LAUNCHER_SECONDS = 0.3
_LEFTOVER_SECONDS = 1.0
_DRAIN_SECONDS = 5.0


class Job:
    """One attempt of a job: its state, and the hands that change it.

    Args:
        plan: The job.
        environ: The environment that poprun was called in.
        identity: Which job this is, and which attempt of it.
        verbosity: 0 says nothing unless something fails, 1 tells of decisions, 2 of every event.
    """

    def __init__(
        self, plan: LaunchPlan, environ: Mapping[str, str], identity: JobIdentity, verbosity: int
    ) -> None:
        self._plan = plan
        self._environ = environ
        self._identity = identity
        self._verbosity = verbosity
        self._limits = Limits(
            start_seconds=plan.ending.start_timeout_seconds,
            job_seconds=plan.ending.timeout_seconds,
            hang_report_seconds=plan.ending.hang_report_seconds,
            hang_timeout_seconds=plan.ending.hang_timeout_seconds,
            grace_seconds=plan.ending.stop_timeout_seconds,
        )
        self._record = Record(plan, identity, time.monotonic())
        self._began_at_epoch_seconds = time.time()
        self._kills_before = kill_counts()
        has_runtime = plan.launcher is LauncherKind.MPI and identity.network is None
        self._start_watch = StartWatch(time.monotonic(), has_runtime=has_runtime)
        self._launcher_ended_early = False
        self._selector = selectors.DefaultSelector()
        self._links = AgentLinks(plan.num_instances, self._selector, say, identity.network)
        self._inquiry = Inquiry(self._links.tell, plan.ending.hang_timeout_seconds)
        self._launcher = LauncherProcesses(self._selector)
        self._traffic = Traffic(plan, environ, identity)
        self._courier = Courier(self._links, is_on_terminal=self._traffic.is_inherited)
        self._monitor: MonitorProcess | None = None
        self._survivors: list[ProcessKey] = []

    def run(self, signals: SignalBox) -> JobEnd:
        """Start the job, see it to its end, and report a failure; how it ended.

        Raises:
            LaunchError: If the launcher cannot be executed.
        """
        self._selector.register(signals.descriptor, selectors.EVENT_READ, signals)
        try:
            self._launch()
            self._supervise(signals)
        finally:
            self._bury(signals)
            self._selector.close()
        return self._tell_the_end(signals)

    def _launch(self) -> None:
        if self._plan.output.has_monitor:
            from poprun.job.monitor_process import MonitorProcess  # noqa: PLC0415 - most jobs have none

            self._monitor = MonitorProcess(self._environ)
        self._remove_sessions()
        network = self._identity.network
        door = {
            CONTROL_ADDRESS: self._links.door.address,
            CONTROL_KEY_FILE: "" if network is None else network.key.file,
        }
        self._launcher.start(
            launch_commands(self._plan, network),
            {**self._identity.launcher_environment(self._environ), **door},
            self._plan.working_directory,
        )
        import poprun.job.output.relay  # noqa: F401, PLC0415 - there is time for it until the shims have started

    def _supervise(self, signals: SignalBox) -> None:
        while True:
            is_calm = self._record.phase is Phase.RUNNING and not self._launcher.has_ended
            self._listen(signals, _LOOK_SECONDS if is_calm and not self._inquiry.is_open else _TICK_SECONDS)
            now = time.monotonic()
            if self._record.phase is Phase.STARTING:
                self._start_watch.look(self._launcher.running, self._record.reported, now)
            if self._links.viewers.are_due(now):
                self._links.viewers.show(self._record.view(self._traffic.last_line, now), now)
            self._record.hang_watch.look(self._record.statuses, now)
            self._inquire(signals, now)
            snapshot = self._record.snapshot(
                signals,
                self._start_watch,
                awaits_stacks=self._inquiry.is_open,
                has_launcher_ended=self._launcher.has_ended or self._launcher.has_failed,
                now_seconds=now,
            )
            decision = decide(snapshot, self._limits)
            if decision.action is Action.FINISH:
                return
            self._act(decision, signals)

    def _listen(self, signals: SignalBox, timeout_seconds: float | None) -> None:
        """Wait for something to happen, and take note of all that has.

        Children are buried before the agents are heard: an agent's last word comes before its launcher's end.
        """
        self._launcher.reap()
        for key, _ in self._selector.select(timeout_seconds):
            if key.data is signals:
                signals.drain()
                continue
            for instance, event in key.data():
                self._hear(instance, event, signals)
        if self._courier.carry(signals):
            self._record.hang_watch.begin_anew(time.monotonic())

    def _hear(self, instance: int, event: dict[str, Any], signals: SignalBox) -> None:
        if event["event"] not in ("stats", "stacks"):
            self._log(1 if "memory_not_bound" in event else 2, f"instance {instance}: {event}")
        self._note(instance, event)
        if event["event"] == "hello":
            self._welcome(instance, event)
        elif event["event"] == "stacks":
            self._inquiry.take(instance, event)
        elif event["event"] == "signal_unhandled" and event["signal"] == signal.SIGHUP:
            signals.is_terminated = True

    def _inquire(self, signals: SignalBox, now_seconds: float) -> None:
        """Ask the programs where they stand when the user wants to know, and tell what is known."""
        for text in self._inquiry.answers(self._record.statuses, now_seconds):
            say(text)
        if signals.wants_stacks and not self._inquiry.is_open:
            signals.wants_stacks = False
            self._inquiry.begin(self._record.statuses, now_seconds)

    def _note(self, instance: int, event: dict[str, Any]) -> None:
        self._record.note(instance, event, time.monotonic())

    def _welcome(self, instance: int, hello: dict[str, Any]) -> None:
        if hello["runtime"] == os.getpid() and self._start_watch.has_runtime:
            self._note(instance, {"event": "shim_lost"})  # the runtime died before the shim could look
        if self._record.phase >= Phase.STOPPING:
            self._links.tell(instance, {"order": "kill"})

    def _act(self, decision: Decision, signals: SignalBox) -> None:
        if decision.action is Action.WAIT:
            return
        self._log(1, f"{decision.action}: {decision.reason}")
        if decision.action is Action.START:
            self._enter(Phase.RUNNING)
            self._start_programs(signals)
        elif decision.action is Action.INTERRUPT:
            self._enter(Phase.INTERRUPTED)
            self._traffic.leave_out_interrupts()
            self._links.tell_all({"order": "signal", "signal": int(signal.SIGINT)})
        elif decision.action is Action.REPORT_HANG and self._record.hang_watch.hang is not None:
            self._record.hang_watch.is_told = True
            self._inquiry.begin(self._record.statuses, time.monotonic(), self._record.hang_watch.hang)
        elif decision.action in (Action.STOP, Action.TIME_OUT, Action.STOP_HUNG):
            self._record.is_timed_out = decision.action is Action.TIME_OUT
            self._record.is_hung = decision.action is Action.STOP_HUNG
            self._stop(decision.reason)
        elif decision.action is Action.KILL:
            self._enter(Phase.KILLING)
            self._links.tell_all({"order": "kill"})

    def _enter(self, phase: Phase) -> None:
        self._record.enter(phase, time.monotonic())

    def _start_programs(self, signals: SignalBox) -> None:
        for index in range(self._plan.num_instances):
            streams = self._traffic.open(index, self._links.take_streams(index))
            order = start_order(self._plan, index, self._environ, self._identity, self._record.meeting)
            self._links.tell(index, order, self._identity.with_leases(streams))
            self._traffic.close(streams)
        self._record.has_started = True
        self._traffic.start(signals.note_closed_output)

    def _stop(self, reason: str) -> None:
        if self._record.phase is not Phase.INTERRUPTED:  # a runtime may end the others when Ctrl-C has ended one
            self._launcher_ended_early = self._launcher.has_ended or self._launcher.has_failed
        self._record.stop_reason = reason
        if self._record.phase is Phase.STARTING:
            self._launcher.end(signal.SIGTERM)
            self._record.give_up_awaited()
        self._enter(Phase.STOPPING)
        self._links.tell_all({"order": "stop", "grace_seconds": self._limits.grace_seconds})

    def _bury(self, signals: SignalBox) -> None:
        """Nothing of the job shall be left, and none of its output lost.

        Also when poprun itself fails: an agent whose connection is closed ends its tree.
        """
        self._links.close()
        if self._plan.mpi is None or not self._plan.mpi.forker:  # it may wait for seconds, and has nothing to tidy
            self._await_launcher(signals)
            self._launcher.end(signal.SIGTERM)
            self._await_launcher(signals)
        self._launcher.end(signal.SIGKILL)
        self._await_launcher(signals)
        if self._monitor is not None:
            self._monitor.wait()
        self._survivors = sweep(_LEFTOVER_SECONDS, self._limits.kill_seconds, self._identity.keepers)
        remove_abandoned(time.monotonic() - self._record.began_at_seconds)
        self._remove_sessions()
        self._traffic.finish(_DRAIN_SECONDS)

    def _remove_sessions(self) -> None:
        if self._plan.mpi is not None and self._plan.mpi.kind is MpiKind.OPEN_MPI:
            remove_abandoned_sessions(session_parent(self._environ))

    def _await_launcher(self, signals: SignalBox) -> None:
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while not self._launcher.has_ended and time.monotonic() < deadline:
            self._listen(signals, _TICK_SECONDS)
            self._launcher.reap()

    def _tell_the_end(self, signals: SignalBox) -> JobEnd:
        """Report a failure; how the job ended."""
        end = JobEnd(
            statuses=self._record.statuses,
            num_interrupts=signals.num_interrupts,
            is_terminated=signals.is_terminated,
            is_output_closed=signals.is_output_closed,
            is_timed_out=self._record.is_timed_out,
            is_hung=self._record.is_hung,
            started_at_epoch_seconds=self._began_at_epoch_seconds,
            seconds=time.monotonic() - self._record.began_at_seconds,
            launcher_code=self._launcher.exit_code,
            has_started=self._record.has_started,
            launcher_ended_early=self._launcher_ended_early,
            stop_reason=self._record.stop_reason,
            survivors=tuple(key.pid for key in self._survivors),
            interrupted=self._traffic.interrupted,
        )
        if exit_code(end) == 0 and not self._survivors:
            return end
        from poprun.job.explanation import explain  # noqa: PLC0415 - jobs that end well need none

        kills_before = self._kills_before if self._identity.network is None else None
        tails = self._traffic.tails(it.index for it in end.statuses if it.has_failed or it.exit_code)
        return explain(end, self._plan, tails, self._launcher.output, kills_before)

    def _log(self, level: int, text: str) -> None:
        if self._verbosity >= level:
            say(text, Level.DEBUG if level > 1 else Level.INFO)
