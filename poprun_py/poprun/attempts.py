"""The attempts of a job: run one after the other until the job succeeds or may not restart."""

import gc
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poprun.errors import HostsError
from poprun.hosts.job_network import forget_key, found_again
from poprun.hosts.probe.gpus import find_devices
from poprun.job.launched import LaunchedAttempt, launch
from poprun.job.loop import Attempt
from poprun.job.signals import ReceivedSignals
from poprun.observe.account.job_identity import JobIdentity
from poprun.observe.judge.job_end import JobEnd, exit_code, first_failure, has_left, num_lone
from poprun.outcome import JobOutcome
from poprun.plan.advice import named
from poprun.plan.plan import LaunchPlan
from poprun.text import screen

if TYPE_CHECKING:
    from poprun.devices.lease.claims import LeasedPlan
    from poprun.launch.routes import JobNetwork

_LONGEST_PAUSE_SECONDS: Final = 30.0


def run_attempts(first: LaunchedAttempt, outcome: JobOutcome, signals: ReceivedSignals) -> int:
    """Run a job whose first attempt ``first`` has been started; after failures restart the job as its plan allows.
    Return the exit code of the job's last attempt (start).
    """
    gc.freeze()  # modules stay, so that the collector need not go through them
    gc.enable()  # `poprun.__main__` disables the collector while modules load
    plan, ends, launched = first.plan, outcome.ends, first
    on_look = outcome.note_progress if plan.has_curves else None
    while True:
        ends.append(_run_attempt(launched, signals, on_look))
        _collect_trace(plan, launched.identity, ends[-1], signals)
        identity = _next_attempt(launched, ends, signals, outcome.leased)
        if identity is None:
            break
        launched = launch(plan, first.variables, identity, first.verbosity)
    _log_summary(ends, plan)
    return exit_code(ends[-1])


def _run_attempt(
    launched: LaunchedAttempt, signals: ReceivedSignals, on_look: Callable[[Attempt], object] | None
) -> JobEnd:
    """Run one attempt (start) of a job; return how it ended. If no program ran, delete the job's secret key."""
    with launched.ended_on_failure():
        attempt = Attempt(launched, signals, on_look)
    has_started = False
    try:
        end = attempt.run()
        has_started = end.has_started
        return end
    finally:
        if not has_started:
            forget_key(launched.plan, launched.identity.network)


def _collect_trace(plan: LaunchPlan, identity: JobIdentity, end: JobEnd, signals: ReceivedSignals) -> None:
    """Merge the traces that a job's programs recorded into one file, and log its name; stop at a new signal."""
    if plan.trace.folder is None:
        return
    from poprun.observe.show.trace.collection import collect_trace

    rounds = end.clock_rounds if end.has_started else None
    before = signals.num_interrupts, signals.is_terminated

    def is_stopped() -> bool:
        return (signals.num_interrupts, signals.is_terminated) != before

    for line in collect_trace(plan, identity.job_id, identity.restart_count, rounds, is_stopped):
        screen.log(line)


def restart_pause_seconds(end: JobEnd, restart_count: int, max_restarts: int) -> float | None:
    """Return how many seconds a job, which ended as ``end`` says, waits before a restart; None for no restart."""
    # no restart of a job that somebody asked to end, or whose program forbids a restart or cannot be executed
    was_asked = end.num_interrupts or end.is_terminated or end.is_output_closed or end.is_timed_out
    failed = first_failure(end.statuses)
    is_hopeless = failed is not None and failed.cannot_run
    if restart_count >= max_restarts or exit_code(end) == 0 or was_asked or has_left(end) or is_hopeless:
        return None
    return min(2.0**restart_count, _LONGEST_PAUSE_SECONDS)


def _next_attempt(
    launched: LaunchedAttempt, ends: Sequence[JobEnd], signals: ReceivedSignals, leased: "LeasedPlan | None"
) -> JobIdentity | None:
    """Wait before a restart of the job, check its hosts again, and return the job's identity (id, restart number,
    key of the hosts) for the next attempt; None if the job must not restart.
    """
    plan, identity = launched.plan, launched.identity
    network = identity.network
    while True:
        pause_seconds = restart_pause_seconds(ends[-1], identity.restart_count, plan.ending.max_restarts)
        if pause_seconds is None or (not plan.ending.restarts_anyway and _is_in_vain(ends)):
            return None
        # an attempt without some hosts also counts as a restart: a later attempt may find these hosts again
        identity = replace(identity, restart_count=identity.restart_count + 1)
        screen.log(
            f"restart {identity.restart_count} of at most {plan.ending.max_restarts} in {pause_seconds:g} s"
        )
        if not _pause(pause_seconds, signals):
            return None
        try:
            if network is not None:
                network = _found_again(plan, network, leased)
        except HostsError as error:
            if identity.restart_count >= plan.ending.max_restarts:
                raise
            screen.log(str(error))
        else:
            if not plan.ending.restarts_anyway and _has_lost_devices(launched):
                return None
            return replace(identity, network=network) if _pause(0.0, signals) else None


def _has_lost_devices(launched: LaunchedAttempt) -> bool:
    """Whether this machine no longer has one of the job's GPUs; then also log which GPUs are lost and left."""
    plan, identity = launched.plan, launched.identity
    if not plan.devices or identity.network is not None:
        return False
    found = find_devices(launched.variables)
    there = [gpu.name for gpu in found.gpus]
    lost = [name for name in identity.devices_of(plan, 0).devices if name not in there]
    if lost:
        left = "; ".join(found.problems) or f"{named('GPU', there)} {'is' if len(there) == 1 else 'are'} left"
        screen.log(
            f"not started again: {named('GPU', lost)} of the job cannot be found any more: {left}; reset the "
            "device, or start the job on what is left (--restart-anyway starts it all the same)"
        )
    return bool(lost)


def _is_in_vain(ends: Sequence[JobEnd]) -> bool:
    """Whether a restart is useless, because the job would fail again in the same way; then also log why."""
    from poprun.observe.judge.restarts import reason_to_end

    reason = reason_to_end(ends)
    if reason:
        screen.log(f"not started again: {reason} (--restart-anyway starts it all the same)")
    return bool(reason)


def _found_again(plan: LaunchPlan, network: "JobNetwork", leased: "LeasedPlan | None") -> "JobNetwork":
    """Check the job's hosts again; return their addresses and a new key. Raise HostsError if a host is unfit."""
    network = found_again(plan, network)
    try:
        return network if leased is None else leased.reacquire(network)
    except HostsError:
        forget_key(plan, network)
        raise


def _pause(seconds: float, signals: ReceivedSignals) -> bool:
    """Wait ``seconds`` before a restart and return True; return False at once after a signal to end the job."""
    deadline = time.monotonic() + seconds
    while True:
        signals.drain()
        if signals.num_interrupts or signals.is_terminated or signal.SIGHUP in signals.passed_on:
            return False
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        select.select((signals.descriptor,), (), (), left)


def _log_summary(ends: Sequence[JobEnd], plan: LaunchPlan) -> None:
    """Log how each start of a job ended; warn if the job succeeded, but its instances trained independently."""
    if len(ends) == 1 and plan.num_replicas <= plan.num_instances and not num_lone(ends[-1].statuses):
        return
    from poprun.observe.show.printed_report import render_attempts, render_warning

    for line in render_attempts(ends):
        screen.log(line)
    if exit_code(ends[-1]) == 0 and (line := render_warning(ends[-1], plan)):
        screen.log(line)
