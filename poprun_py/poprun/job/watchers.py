"""The watchers of an attempt: each watcher is called in turn, receives events, and adds to the attempt's end."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from popdist.ground.values import dataclass
from poprun.job.agents import AgentLinks
from poprun.job.output.streams import ProgramStreams
from poprun.job.record import Record
from poprun.job.signals import ReceivedSignals
from poprun.observe.account.job_identity import JobIdentity
from poprun.observe.account.state import InstanceState, Phase
from poprun.observe.judge.job_end import JobEnd, num_lone
from poprun.plan.plan import LaunchPlan
from poprun.text.screen import log

if TYPE_CHECKING:
    from poprun.job.monitors import MonitorProcess
    from poprun.job.stack_inquiry import StackInquiry
    from poprun.launch.messages.clock import HostClocks
    from poprun.observe.account.gpu_watch import GpuWatch
    from poprun.observe.account.judgements import Verdict
    from poprun.observe.judge.hangs import Hang

_HOSTS_SECONDS: Final = 30.0  # time between two checks of the hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The objects of one start of a job, such as plan and connections, that all its watchers (observers) use."""

    plan: LaunchPlan
    variables: Mapping[str, str]
    identity: JobIdentity
    record: Record
    links: AgentLinks
    streams: ProgramStreams
    signals: ReceivedSignals


class Watcher:
    """An observer of one aspect of a running job, such as hangs, speed or problems of hosts."""

    hears: ClassVar[str] = ""  # the kind of events that it receives; empty if none

    def update(self, now_seconds: float) -> None:
        """Check the job again, and print for the user what is new. poprun's loop calls this method often."""

    def add_event(self, instance: int, event: Mapping[str, Any]) -> None:
        """Handle a message from the parent of ``instance``; all messages have the kind that ``hears`` names."""

    def add_to(self, end: JobEnd) -> JobEnd:
        """Return ``end``, the description of how the job ended, with the results of this watcher added."""
        return end

    def close(self) -> None:
        """Release the files and processes that the watcher uses."""


class Monitors(Watcher):
    """The watcher that sends the job's state to monitors, the programs that show the job to users."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._own_monitor = _start_own_monitor(watched)

    def update(self, now_seconds: float) -> None:
        """Send the job's present state to all connected monitors if the next update is due."""
        if self._watched.links.viewers is not None:
            self._watched.links.viewers.send_view(
                self._watched.record, self._watched.streams.last_line, now_seconds
            )

    def show(self, text: str) -> None:
        """Print ``text`` for the user; if a monitor draws on this terminal, the monitor prints the text."""
        viewers = self._watched.links.viewers
        is_shown = viewers is not None and viewers.add_text(text)
        if not is_shown or self._own_monitor is None:
            log(text)

    def close(self) -> None:
        """Wait until the monitor on poprun's own terminal has cleared its drawing and ended."""
        if self._own_monitor is not None:
            self._own_monitor.wait()


def _start_own_monitor(watched: Watched) -> "MonitorProcess | None":
    if not watched.plan.output.has_monitor:
        return None
    from poprun.job.monitors import MonitorProcess

    return MonitorProcess(watched.variables)


class GpuCurves(Watcher):
    """The watcher that records the load and the memory of this host's GPUs over time."""

    def __init__(self, watched: Watched) -> None:
        self._watch: GpuWatch | None = None
        if watched.record.curves is not None:
            from poprun.observe.account.gpu_watch import watch_gpus

            self._watch = watch_gpus(watched.plan, watched.identity, watched.variables, watched.record.curves)

    def update(self, now_seconds: float) -> None:
        """Read new measurements that the GPU vendor's tool has printed, and add these to the recorded curves."""
        if self._watch is not None:
            self._watch.update(now_seconds)

    def close(self) -> None:
        """End the process of the GPU vendor's tool that prints measurements."""
        if self._watch is not None:
            self._watch.close()


