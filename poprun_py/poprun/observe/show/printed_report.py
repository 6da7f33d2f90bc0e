"""The report that poprun prints at the end of a job: at most fifteen lines about a failure."""

import math
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from popdist.errors import name_instances
from popdist.ground.layout import Parallelism
from poprun.hosts.probe.program import words_for_own_python
from poprun.launch.process.limits import KillCounts
from poprun.launch.process.machine_evidence import Evidence, evidence_since
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.last_words import LastWords, last_words, without_numbers
from poprun.observe.account.state import (
    OWN_NETWORK_LOST,
    RUNTIME_KILLED,
    SHIM_KILLED,
    InstanceStatus,
    describe_code,
    name_code,
    name_with_place,
    shell_code,
)
from poprun.observe.judge.end_verdict import combine, find_verdict_of_end, kind_of_failure
from poprun.observe.judge.findings import Findings, find_shortage
from poprun.observe.judge.job_end import JobEnd, failed_while_leaving, first_failure, has_left, num_lone
from poprun.observe.show.standstill import describe_verdict
from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import describe_seconds, numbered
from poprun.text.screen import Level, log

_INTERRUPTED: Final = "interrupted: "  # by Ctrl-C, which is no failure
_MAX_SURVIVORS: Final = 10
MAX_OTHER_LINES: Final = 3
MAX_REPORT_LINES: Final = 15
_MAX_SUMMARY: Final = 120
_HEADER: Final = re.compile(r"Traceback \(most recent call last\):|During handling of the above|  File \"")
_EXCEPTION: Final = re.compile(r"[\w.]*(?:Error|Interrupt|Exit)\b")
_ABORT: Final = re.compile(r"Abort\((-?\d+)\) on node \d+ ")
"""A pattern for MPICH's line after MPI_Abort: "Abort(9) on node 1 (rank 1 in comm 0): application called
MPI_Abort"."""

_KILLED_AT: Final = re.compile(r"PID \d+ RUNNING AT (\S+)")
"""A pattern for the line of MPICH's launcher Hydra about a process that ended unexpectedly."""


def blame_aborter(
    statuses: Sequence[InstanceStatus], tails: Mapping[int, Sequence[str]], launcher_code: int | None
) -> list[InstanceStatus]:
    """Return the ``statuses`` of the instances, changed so that the caller of MPI_Abort failed with its code."""
    # an MPI launcher ends with the code, or kills the shims; then only standard error contains the code
    if launcher_code == 0 and not any(status.problem == SHIM_KILLED for status in statuses):
        return list(statuses)
    ended = [status for status in statuses if status.was_stopped or status.problem == SHIM_KILLED]
    printed = {it.index: code for it in ended if (code := _printed_code(tails.get(it.index, ()))) is not None}
    aborters = [status for status in ended if status.index in printed]
    if not aborters:
        return list(statuses)
    first = min(aborters, key=lambda status: status.exited_at_seconds or 0.0)
    exit_code = launcher_code if launcher_code is not None and launcher_code > 0 else printed[first.index]
    blamed = replace(first, exit_code=exit_code, was_stopped=False, problem="")
    return [blamed if status is first else status for status in statuses]


def blame_host(
    statuses: Sequence[InstanceStatus], plan: LaunchPlan, launcher_output: Sequence[str]
) -> list[InstanceStatus]:
    """Return the ``statuses``; if MPICH's launcher names a host where a process was killed, the instance that was
    lost there counts as the first loss, because the launcher then kills the processes on the other hosts.
    """
    # Hydra then kills the shims on other hosts, and poprun may hear of these shims earlier
    named = {match[1] for match in map(_KILLED_AT.search, launcher_output) if match}
    lost = [status for status in statuses if status.problem == SHIM_KILLED]
    on_host = [status for status in lost if plan.instance(status.index).host in named]
    if not on_host:
        return list(statuses)
    first = min(on_host, key=lambda status: status.exited_at_seconds or 0.0)
    earliest = min(status.exited_at_seconds or 0.0 for status in lost)
    return [replace(it, exited_at_seconds=math.nextafter(earliest, 0)) if it is first else it for it in statuses]


def _printed_code(tail: Sequence[str]) -> int | None:
    """Return the code, 1 to 255, of the first MPI_Abort in a program's last lines; None if there is none, or 0."""
    codes = [int(match[1]) & 0xFF for match in map(_ABORT.match, tail) if match]
    return next(iter(codes), 0) or None


