"""The report of a whole job as JSON: how each attempt went, and each instance in it. Pure."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from popdist.ground import contract
from popdist.ground.progress import PhaseCounters
from poprun.devices.pool.records import HeldLease
from poprun.launch.messages.clock import ClockFit, recent_fits
from poprun.observe.account.curves import MAX_FOLDED, InstanceCurves, count_steps, curves_to_dict, folds_to_dict
from poprun.observe.account.evidence import InstanceEvidence, Stacks
from poprun.observe.account.job_report import VERSION
from poprun.observe.account.state import InstanceStatus, name_code, shell_code, signal_of
from poprun.observe.judge.findings import Findings
from poprun.observe.judge.job_end import JobEnd, exit_code, first_failure
from poprun.observe.judge.slowness import Slowness, describe_slowness
from poprun.observe.judge.verdict import Verdict
from poprun.observe.show.printed_report import render_end
from poprun.plan.plan import InstancePlan, LaunchPlan, LeasedDevices
from poprun.plan.plan_file import plan_to_dict
from poprun.text.ranges import fold_numbers

_NUMBER: Final = r"(?:[-+.e\d]+|null)"
_NUMBERS: Final = re.compile(rf"\[\n\s+({_NUMBER}(?:,\n\s+{_NUMBER})*)\n\s+\]")
_DIGITS: Final = 3
_MILLISECONDS: Final = 1000


def job_to_dict(
    plan: LaunchPlan | None,
    job_id: str,
    ends: Sequence[JobEnd],
    *,
    error: str = "",
    leases: Sequence[HeldLease] = (),
    given: LeasedDevices | None = None,
) -> dict[str, object]:
    """The job as values that JSON knows: its attempts, or the ``error`` for which poprun itself gave up."""
    is_over = bool(error) or not ends or ends[-1].is_over
    return {
        "version": VERSION,
        "poprun_version": contract.VERSION,
        "job_id": job_id,
        "is_over": is_over,
        "written_at": _utc(time.time()),
        "exit_code": exit_code(ends[-1]) if ends and is_over and not error else None,
        "error": error,
        "plan": None if plan is None else plan_to_dict(plan),
        "leases": [_lease_to_dict(lease) for lease in leases],
        "attempts": [] if plan is None else [_attempt_to_dict(plan, given, end) for end in ends],
    }


def render_job(job: Mapping[str, object]) -> str:
    """The report as JSON in ASCII, with each list of numbers on one line."""
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(job, indent=1)) + "\n"


def _lease_to_dict(lease: HeldLease) -> dict[str, object]:
    return {"host": lease.host, "held": lease.names, "partition": lease.partition, "pool": lease.pool}


def _attempt_to_dict(plan: LaunchPlan, given: LeasedDevices | None, end: JobEnd) -> dict[str, object]:
    failed = first_failure(end.statuses)
    return {
        "is_over": end.is_over,
        "started_at": _utc(end.started_at_epoch_seconds),
        "ended_at": _utc(end.started_at_epoch_seconds + end.seconds) if end.is_over else None,
        "duration_seconds": round(end.seconds, _DIGITS),
        "exit_code": exit_code(end) if end.is_over else None,
        "stop_reason": end.stop_reason,
        "first_failure": None if failed is None else failed.index,
        "launcher_exit_code": None if end.launcher_code is None else shell_code(end.launcher_code),
        "launcher_excerpt": (end.findings or Findings()).launcher_words.lines,
        "survivors": end.survivors,
        "printed": render_end(end, plan) if end.is_over else [],
        "verdict": None if end.findings is None else _verdict_to_dict(end.findings.verdict),
        "warnings": end.warnings,
        "slowdowns": [_slowdown_to_dict(it) for it in end.slowdowns],
        "clocks": {host: _clock_to_dict(clock) for host, clock in sorted(recent_fits(end.clock_rounds).items())},
        "instances": [
            _instance_to_dict(plan, plan.instance(status.index, given), end, status) for status in end.statuses
        ],
        "curves": folds_to_dict(end.curves.instances) if end.curves and len(end.statuses) > MAX_FOLDED else {},
    }


def _verdict_to_dict(verdict: Verdict) -> dict[str, object]:
    since = verdict.since_epoch_seconds
    return {
        "cause": str(verdict.cause),
        "culprits": verdict.culprits,
        "victims": verdict.victims,
        "torn_down": verdict.torn_down,
        "places": {str(index): place for index, place in sorted(verdict.places.items())},
        "details": verdict.details,
        "since": None if since is None else _utc(since),
        "advice": verdict.advice,
    }


def _slowdown_to_dict(slowness: Slowness) -> dict[str, object]:
    fields = asdict(slowness)
    del fields["num_windows"]  # which only says when it is over
    return {"text": describe_slowness(slowness), **fields}


def _clock_to_dict(clock: ClockFit) -> dict[str, float]:
    return {
        "offset_seconds": clock.offset_seconds,
        "uncertainty_seconds": clock.uncertainty_seconds,
        "drift": clock.drift,
        "drift_uncertainty": clock.drift_uncertainty,
    }


def _evidence_to_dict(evidence: InstanceEvidence) -> dict[str, object]:
    return {
        "stack": _frames_of(evidence.stacks) or _frames_of(evidence.crash),
        "helpers": [
            {"process": helper.process, "stack": _frames_of(helper.stacks)} for helper in evidence.helpers
        ],
        "groups": [
            {
                "name": group.name,
                "num_called": group.num_called,
                "num_done": group.num_done,
                "calls": [
                    {
                        "number": call.number,
                        "call": str(call),
                        "is_done": call.is_done,
                        "at": _utc(call.at_epoch_seconds),
                    }
                    for call in group.calls
                ],
            }
            for group in evidence.groups
        ],
        "full_disks": evidence.full_disks,
    }


def _frames_of(stacks: Stacks) -> Sequence[str]:
    """The main thread's calls, the latest last; what /proc tells where there is no stack."""
    return [f"{it.file}:{it.line} in {it.function}" for it in stacks.main] or stacks.processes