class StackWatch(Watcher):
    """The watcher that requests the programs' stacks, in a hang or when the user asks, and prints the stacks."""

    hears = "stacks"

    def __init__(self, watched: Watched, monitors: Monitors) -> None:
        self._watched = watched
        self._monitors = monitors
        self._inquiry: StackInquiry | None = None
        self._verdict: Verdict | None = None  # the cause of the hang, after it was printed

    @property
    def are_awaited(self) -> bool:
        """Whether poprun has requested stacks from the programs and still waits for their answers."""
        return self._inquiry is not None

    def update(self, now_seconds: float) -> None:
        """Search for a hang. Print the programs' stacks when all programs have answered poprun's request; send the
        programs a request when the user asks for stacks.
        """
        inquiry, record, signals = self._inquiry, self._watched.record, self._watched.signals
        record.hang_watch.update(record.statuses, now_seconds)
        if inquiry is not None and inquiry.is_over(record.statuses, now_seconds):
            self._inquiry = None
            if inquiry.is_about_suspicion:
                record.hang_watch.note_calls(inquiry.calls(record.evidence), record.statuses, now_seconds)
            else:
                self._monitors.show(self._describe(inquiry))
        if signals.wants_stacks and self._inquiry is None:
            signals.wants_stacks = False
            self.ask()

    def add_event(self, instance: int, event: Mapping[str, Any]) -> None:  # noqa: ARG002 - every watcher has this signature
        """Record that ``instance`` has answered the request for its stacks."""
        if self._inquiry is not None:
            self._inquiry.note_answer(instance)

    def ask(self, hang: "Hang | None" = None) -> None:
        """Request the stacks of all programs, because of a hang or because the user asks."""
        from poprun.job.stack_inquiry import StackInquiry

        plan, record = self._watched.plan, self._watched.record
        self._inquiry = StackInquiry(
            record.statuses,
            time.monotonic(),
            self._watched.links.send_order,
            hang,
            plan.ending.hang_timeout_seconds,
            plan.places,
        )

    def forget(self) -> None:
        """Drop the request for stacks, because a failure explains why the instances seemed to hang."""
        self._inquiry = None

    def add_to(self, end: JobEnd) -> JobEnd:
        """Return ``end``, with the cause of the hang added if the job was stopped because of a hang."""
        return replace(end, verdict_of_hang=self._verdict) if end.is_hung else end

    def _describe(self, inquiry: "StackInquiry") -> str:
        """Return the received stacks as text; in a hang, the instance for which the others wait comes first."""
        from poprun.observe.account.stacks import read_lines
        from poprun.observe.judge.verdict import find_verdict_of_hang
        from poprun.observe.show.standstill import describe_verdict

        record, findings = self._watched.record, list[str]()
        read_line = read_lines(record.evidence.values())
        if inquiry.hang is not None:
            verdict = find_verdict_of_hang(inquiry.hang, record.statuses, record.evidence, read_line)
            self._verdict = verdict
            if verdict.is_about_absence and inquiry.hang.waiting:
                inquiry.hang = replace(inquiry.hang, absent=verdict.culprits)
            findings = describe_verdict(verdict, self._watched.plan.places)
        return inquiry.text(record.statuses, record.evidence, read_line, findings)


def _other_clocks(watched: Watched) -> "HostClocks | None":
    network, plan, identity = watched.identity.network, watched.plan, watched.identity
    if network is None:
        return None
    from poprun.launch.messages.clock import ROUND_SECONDS, HostClocks

    names = {
        index: route.name
        for index in range(plan.num_instances)
        if (route := identity.route(plan, index)) and route.address != network.control_host
    }
    seconds = 1.0 if plan.trace.folder is not None else ROUND_SECONDS
    return HostClocks(names, watched.links.send_order, seconds)


class Clocks(Watcher):
    """The watcher that measures how far the clocks of other hosts are ahead of poprun's clock."""

    hears = "clock"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.others = _other_clocks(watched)

    def update(self, now_seconds: float) -> None:
        """Ask the other hosts for the time of their clocks if the next question is due."""
        if self.others is not None:
            self.others.ask(self._watched.record.reachable, now_seconds)

    def add_event(self, instance: int, event: Mapping[str, Any]) -> None:
        """Record the answer of ``instance``, which contains the time of its host's clock."""
        if self.others is not None:
            self.others.add(instance, event, time.time_ns())

    def add_to(self, end: JobEnd) -> JobEnd:
        """Return ``end`` with all measurements of how far other hosts' clocks are ahead of poprun's clock."""
        return end if self.others is None else replace(end, clock_rounds=self.others.rounds)

    def ahead_seconds(self, instances: range) -> dict[int, float]:
        """Return by instance how many seconds its host's clock is ahead of poprun's clock; 0.0 if unknown."""
        fits = {} if self.others is None else self.others.fits()
        hosts = {index: self._watched.plan.instance(index).host for index in instances}
        now_ns = time.time_ns()
        return {index: fits[host].offset_at(now_ns) if host in fits else 0.0 for index, host in hosts.items()}