def render_end(end: JobEnd, plan: LaunchPlan) -> list[str]:
    """Return the lines to print at the end of a job, at most 15; [] if everything went well."""
    failed = first_failure(end.statuses) or failed_while_leaving(end)
    has_followed = end.findings is not None and end.findings.has_launcher_followed
    # where the launcher itself has failed, shims were lost because of that
    is_let_down = plan.mpi is not None and bool(end.launcher_code) and not has_followed
    if failed is not None and has_left(end):
        lines = [f"the program left when it was asked to: exit code {failed.exit_code}"]
    elif failed is not None and end.is_output_closed and failed.exit_code == -signal.SIGPIPE:
        lines = []  # a shell, too, prints nothing about a program whose reader has gone
    elif failed is not None and failed.problem == OWN_NETWORK_LOST:
        lines = [OWN_NETWORK_LOST]
    elif failed is not None and not (failed.problem in (SHIM_KILLED, RUNTIME_KILLED) and is_let_down):
        lines = _render_failure(end, failed, plan)
    elif end.is_hung and end.findings is not None:
        lines = [
            end.stop_reason,
            *(f"  {line}" for line in describe_verdict(end.findings.verdict, plan.places)),
        ]
    elif end.stop_reason and not (end.num_interrupts or end.is_terminated or end.is_output_closed):
        lines = _render_launcher_end(end, plan)
    else:
        lines = [f"{_INTERRUPTED}{name_instances(end.interrupted)}"] if end.interrupted else []
        lines += _render_late(end, plan)
    if end.survivors:
        lines.append(f"{'  ' if lines else ''}{_render_survivors(end.survivors)}")
    return lines


def render_attempts(ends: Sequence[JobEnd]) -> list[str]:
    """Return a line for each attempt of a job that was restarted; [] if there was one attempt."""
    if len(ends) == 1:
        return []
    return [
        f"attempt {number}: {_describe_attempt(end)}, {describe_seconds(end.seconds)}"
        for number, end in enumerate(ends)
    ]


def render_warning(end: JobEnd, plan: LaunchPlan) -> str:
    """Return a warning if several instances trained alone, or none used popdist for replicas; "" if neither."""
    if not end.has_started:
        return ""
    num = plan.num_instances
    if (lone := num_lone(end.statuses)) > 1:
        return "" if end.has_told_lone else describe_lone(lone, plan)
    if plan.num_replicas <= num or end.has_joined:
        return ""
    return (
        f"warning: no instance used popdist, so this was a job of {num}, not of {plan.num_replicas} replicas: "
        f"use popdist in the program, or give --num-replicas {num}"
    )


def describe_lone(number: int, plan: LaunchPlan) -> str:
    """Return the warning that ``number`` instances trained alone, because nothing added up their gradients."""
    return (
        f"warning: {number} processes trained alone, each a model of its own, if they trained: neither popdist "
        "nor torch.distributed nor MPI added up their gradients; wrap the model in popdist.ReplicatedModel, call "
        "init_process_group() with DistributedDataParallel, jax.distributed.initialize() with JAX, use "
        "MultiWorkerMirroredStrategy with TensorFlow, or tell the library of "
        f"{plan.num_instances_per_host} devices"
    )


def _describe_attempt(end: JobEnd) -> str:
    failed = first_failure(end.statuses)
    if has_left(end):
        return "left when it was asked to"
    if failed is not None:
        return f"instance {failed.index} failed first, {failed.problem or name_code(failed.exit_code or 0)}"
    return end.stop_reason or "ended well"


def _render_failure(end: JobEnd, failed: InstanceStatus, plan: LaunchPlan) -> list[str]:
    findings = end.findings or Findings()
    verdict = findings.verdict
    shown = _shown_failure(end.statuses, failed, verdict)
    last = findings.words_of(shown.index)
    why = findings.reason_of(shown)
    verdict_lines = describe_verdict(verdict, plan.places)
    others = _describe_others(shown, end.statuses, findings.words, plan.places, verdict.victims)
    head = [
        _headline(end, failed, shown, plan, verdict),
        *([f"  {why}"] if why else []),
        *(f"  {line}" for line in verdict_lines),
    ]
    num_left = MAX_REPORT_LINES - len(head) - len(others)
    excerpt = last.lines if len(last.lines) <= num_left else last.lines[len(last.lines) - num_left :]
    if verdict.cause is Cause.MISMATCH and last.summary.startswith("popdist."):
        excerpt = ()  # popdist's error has the calls, and what to do, as ``found`` has
    return [*head, *(f"  | {line}" for line in excerpt), *(f"  {line}" for line in others)]


