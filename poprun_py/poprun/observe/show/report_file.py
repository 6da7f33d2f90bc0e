"""The record of a job, made from the ends of its attempts, and the record as JSON text. Pure."""

import json
import re
import time
from collections.abc import Sequence
from typing import Final

from popdist.ground import contract
from poprun.devices.pool.records import HeldLease
from poprun.launch.messages.clock import recent_fits
from poprun.observe.account.curves import MAX_FOLDED, count_steps, curves_of, fold_curves
from poprun.observe.account.job_record import (
    VERSION,
    AttemptRecord,
    InstanceRecord,
    JobRecord,
    LeaseRecord,
    utc,
)
from poprun.observe.account.state import InstanceStatus, name_code, shell_code, signal_of
from poprun.observe.account.time_shares import split_time
from poprun.observe.judge.findings import Findings
from poprun.observe.judge.job_end import JobEnd, exit_code, first_failure
from poprun.observe.show.printed_report import render_end
from poprun.plan.plan import InstancePlan, LaunchPlan, LeasedDevices
from poprun.plan.plan_file import plan_to_dict
from poprun.text.fields import write_record
from poprun.text.ranges import fold_numbers

_NUMBER: Final = r"(?:[-+.e\d]+|null)"
_NUMBERS: Final = re.compile(rf"\[\n\s+({_NUMBER}(?:,\n\s+{_NUMBER})*)\n\s+\]")
_DIGITS: Final = 3


def record_job(
    plan: LaunchPlan | None,
    job_id: str,
    ends: Sequence[JobEnd],
    *,
    error: str = "",
    leases: Sequence[HeldLease] = (),
    given: LeasedDevices | None = None,
) -> JobRecord:
    """Return a job's record for its report: plan, leases and attempts, and ``error`` if poprun itself failed."""
    is_over = bool(error) or not ends or ends[-1].is_over
    return JobRecord(
        poprun_version=contract.VERSION,
        job_id=job_id,
        is_over=is_over,
        written_at=utc(time.time()),
        exit_code=exit_code(ends[-1]) if ends and is_over and not error else None,
        error=error,
        plan=plan,
        leases=tuple(
            LeaseRecord(host=it.host, held=tuple(it.names), partition=it.partition, pool=it.pool) for it in leases
        ),
        attempts=() if plan is None else tuple(_record_attempt(plan, given, end) for end in ends),
    )


def render_job(job: JobRecord) -> str:
    """Return a job's record as JSON in ASCII, which contains the whole plan; a list of numbers takes one line."""
    values = {**write_record(job, version=VERSION), "plan": None if job.plan is None else plan_to_dict(job.plan)}
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(values, indent=1)) + "\n"


def _record_attempt(plan: LaunchPlan, given: LeasedDevices | None, end: JobEnd) -> AttemptRecord:
    failed = first_failure(end.statuses)
    is_folded = len(end.statuses) > MAX_FOLDED
    return AttemptRecord(
        is_over=end.is_over,
        started_at=utc(end.started_at_epoch_seconds),
        ended_at=utc(end.started_at_epoch_seconds + end.seconds) if end.is_over else None,
        duration_seconds=round(end.seconds, _DIGITS),
        exit_code=exit_code(end) if end.is_over else None,
        stop_reason=end.stop_reason,
        first_failure=None if failed is None else failed.index,
        launcher_exit_code=None if end.launcher_code is None else shell_code(end.launcher_code),
        launcher_excerpt=(end.findings or Findings()).launcher_words.lines,
        survivors=end.survivors,
        printed=tuple(render_end(end, plan)) if end.is_over else (),
        verdict=None if end.findings is None else end.findings.verdict,
        warnings=tuple(end.warnings),
        slowdowns=tuple(end.slowdowns),
        clocks=dict(sorted(recent_fits(end.clock_rounds).items())),
        instances=tuple(
            _record_instance(plan, plan.instance(it.index, given), end, it, is_folded=is_folded)
            for it in end.statuses
        ),
        curves=fold_curves(end.curves.instances) if end.curves and is_folded else {},
    )


def _record_instance(
    plan: LaunchPlan, instance: InstancePlan, end: JobEnd, status: InstanceStatus, *, is_folded: bool
) -> InstanceRecord:
    code = status.exit_code
    findings = end.findings or Findings()
    began, ended = status.started_at_seconds, status.exited_at_seconds
    return InstanceRecord(
        index=status.index,
        host=instance.host,
        replicas=fold_numbers(instance.replicas),
        place=plan.parallelism.place_of(status.index) or None,
        ipus=fold_numbers(instance.ipus),
        devices=tuple(instance.devices),
        exit_code=None if code is None else shell_code(code),
        signal=name_code(-signum) if code is not None and (signum := signal_of(code)) else "",
        was_stopped=status.was_stopped,
        problem=status.problem,
        hint=findings.reason_of(status) if status.has_failed else "",
        excerpt=findings.words_of(status.index).lines,
        began_seconds=None if began is None else round(max(0.0, began - end.began_at_seconds), _DIGITS),
        duration_seconds=None if began is None or ended is None else round(ended - began, _DIGITS),
        peak_memory_bytes=status.memory.peak_bytes or None,
        memory=tuple((round(at - (began or 0.0), _DIGITS), size) for at, size in status.memory.samples),
        num_steps=count_steps(status) or None,
        last_lines=tuple(end.last_lines.get(status.index, ())),
        curves=curves_of(end.curves.instances[status.index]) if end.curves and not is_folded else {},
        phase_seconds=_phase_seconds(end, status),
        evidence=end.evidence.get(status.index),
    )


def _phase_seconds(end: JobEnd, status: InstanceStatus) -> dict[str, float]:
    """Return the seconds that an instance spent in each phase, until its end or until now; {} if not measured."""
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
