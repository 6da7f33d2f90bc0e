"""The verdict of an end: which instance's failure ended a job, and which failed only as a consequence. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from popdist.errors import name_instances, remedy_of_lone_call
from poprun.makers.failures import find_device_failure
from poprun.observe.account.evidence import InstanceEvidence
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.last_words import LastWords, last_words, without_numbers
from poprun.observe.account.stacks import collective_of
from poprun.observe.account.state import InstanceStatus, signal_of
from poprun.observe.judge.job_end import order_of_failure
from poprun.observe.judge.verdict import (
    EVERYBODY,
    OWN_CODE,
    SAME_CALLS,
    UNEVEN,
    Queue,
    blame_different,
    blame_ends,
    latest_own_frame,
    minority,
    place_text,
)

_TORN: Final = re.compile(
    r"gloo/transport/.*(?:Connection closed|Connection reset|Broken pipe|Connection refused|[Tt]imed out|timeout)"
    r"|Socket closed|remote process exited|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout|Timed out waiting|wait timeout after|recvValue failed"
    r"|sendBytes failed|failed to recv|DistNetworkError|DistStoreError|Application timeout caused pair closure"
    r"|Connection closed by peer \["
    r"|was closed: it ended or was lost|had given up waiting, or failed|did not come within"
)
"""A pattern for the errors of a program that failed only because it lost another program, or waited in vain."""

_DIFFERENT: Final = re.compile(
    r"collective mismatch in your code|op\.preamble\.length|appears not to match sizes of the same param"
    r"|DDP expects same model across all ranks|are not in the same collective|inconsistent .* across ranks"
    r"|Detected mismatch between collectives on ranks"
)
_TOO_LONG: Final = "op.preamble.length <= op.nbytes"
_PARAMETERS: Final = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
_LINE_OF_CALL: Final = re.compile(r"\s*(?:instances?|ranks?) ([\d, and]+): (.+)")
"""A pattern for lines of popdist's error about different collectives: the instances, and their call."""

_LATE: Final = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
"""A pattern for the error of rank 0 that other ranks did not reach torch's monitored barrier."""

_LOADER_FAILED: Final = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed|exited|has been)")
_NO_SPACE: Final = re.compile(
    r"No space left on device|\[Errno 28\]|Disk quota exceeded|file write failed.*PytorchStream"
)
_NO_MEMORY: Final = re.compile(
    r"out of memory|MemoryError|OutOfMemoryError|DefaultCPUAllocator|bad_alloc", re.IGNORECASE
)
_EXCEPTION: Final = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b|[A-Za-z_][\w.]*: ")

_CULPRIT_SECONDS: Final = 2.0  # how long a peer that has closed its connections gets to end by itself
_MORE_MEMORY: Final = "smaller batches, fewer data loader workers, or a larger limit"


def find_verdict_of_end(
    statuses: Sequence[InstanceStatus],
    words: Mapping[int, LastWords],
    reasons: Mapping[int, str],
    evidence: Mapping[int, InstanceEvidence],
) -> Verdict:
    """Return which instances are at fault for a job's end, and why, from their states, last output and stacks."""
    failed = sorted((it for it in statuses if it.has_failed), key=order_of_failure)
    victims = [it.index for it in failed if is_torn(words.get(it.index)) and not it.problem]
    stopped = tuple(it.index for it in statuses if it.was_stopped)
    places = {index: it.place for index, it in words.items() if it.place}
    places |= {
        index: place_text(frame)
        for index, it in evidence.items()
        if (frame := latest_own_frame(it)) and index not in places
    }
    verdict = Verdict(victims=tuple(sorted(victims)), torn_down=stopped, places=places)
    if late := _late_for_barrier(words, len(statuses)):
        stood = tuple(f"instance {index} stood at {place}" for index in late if (place := verdict.place_of(index)))
        others = tuple(index for index in verdict.victims if index not in late)
        return replace(verdict, cause=Cause.ABSENT, culprits=late, victims=others, details=stood, advice=OWN_CODE)
    if any(_DIFFERENT.search(_last_lines(it)) for it in words.values()):
        return _different_ends(verdict, statuses, words, evidence)
    own = [it for it in failed if it.index not in victims]
    own = own or [it for it in statuses if it.was_stopped and _has_own_words(words.get(it.index))]
    if own:
        return _blame(verdict, own[0], own, words, reasons, evidence)
    return _without_culprit(verdict, statuses, failed, words, evidence)