def _shown_failure(statuses: Sequence[InstanceStatus], failed: InstanceStatus, verdict: Verdict) -> InstanceStatus:
    """Return the failure to print: of the first instance at fault if it failed, else the failure ``failed``."""
    if not verdict.culprits or failed.index in verdict.culprits:
        return failed
    culprit = statuses[verdict.culprits[0]]
    return culprit if culprit.exit_code or culprit.problem else failed


def _headline(
    end: JobEnd, failed: InstanceStatus, shown: InstanceStatus, plan: LaunchPlan, verdict: Verdict
) -> str:
    how = f"{shown.problem or describe_code(shown.exit_code or 0)} ({_place(shown, plan)})"
    if len(end.statuses) == 1:
        return f"the program failed: {how}"
    if shown is not failed:
        return f"instance {shown.index} is at fault, although instance {failed.index} ended before it: {how}"
    if verdict.culprits and failed.index not in verdict.culprits:
        return f"{name_with_place(verdict.culprits, plan.places)} let the others down: {_fault(verdict)}"
    if not failed.has_failed:
        return f"instance {failed.index} failed when it was asked to end: {how}"
    return f"instance {failed.index} failed first: {how}"


def _fault(verdict: Verdict) -> str:
    if verdict.cause is Cause.EARLY_END:
        return "it ended with 0 before them" if len(verdict.culprits) == 1 else "they ended with 0 before them"
    return str(verdict.cause)


def _render_launcher_end(end: JobEnd, plan: LaunchPlan) -> list[str]:
    name = plan.mpi.launcher if plan.mpi is not None else "the launcher"
    reason = end.stop_reason
    findings = end.findings or Findings()
    if findings.shortage:
        return [f"{name} ended before the program: {findings.shortage}"]
    if end.launcher_code:
        reason = f"{name} ended before the program: {describe_code(end.launcher_code)}"
    return [reason, *(f"  | {line}" for line in findings.launcher_words.lines)]


def _render_late(end: JobEnd, plan: LaunchPlan) -> list[str]:
    """Return a line about instances that were killed because they did not stop in time; [] if none."""
    late = [it.index for it in end.statuses if it.was_stopped and it.exit_code == -signal.SIGKILL]
    if not late or end.num_interrupts > 1:
        return []
    seconds, verb = plan.ending.stop_timeout_seconds, "was" if len(late) == 1 else "were"
    how = f"killed, not having ended {seconds:g} s after the request"
    return [f"{name_instances(late)} {verb} {how}: a longer --stop-timeout leaves time to save"]


def _render_survivors(survivors: Sequence[int]) -> str:
    pids = ", ".join(map(str, survivors[:_MAX_SURVIVORS]))
    more = f" and {len(survivors) - _MAX_SURVIVORS} more" if len(survivors) > _MAX_SURVIVORS else ""
    return f"these processes do not die: {pids}{more}"


def _place(failed: InstanceStatus, plan: LaunchPlan) -> str:
    instance = plan.instance(failed.index)
    place = plan.parallelism.describe([failed.index]) or numbered("replica", instance.replicas)
    return f"host {instance.host}, {place}"


def without_tracebacks(launcher_output: Sequence[str]) -> list[str]:
    """Return the MPI launcher's output lines without the Python tracebacks, which poprun's own processes wrote."""
    kept: list[str] = []
    is_inside = False
    for line in launcher_output:
        is_inside = bool(_HEADER.match(line)) or (is_inside and line.startswith("  "))
        if not is_inside and not _EXCEPTION.match(line):
            kept.append(line)
    return kept


def _other_python(end: JobEnd, plan: LaunchPlan, tails: Mapping[int, Sequence[str]]) -> str:
    failed = first_failure(end.statuses)
    if failed is None or failed.exit_code != 1:
        return ""
    return words_for_own_python(plan.program, plan.working_directory, tails.get(failed.index, ()))


def _left_early(end: JobEnd, plan: LaunchPlan) -> tuple[int, ...]:
    """Return the instances that exited with 0 before the shim of another instance, an MPI process, was killed."""
    lost = [it.exited_at_seconds or 0.0 for it in end.statuses if it.problem == SHIM_KILLED]
    if plan.mpi is None or not lost:
        return ()
    ended = [it for it in end.statuses if it.exit_code == 0 and not (it.was_stopped or it.problem)]
    return tuple(it.index for it in ended if (it.exited_at_seconds or 0.0) <= max(lost))


