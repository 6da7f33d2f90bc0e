"""The supervisor's loop over one attempt of a job: listen, make a snapshot, decide, act, until all has ended.

poprun is a subreaper, so processes that a killed agent has left become children of poprun.
"""

import math
import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from poprun.job.launched import LaunchedAttempt
from poprun.job.orders import start_order, stop_order
from poprun.job.policy import Action, Decision, decide
from poprun.job.record import CAUSE_SECONDS, Record
from poprun.job.signals import ReceivedSignals
from poprun.job.watchers import Clocks, GpuCurves, Hosts, Lone, Monitors, Speed, StackWatch, Watched, Watcher
from poprun.launch.messages.control import LOST
from poprun.launch.process.process_tree import ProcessKey, StoppedChildren, own_tree, send
from poprun.observe.account.state import Phase
from poprun.observe.judge.job_end import JobEnd, exit_code, first_failure
from poprun.text.screen import Level, log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TICK_SECONDS: Final = 0.05  # the loop's longest wait while an event is expected soon
_LOOK_SECONDS: Final = 1.0  # the loop's longest wait while the programs run
_LAUNCHER_SECONDS: Final = 0.3  # time in which agents can report after the launcher's end
_MOST_LEFT: Final = 3


class Attempt:
    """One start of a job, from the start of its launcher, such as mpiexec, until all its processes have ended."""

    def __init__(
        self,
        launched: LaunchedAttempt,
        signals: ReceivedSignals,
        on_look: "Callable[[Attempt], object] | None",
    ) -> None:
        self._launched = launched
        self._plan = launched.plan
        self._environ = launched.variables
        self._identity = launched.identity
        self._signals = signals
        self._verbosity = launched.verbosity
        self._on_look = on_look  # called in each turn of the loop
        self._record = Record(launched.plan, launched.identity, launched.began_at_seconds)
        self._start_watch = launched.start_watch
        self._launcher_ended_early = False
        self._launcher_ended_at_seconds = math.inf
        self._selector = launched.selector
        self._links = launched.links
        self._launcher = launched.launcher
        self._streams = launched.streams
        has_terminal = self._streams.is_inherited and os.isatty(0)
        self._record.hang_watch.is_interactive = has_terminal and self._plan.ending.hang_timeout_seconds is None
        self._watchers: Sequence[Watcher] = ()  # empty before :meth:`run`
        self._stopped_children = StoppedChildren()
        self._survivors: list[ProcessKey] = []

    def run(self) -> JobEnd:
        """Run the job until all its processes have ended; print its failure, if any; return how it ended."""
        try:
            self._selector.register(self._signals.descriptor, selectors.EVENT_READ, self._signals)
            self._supervise(self._prepare())
        finally:
            self._launched.end_launcher(self._listen)
            for watcher in self._watchers:
                watcher.close()
            self._survivors = self._launched.end_rest()
        return self._report()

    def _prepare(self) -> StackWatch:
        """Make all watchers (objects that observe the job); return the one that asks programs for their stacks."""
        watched = Watched(
            plan=self._plan,
            variables=self._environ,
            identity=self._identity,
            record=self._record,
            links=self._links,
            streams=self._streams,
            signals=self._signals,
        )
        monitors, clocks = Monitors(watched), Clocks(watched)
        stacks = StackWatch(watched, monitors)
        others = (clocks, Hosts(watched), Speed(watched, clocks), Lone(watched))
        self._watchers = (monitors, GpuCurves(watched), stacks, *others)
        if not self._streams.is_inherited:
            import poprun.job.output.relay  # noqa: F401 - there is time for it until the shims have started
        return stacks

    def _supervise(self, stacks: StackWatch) -> None:
        while True:
            is_calm = self._record.phase is Phase.RUNNING and not (self._launcher.has_ended or stacks.are_awaited)
            self._listen(_LOOK_SECONDS if is_calm and not self._record.failed else _TICK_SECONDS)
            now = time.monotonic()
            self._stopped_children.continue_them()
            for instance in self._record.frozen_instances(now):
                self._links.hang_up(instance)
                self._handle_event(instance, {"event": LOST, "is_frozen": True})
            if self._record.phase is Phase.STARTING:
                self._start_watch.update(self._launcher.running, self._record.reported, now)
            for watcher in self._watchers:
                watcher.update(now)
            snapshot = self._record.snapshot(
                self._signals,
                self._start_watch,
                awaits_stacks=stacks.are_awaited,
                awaits_culprit=bool(self._record.failed) and self._awaits_culprit(now),
                has_launcher_ended=self._has_lost_launcher(now),
                now_seconds=now,
            )
            if self._on_look is not None:
                self._on_look(self)
            decision = decide(snapshot, self._plan.ending)
            if decision.action is Action.FINISH:
                return
            self._act(decision, stacks)

    def _awaits_culprit(self, now_seconds: float) -> bool:
        """Whether all failed instances only lost contact to another one, whose own failure poprun may soon see."""
        from poprun.observe.judge.end_verdict import awaits_culprit

        return awaits_culprit(self._record.failed, self._streams.tails(self._record.failed), now_seconds)

    def _has_lost_launcher(self, now_seconds: float) -> bool:
        """Whether the launcher, such as mpiexec, ended so long ago that no process can still report the cause."""
        is_starting = self._record.phase is Phase.STARTING  # the host shim may outlive mpiexec
        has_lost_one = is_starting and self._launcher.running != self._launcher.started
        has_ended = self._launcher.has_ended or self._launcher.has_failed
        if not (has_ended or has_lost_one):
            return False
        self._launcher_ended_at_seconds = min(self._launcher_ended_at_seconds, now_seconds)
        patience = CAUSE_SECONDS if self._identity.network else 0.0 if has_ended else _LAUNCHER_SECONDS
        return now_seconds - self._launcher_ended_at_seconds >= patience

    def _listen(self, timeout_seconds: float) -> None:
        """Wait for messages of instances, output of the launcher, ended children and signals; handle them all."""
        # children are reaped before events are read, because an agent's last event precedes the launcher's end
        if self._launcher.reap():  # agents may soon send the reason for this end
            timeout_seconds = min(timeout_seconds, _LAUNCHER_SECONDS)
        for key, _ in self._selector.select(timeout_seconds):
            if key.data is self._signals:
                self._signals.drain()
                continue
            for instance, event in key.data():
                self._handle_event(instance, event)
        self._pass_signals_on()

    def _handle_event(self, instance: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "runtime_lost" and self._is_launchers_child(instance):
            return  # the launcher's own exit code is the better explanation
        if kind not in ("stats", "stacks", "clock", "calls"):
            self._log(1 if "memory_not_bound" in event else 2, f"instance {instance}: {event}")
        self._record.add_event(instance, event, time.monotonic())
        for watcher in self._watchers:
            if watcher.hears == kind:
                watcher.add_event(instance, event)
        if kind == "hello":
            self._handle_hello(instance, event)
        elif kind == "left":
            self._warn_of_left_processes(instance, event)
        elif kind == "signal_unhandled" and event["signal"] == signal.SIGHUP:
            self._signals.is_terminated = True

    def _warn_of_left_processes(self, instance: int, event: dict[str, Any]) -> None:
        """Warn the user of child processes that an instance left running when it ended without an error."""
        seconds = self._plan.ending.stop_timeout_seconds
        what = f"instance {instance} has ended and left running: {', '.join(event['processes'][:_MOST_LEFT])}"
        if event["is_ended"]:
            log(f"warning: {what}; it was ended after --stop-timeout {seconds:g} s")
        else:
            log(f"warning: {what}; it may run on for --stop-timeout {seconds:g} s after the instance's end")

    def _is_launchers_child(self, instance: int) -> bool:
        """Whether ``instance`` was started on this machine by a child of poprun itself, such as mpiexec."""
        network, route = self._identity.network, self._identity.route(self._plan, instance)
        is_here = network is None or (route is not None and route.address == network.control_host)
        return is_here and self._record.runtime_of(instance) in self._launcher.started

    def _handle_hello(self, instance: int, hello: dict[str, Any]) -> None:
        if hello["runtime"] == os.getpid() and self._start_watch.runtime:  # it ended before the shim began
            self._record.add_event(instance, {"event": "shim_lost"}, time.monotonic())
        if self._record.phase >= Phase.STOPPING:
            self._links.send_order(instance, {"order": "kill"})

    def _pass_signals_on(self) -> None:
        """Send the programs all signals that poprun has received since the last call."""
        signals = self._signals
        while signals.passed_on:
            self._links.send_to_all({"order": "offer_signal", "signal": signals.passed_on.pop(0)})
        if signals.has_resized and self._streams.is_inherited:  # the program has poprun's own terminal
            signals.has_resized = False
            self._links.send_order(0, {"order": "signal", "signal": int(signal.SIGWINCH)})
        if signals.is_suspended:
            self._suspend()

    def _suspend(self) -> None:
        """Stop the programs and then poprun itself after Ctrl-Z; continue the programs when poprun continues."""
        self._links.send_to_all({"order": "signal", "signal": int(signal.SIGSTOP)})
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signals.is_suspended = False
        self._links.send_to_all({"order": "signal", "signal": int(signal.SIGCONT)})
        self._record.hang_watch.begin_anew(time.monotonic())

    def _act(self, decision: Decision, stacks: StackWatch) -> None:
        if decision.action is Action.WAIT:
            return
        self._log(1, f"{decision.action}: {decision.reason}")
        if decision.action is Action.START:
            self._enter(Phase.RUNNING)
            self._start_programs()
        elif decision.action is Action.ASK:
            stacks.forget()
            for instance in self._record.ask(time.monotonic()):
                self._links.send_order(instance, {"order": "stacks", "most_helpers": 0})
        elif decision.action is Action.INTERRUPT:
            self._enter(Phase.INTERRUPTED)
            self._streams.leave_out_interrupts()
            self._links.send_to_all({"order": "signal", "signal": int(signal.SIGINT)})
        elif decision.action is Action.REPORT_HANG:
            self._record.hang_watch.is_told = True
            stacks.ask(self._record.hang_watch.hang)
        elif decision.action in (Action.STOP, Action.TIME_OUT, Action.STOP_HUNG):
            self._stop(decision)
        elif decision.action is Action.KILL:
            self._enter(Phase.KILLING)
            self._links.send_to_all({"order": "kill"})

    def _enter(self, phase: Phase) -> None:
        self._record.enter(phase, time.monotonic())
        if phase >= Phase.STOPPING:
            send(own_tree(), signal.SIGCONT)  # a stopped process could not obey

    def _start_programs(self) -> None:
        endpoints = self._record.endpoints
        for index in range(self._plan.num_instances):
            streams = self._streams.open(index, self._links.take_streams(index))
            order = start_order(self._plan, index, self._environ, self._identity, endpoints)
            self._links.send_order(index, order, self._identity.with_leases(streams))
            self._streams.close(streams)
        self._streams.start(self._signals.note_closed_output)

    def _stop(self, decision: Decision) -> None:
        if self._record.phase is not Phase.INTERRUPTED:  # after Ctrl-C, a runtime ends all when one has ended
            self._launcher_ended_early = self._launcher.has_ended or self._launcher.has_failed
        self._record.stop = decision
        if self._record.phase is Phase.STARTING:
            self._launcher.end(signal.SIGTERM)
            self._record.give_up_awaited()
        self._enter(Phase.STOPPING)
        has_failed = first_failure(self._record.statuses) is not None
        self._links.send_to_all(stop_order(self._plan, has_failed=has_failed))

    def end(self, *, is_over: bool) -> JobEnd:
        """Return how this start of the job ended, or, if ``is_over`` is false, the job's present state."""
        record, signals = self._record, self._signals
        action, reason = (None, "") if record.stop is None else (record.stop.action, record.stop.reason)
        end = JobEnd(
            statuses=record.statuses,
            num_interrupts=signals.num_interrupts,
            is_terminated=signals.is_terminated,
            is_output_closed=signals.is_output_closed or self._streams.has_no_reader,
            is_output_lost=signals.is_output_lost,
            is_timed_out=action is Action.TIME_OUT,
            is_hung=action is Action.STOP_HUNG,
            started_at_epoch_seconds=self._launched.began_at_epoch_seconds,
            began_at_seconds=record.began_at_seconds,
            seconds=time.monotonic() - record.began_at_seconds,
            launcher_code=self._launcher.exit_code,
            has_started=record.has_started,
            launcher_ended_early=self._launcher_ended_early,
            stop_reason=reason,
            survivors=tuple(key.pid for key in self._survivors),
            interrupted=self._streams.interrupted,
            evidence=record.evidence,
            is_over=is_over,
            curves=record.curves,
            last_lines=self._streams.last_lines(),
        )
        for watcher in self._watchers:
            end = watcher.add_to(end)
        return end

    def _report(self) -> JobEnd:
        """Print the job's failure, if there is one, for the user; return how this start of the job ended."""
        end = self.end(is_over=True)
        for line in self._record.performance.summary() if self._record.performance else ():
            log(line)
        if exit_code(end) == 0 and not end.survivors:
            return end
        from poprun.observe.show.printed_report import explain

        kills_before = self._launched.kills_before if self._identity.network is None else None
        failed = (status.index for status in end.statuses if status.has_failed or status.exit_code)
        return explain(end, self._plan, self._streams.tails(failed), self._launcher.output, kills_before)

    def _log(self, level: int, text: str) -> None:
        if self._verbosity >= level:
            log(text, Level.DEBUG if level > 1 else Level.INFO)