def _instance_to_dict(
    plan: LaunchPlan, instance: InstancePlan, end: JobEnd, status: InstanceStatus
) -> dict[str, object]:
    code = status.exit_code
    findings = end.findings or Findings()
    words = findings.words_of(status.index)
    began, ended = status.started_at_seconds, status.exited_at_seconds
    delay_seconds = None if began is None else round(max(0.0, began - end.began_at_seconds), _DIGITS)
    return {
        "index": status.index,
        "host": instance.host,
        "replicas": fold_numbers(instance.replicas),
        **({"place": place} if (place := plan.parallelism.place_of(status.index)) else {}),
        "ipus": fold_numbers(instance.ipus),
        "devices": instance.devices,
        "exit_code": None if code is None else shell_code(code),
        "signal": name_code(-signum) if code is not None and (signum := signal_of(code)) else "",
        "was_stopped": status.was_stopped,
        "problem": status.problem,
        "hint": findings.reason_of(status) if status.has_failed else "",
        "excerpt": words.lines,
        "began_seconds": delay_seconds,
        "duration_seconds": None if began is None or ended is None else round(ended - began, _DIGITS),
        "peak_memory_bytes": status.memory.peak_bytes or None,
        "memory": [
            (round(at_seconds - (began or 0.0), _DIGITS), num_bytes)
            for at_seconds, num_bytes in status.memory.samples
        ],
        "num_steps": count_steps(status) or None,
        "last_lines": end.last_lines.get(status.index, ()),
        "curves": curves_to_dict(curves) if (curves := _own_curves(end, status.index)) else {},
        "phase_seconds": _phase_seconds(end, status),
        "evidence": _evidence_to_dict(known) if (known := end.evidence.get(status.index)) else None,
    }


def _own_curves(end: JobEnd, index: int) -> InstanceCurves | None:
    """The curves of an instance, where they are not folded with those of many others."""
    return None if end.curves is None or len(end.statuses) > MAX_FOLDED else end.curves.instances[index]


def _phase_seconds(end: JobEnd, status: InstanceStatus) -> dict[str, float]:
    """Where the time of an instance went, until now where it runs; empty where nobody has looked."""
    began, ended = status.started_at_seconds, status.exited_at_seconds
    if status.counters is None or began is None:
        return {}
    seen_seconds = sum(status.counters.seconds.values())
    parts = split_time(
        seen_seconds if ended is None else ended - began,
        status.counters,
        end.waiting_seconds.get(status.index, 0.0),
    )
    return {name: round(seconds, _DIGITS) for name, seconds in parts.items()}


def split_time(elapsed_seconds: float, counters: PhaseCounters, waiting_seconds: float = 0.0) -> dict[str, float]:
    """The seconds of each phase; ``waiting_seconds`` is for how long it waited for the slowest, as far as known.

    What the sampler has not seen is the time before it, so it counts as "start". In the backward pass of
    DistributedDataParallel a program waits in C++: where it uses no processor there it communicates or waits.
    """
    parts = dict(counters.seconds)
    parts["start"] += max(0.0, elapsed_seconds - sum(parts.values()))
    idle = min(counters.idle_backward_seconds, parts["backward"])
    parts["backward"] -= idle
    waiting = min(waiting_seconds, parts["communication"] + idle)
    parts["communication"] += idle - waiting
    return {**parts, "waiting": waiting}


def _utc(epoch_seconds: float) -> str:
    """A moment as ISO 8601 has it, to the millisecond."""
    milliseconds = round(epoch_seconds * _MILLISECONDS)
    whole, rest = divmod(milliseconds, _MILLISECONDS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:03}Z"