class Speed(Watcher):
    """The watcher that finds slow instances: it regularly asks each program for the times of its collectives."""

    def __init__(self, watched: Watched, clocks: Clocks) -> None:
        self._watched = watched
        self._clocks = clocks

    def update(self, now_seconds: float) -> None:
        """Print which instance or network link is slow. At regular intervals, also ask each instance's program at
        what times it called its collectives.
        """
        record, plan = self._watched.record, self._watched.plan
        statuses = record.statuses
        if record.phase is not Phase.RUNNING or any(status.counters is None for status in statuses):
            return
        if len(statuses) == 1 or any(status.state is not InstanceState.RUNNING for status in statuses):
            return
        from poprun.observe.judge.watch import MOST_HELPERS, PerformanceWatch

        if record.performance is None:
            record.performance = PerformanceWatch(record.began_at_seconds, plan.places)
        watch = record.performance
        lines = watch.update(len(statuses), now_seconds)
        network = self._watched.identity.network
        if self._clocks.others is not None and network is not None:
            own_host = next((it.name for it in network.hosts if it.address == network.control_host), None)
            lines += watch.note_links(self._clocks.others.round_trips(), own_host)
        for line in lines:
            log(line)
        if watch.round.is_due(now_seconds):
            watch.round.ask(self._clocks.ahead_seconds(range(len(statuses))), now_seconds)
            for index in range(len(statuses)):
                most_helpers = MOST_HELPERS if index == watch.suspect else 0
                self._watched.links.send_order(index, {"order": "calls", "most_helpers": most_helpers})

    def add_to(self, end: JobEnd) -> JobEnd:
        """Return ``end`` with the slow instances, and with the time that each instance has waited for others."""
        watch = self._watched.record.performance
        if watch is None:
            return end
        return replace(
            end,
            warnings=(*end.warnings, *watch.describe_pauses()),
            slowdowns=watch.all_slowdowns,
            waiting_seconds=watch.waiting_seconds,
        )


class Hosts(Watcher):
    """The watcher that warns once of each problem of a host, such as memory that will soon be full."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._due_seconds = time.monotonic() + 2 * _HOSTS_SECONDS
        self._warnings: dict[tuple[str, str], str] = {}  # by kind and host

    def update(self, now_seconds: float) -> None:
        """Check every 30 s whether hosts have problems, such as full memory; log each new problem."""
        if now_seconds >= self._due_seconds:
            from poprun.observe.judge.host_rules import find_host_findings
            from poprun.observe.show.host_words import describe_finding

            self._due_seconds = now_seconds + _HOSTS_SECONDS
            plan, statuses = self._watched.plan, self._watched.record.statuses
            hosts = {status.index: plan.instance(status.index).host for status in statuses}
            for finding in find_host_findings(statuses, hosts):
                if (finding.kind, finding.host) not in self._warnings:
                    warning = self._warnings[finding.kind, finding.host] = describe_finding(finding)
                    log(f"warning: {warning}")

    def add_to(self, end: JobEnd) -> JobEnd:
        """Return ``end``, the description of how the job ended, with the warnings about hosts that were logged."""
        return replace(end, warnings=(*end.warnings, *self._warnings.values()))


class Lone(Watcher):
    """The watcher that warns if several instances train independently, each without the others."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._has_warned = False

    def update(self, now_seconds: float) -> None:  # noqa: ARG002 - every watcher has this signature
        """Print one warning, while the instances run, if several instances train without each other."""
        if not self._has_warned and (number := num_lone(self._watched.record.statuses)) > 1:
            from poprun.observe.show.printed_report import describe_lone

            self._has_warned = True
            log(describe_lone(number, self._watched.plan))

    def add_to(self, end: JobEnd) -> JobEnd:
        """Return ``end``, which then says whether the warning about independent instances was printed."""
        return replace(end, has_told_lone=self._has_warned)