def combine(of_hang: Verdict, of_end: Verdict, words: Mapping[int, LastWords]) -> Verdict:
    """Return the verdict of a job that hung and then ended: ``of_end`` if the instances that it blames are also at
    fault for the hang, and one of them printed an error of its own; otherwise ``of_hang``.
    """
    culprits = of_end.culprits
    is_another = bool(of_hang.culprits) and not set(culprits) <= set(of_hang.culprits)
    if is_another or not any(_has_own_words(words.get(it)) for it in culprits):
        return of_hang
    summary = words[culprits[0]].summary
    details = (f"{name_instances(culprits)} had failed, and was about to end: {summary}{of_end.at(culprits[0])}",)
    victims = tuple(index for index in of_hang.victims if index not in culprits)
    return replace(of_end, victims=victims, details=details)


def awaits_culprit(
    failed: Mapping[int, InstanceStatus], tails: Mapping[int, Sequence[str]], now_seconds: float
) -> bool:
    """Whether poprun should wait for another failure, because all ``failed`` instances only lost an instance.

    The connections of a process close before the process has ended, so an instance that lost a peer may end before
    the peer. ``tails`` are the last lines of each instance; without these lines poprun does not wait.
    """
    since_seconds = min((it.exited_at_seconds or 0.0 for it in failed.values()), default=0.0)
    if now_seconds - since_seconds >= _CULPRIT_SECONDS or any(it.problem for it in failed.values()):
        return False
    return bool(tails) and all(is_torn(last_words(tail)) for tail in tails.values())


def is_torn(last: LastWords | None) -> bool:
    """Whether the last lines ``last`` of a program show that it failed only because it lost another instance."""
    text = "" if last is None else _last_lines(last)
    is_own = _NO_SPACE.search(text) or "server socket has failed to listen" in text
    return bool(_TORN.search(text)) and not is_own  # NCCL and torch call both an error of connections


def _late_for_barrier(words: Mapping[int, LastWords], num_instances: int) -> tuple[int, ...]:
    """Return the ranks that did not reach a monitored barrier of torch; () if no error names any."""
    matches = (match for it in words.values() if (match := _LATE.search(_last_lines(it))))
    ranks = next((tuple(map(int, re.findall(r"\d+", match[1]))) for match in matches), ())
    return ranks if max(ranks, default=num_instances) < num_instances else ()


def _last_lines(last: LastWords) -> str:
    return "\n".join([last.summary, *(line for line in last.lines if not line.startswith("  "))])


def _has_own_words(last: LastWords | None) -> bool:
    return last is not None and bool(last.place) and not is_torn(last) and "KeyboardInterrupt" not in last.summary


def _blame(
    verdict: Verdict,
    first: InstanceStatus,
    own: Sequence[InstanceStatus],
    words: Mapping[int, LastWords],
    reasons: Mapping[int, str],
    evidence: Mapping[int, InstanceEvidence],
) -> Verdict:
    """Return the verdict that ``first``, and all instances that failed in the same way, are at fault."""
    last = words.get(first.index, LastWords())
    own_evidence = evidence.get(first.index, InstanceEvidence())
    cause = _cause_of(first, last, reasons.get(first.index, ""))
    kind = kind_of_failure(first, words)
    alike = {it.index for it in own if kind_of_failure(it, words) == kind}
    alike |= {index for index in verdict.torn_down if _has_same_message(words.get(index), last)}
    details = []
    if cause is Cause.FULL_DISK and own_evidence.full_disks:
        details.append(f"no space left in {' and '.join(own_evidence.full_disks)}")
    if cause is Cause.SIGNAL and verdict.place_of(first.index):
        details.append(f"it stood at {verdict.place_of(first.index)}")
    advice = {Cause.OUT_OF_MEMORY: _MORE_MEMORY, Cause.FULL_DISK: "make room there, or write elsewhere"}.get(
        cause, ""
    )
    if (failure := find_device_failure((last.summary, *last.lines))) is not None:
        advice = failure.advice
    return replace(verdict, cause=cause, culprits=tuple(sorted(alike)), details=tuple(details), advice=advice)