def _has_launcher_followed(end: JobEnd, launcher_output: Sequence[str]) -> bool:
    """Whether the MPI launcher failed only because one of its own processes, such as a shim, was killed."""
    # if a shim was killed, Hydra prints a message, and PRRTE ends with the code of SIGKILL
    failed = first_failure(end.statuses)
    if failed is None or (end.launcher_code or 0) < 0:
        return False
    has_reported_kill = end.launcher_code == shell_code(-signal.SIGKILL) or any(
        "BAD TERMINATION" in line for line in launcher_output
    )
    return failed.problem == RUNTIME_KILLED or (failed.problem == SHIM_KILLED and has_reported_kill)


def explain(
    end: JobEnd,
    plan: LaunchPlan,
    tails: Mapping[int, Sequence[str]],
    launcher_output: Sequence[str],
    kills_before: KillCounts | None,
) -> JobEnd:
    """Print how the job ended and who is at fault; return ``end`` with the findings and corrected statuses."""
    left_early = _left_early(end, plan)
    statuses = blame_host(end.statuses, plan, launcher_output)
    end = replace(end, statuses=blame_aborter(statuses, tails, end.launcher_code))
    words = {index: last_words(tail) for index, tail in tails.items()}
    evidence = Evidence() if kills_before is None else evidence_since(kills_before)
    findings = Findings(
        evidence=evidence,
        words=words,
        launcher_words=last_words(without_tracebacks(launcher_output)),
        shortage=find_shortage(launcher_output, evidence.limits),
        left_early=left_early,
        has_launcher_followed=not left_early and _has_launcher_followed(end, launcher_output),
        other_python=_other_python(end, plan, tails),
    )
    reasons = {it.index: findings.reason_of(it) for it in end.statuses if it.has_failed}
    verdict = find_verdict_of_end(end.statuses, words, reasons, end.evidence)
    if end.verdict_of_hang is not None:
        verdict = combine(end.verdict_of_hang, verdict, words)
    explained = replace(end, findings=replace(findings, verdict=verdict))
    if lines := render_end(explained, plan):
        log("\n".join(lines), Level.INFO if lines[0].startswith(_INTERRUPTED) else Level.ERROR)
    return explained


def _describe_others(
    failed: InstanceStatus,
    statuses: Sequence[InstanceStatus],
    words: Mapping[int, LastWords],
    parallelism: Parallelism,
    victims: Collection[int],
) -> list[str]:
    """Return at most three lines on how the instances other than ``failed`` ended, failures first."""
    kind = kind_of_failure(failed, words)
    groups: dict[tuple[int, str], list[int]] = {}
    texts: dict[tuple[int, str], str] = {}
    for status in statuses:
        if status is failed:
            continue
        is_alike = _has_failed_by_itself(status, words) and kind_of_failure(status, words) == kind
        text = "failed in the same way" if is_alike else _describe_end(status, words, victims)
        worth = 0 if is_alike else 1 if status.has_failed else 2
        key = (worth, without_numbers(text))
        groups.setdefault(key, []).append(status.index)
        texts.setdefault(key, text)
    rows = [
        (name_with_place(indices, parallelism), texts[key])
        for key, indices in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    if len(rows) > MAX_OTHER_LINES:
        num_shown = MAX_OTHER_LINES - 1
        num_left = len(rows) - num_shown
        rows = [*rows[:num_shown], ("the others", f"ended in {num_left} further ways")]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:{width}}   {text}" for name, text in rows]


def _has_failed_by_itself(status: InstanceStatus, words: Mapping[int, LastWords]) -> bool:
    """Whether an instance failed by itself, perhaps while poprun was stopping it."""
    return status.has_failed or ((status.exit_code or 0) > 0 and bool(_summary(status, words)))


def _summary(status: InstanceStatus, words: Mapping[int, LastWords]) -> str:
    return words[status.index].summary if status.index in words else ""


def _describe_end(status: InstanceStatus, words: Mapping[int, LastWords], victims: Collection[int]) -> str:
    if status.problem:
        return status.problem
    if status.exit_code is None:
        return "never ran"
    if status.exit_code == 0:
        return "ended with 0"
    if status.was_stopped and status.exit_code == -signal.SIGKILL:
        return "killed by poprun: SIGKILL, not ended within --stop-timeout"
    if status.was_stopped and status.exit_code < 0:
        return f"stopped by poprun: {name_code(status.exit_code)}"
    summary = _summary(status, words)[:_MAX_SUMMARY]
    if status.index in victims:
        how = "torn down by it"
    else:
        how = "ended while poprun stopped the job" if status.was_stopped else "failed, too"
    return f"{how}: {describe_code(status.exit_code)}{f': {summary}' if summary else ''}"