def _has_same_message(stopped: LastWords | None, last: LastWords) -> bool:
    """Whether ``stopped``, the last words of a program that poprun stopped, show the same error as ``last``."""
    if stopped is None or not _has_own_words(stopped):
        return False
    return without_numbers(stopped.summary) == without_numbers(last.summary)


def kind_of_failure(status: InstanceStatus, words: Mapping[int, LastWords]) -> tuple[int | None, str, str]:
    """Return exit code, problem and message of an instance's failure; for failures of one kind they are equal."""
    last = words.get(status.index, LastWords())
    return status.exit_code, status.problem, without_numbers(last.summary)


def _cause_of(status: InstanceStatus, last: LastWords, reason: str) -> Cause:
    text = _last_lines(last)
    code = status.exit_code or 0
    if status.problem and not status.cannot_run:
        return Cause.LOST
    if _LOADER_FAILED.search(text) or _has_lost_helper(last):
        return Cause.HELPER
    if _NO_SPACE.search(text):
        return Cause.FULL_DISK
    if _NO_MEMORY.search(last.summary) or reason.removeprefix("probably ").startswith("out of memory"):
        return Cause.OUT_OF_MEMORY
    if signal_of(code) is not None and not ((code > 0 or status.was_stopped) and last.place):
        return Cause.SIGNAL
    return Cause.EXCEPTION if last.place or _EXCEPTION.match(last.summary) else Cause.EXIT


def _has_lost_helper(last: LastWords) -> bool:
    """Whether a program's error shows that it lost a child process of its own, such as a DataLoader worker."""
    is_broken = last.summary.startswith(("ConnectionResetError", "EOFError", "ConnectionRefusedError"))
    return is_broken and any("multiprocessing/" in line or "DataLoader" in line for line in last.lines)


def _different_ends(
    verdict: Verdict,
    statuses: Sequence[InstanceStatus],
    words: Mapping[int, LastWords],
    evidence: Mapping[int, InstanceEvidence],
) -> Verdict:
    """Return the verdict of an end after different collectives: who called which, and the minority at fault."""
    instances_by_call = next(
        (by_call for it in words.values() if len(by_call := _instances_by_call(it.lines)) > 1), {}
    ) or _ranks_by_model(words)
    if instances_by_call:
        details = [f"{name_instances(who)}: {text}{verdict.at(who[0])}" for text, who in instances_by_call.items()]
        culprits = minority(list(instances_by_call.values()))
    else:
        if (queue := _differing_queue(evidence)) is not None:
            return blame_different(verdict, _with_aborted(queue, words))
        details = [
            f"instance {it.index}: {_last_call(evidence.get(it.index))}{verdict.at(it.index)}" for it in statuses
        ]
        alone = [index for index, it in words.items() if _DIFFERENT.search(_last_lines(it))]
        others = [it.index for it in statuses if it.index not in alone]
        # the error is about the model of rank 0
        has_other_model = len(alone) == 1 and alone != [0] and "same param" in _last_lines(words[alone[0]])
        culprits = minority([others, alone]) if has_other_model else _at_other_line(verdict, statuses)
    victims = tuple(it.index for it in statuses if it.has_failed and it.index not in culprits)
    return replace(
        verdict,
        cause=Cause.MISMATCH,
        culprits=culprits,
        victims=victims if culprits else (),
        details=tuple(details),
        advice=remedy_of_lone_call(instances_by_call) or SAME_CALLS,
    )


def _at_other_line(verdict: Verdict, statuses: Sequence[InstanceStatus]) -> tuple[int, ...]:
    """Return the few instances that ended at another line of code than the others; () if none, or if unknown."""
    parts: dict[str, list[int]] = {}
    for status in statuses:
        parts.setdefault(verdict.place_of(status.index), []).append(status.index)
    return () if "" in parts else minority(list(parts.values()))


def _ranks_by_model(words: Mapping[int, LastWords]) -> dict[str, list[int]]:
    """Return the ranks of each model size that DistributedDataParallel's errors report; {} if all are equal."""
    matches = (match for it in words.values() for match in _PARAMETERS.finditer(it.summary))
    numbers = {int(rank): number for match in matches for rank, number in (match.group(1, 2), match.group(3, 4))}
    parts: dict[str, list[int]] = {}
    for rank, number in sorted(numbers.items()):
        parts.setdefault(f"a model of {number} parameters", []).append(rank)
    return parts if len(parts) > 1 else {}


def _with_aborted(queue: Queue, words: Mapping[int, LastWords]) -> Queue:
    """Return ``queue``, the calls of one collective, with one more call: of an instance that gloo aborted, because
    it received too many bytes, before its call was recorded. This call is the smaller one.
    """
    aborted = [index for index, it in words.items() if _TOO_LONG in _last_lines(it) and index not in queue.calls]
    by_size = sorted(queue.calls.values(), key=lambda call: call.num_bytes)
    if len(aborted) != 1 or by_size[0].num_bytes == by_size[-1].num_bytes:
        return queue
    return replace(queue, calls={**queue.calls, aborted[0]: by_size[0]})


def _differing_queue(evidence: Mapping[int, InstanceEvidence]) -> Queue | None:
    """Return the calls of the first collective whose name or tensors differ between programs; None if none do."""
    for name in dict.fromkeys(group.name for known in evidence.values() for group in known.groups):
        groups = {index: group for index, known in evidence.items() if (group := known.group(name)) is not None}
        for number in sorted({call.number for group in groups.values() for call in group.calls}):
            calls = {index: call for index, group in groups.items() if (call := group.find(number)) is not None}
            queue = Queue(name=name, number=number, waiting=calls, calls=calls)
            if queue.has_different_calls:
                return queue
    return None


def _last_call(known: InstanceEvidence | None) -> str:
    """Return as text the last collective that an instance called, from its records or else its crash stack."""
    known = known or InstanceEvidence()
    calls = [call for group in known.groups for call in group.calls]
    if calls:
        return str(max(calls, key=lambda call: call.begin_ns))
    return collective_of(known.crash) or "its call is not known"


def _instances_by_call(lines: Iterable[str]) -> dict[str, list[int]]:
    """Return for each different call its instances, parsed from ``lines`` of popdist's error about the calls."""
    matches = [match for line in lines if (match := _LINE_OF_CALL.fullmatch(line))]
    return {match[2]: [int(number) for number in re.findall(r"\d+", match[1])] for match in matches}


def _without_culprit(
    verdict: Verdict,
    statuses: Sequence[InstanceStatus],
    failed: Sequence[InstanceStatus],
    words: Mapping[int, LastWords],
    evidence: Mapping[int, InstanceEvidence],
) -> Verdict:
    """Return who is at fault if each failed instance only lost another: who ended early, or made fewer calls."""
    first_seconds = failed[0].exited_at_seconds or 0.0 if failed else 0.0
    early = [
        it.index
        for it in statuses
        if it.exit_code == 0 and not it.was_stopped and (it.exited_at_seconds or first_seconds) <= first_seconds
    ]
    if early and failed:
        ends = f"{name_instances(early)} ended with 0 while {name_instances([it.index for it in failed])} went on"
        summaries = {without_numbers(words[it.index].summary) for it in failed if it.index in words}
        advice = remedy_of_lone_call(summaries) or UNEVEN
        return blame_ends(verdict, early, [it.index for it in failed], [ends], advice)
    by_name = (
        {index: group.num_called for index, it in evidence.items() if (group := it.group(name))}
        for name in EVERYBODY
    )
    counts = next(filter(None, by_name), {})
    most = max(counts.values(), default=0)
    free = [index for index, count in counts.items() if count < most and statuses[index].was_stopped]
    if free and len(counts) == len(statuses):
        line = (
            f"{name_instances(free)} had called fewer collectives than the others, which waited until they gave up"
        )
        places = tuple(
            f"instance {index} stood at {place}" for index in free if (place := verdict.place_of(index))
        )
        return replace(verdict, cause=Cause.ABSENT, culprits=tuple(free), details=(line, *places), advice=OWN_CODE)
    return replace(verdict, details=("each that failed had lost its connection to another one",) if failed else ())
