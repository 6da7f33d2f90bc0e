"""The verdict of a hang: for which instance the others wait, by their stacks and collectives. Pure.

A wrong name is the worst answer. If two instances do not fit together and no fact shows which instance is
wrong, the verdict names both instances, and neither instance is the culprit.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from popdist.errors import name_instances, remedy_of_lone_call
from popdist.ground.progress import AFTER_LEAVING, FINALIZE
from poprun.observe.account.evidence import Call, GroupRecord, Helper, InstanceEvidence, StackFrame
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.stacks import ReadLine, collective_of, own_frame
from poprun.observe.account.state import InstanceState, InstanceStatus
from poprun.observe.judge.hangs import Hang

EVERYBODY: Final = ("0:nccl", "0")
"""The names that torch's recorder gives the process group of all ranks: for calls of NCCL, and of gloo."""

_NANOSECONDS: Final = 1e9
SAME_CALLS: Final = "all must make the same calls, with the same sizes, in the same order"
OWN_CODE: Final = "look at this line: the others wait until it goes on"
LEFT: Final = (
    "it caught an exception that ended its step, and goes on: let all instances of a replica do so, or none"
)
UNEVEN: Final = (
    "give all the same number of batches, and end all in the same step, as by a decision that instance 0 sends by "
    "popdist.broadcast_object; DDP also has torch.distributed.algorithms.join.Join"
)


def find_verdict_of_hang(
    hang: Hang,
    statuses: Sequence[InstanceStatus],
    evidence: Mapping[int, InstanceEvidence],
    read_line: ReadLine,
) -> Verdict:
    """Return the verdict of a hang: for which instances the others wait, and why."""
    places = {index: place_text(frame) for index, known in evidence.items() if (frame := latest_own_frame(known))}
    waiting = {index: text for text, indices in hang.waiting.items() for index in indices}
    verdict = Verdict(victims=tuple(sorted(waiting)), places=places)
    if outside := _find_outside_of_calls(verdict, hang, evidence, read_line):
        return outside
    left = tuple(sorted(index for index, text in waiting.items() if text.startswith(AFTER_LEAVING)))
    if left and len(left) < len(statuses):
        others = tuple(index for index in verdict.victims if index not in left)
        return replace(verdict, cause=Cause.MISMATCH, culprits=left, victims=others, advice=LEFT)
    queues = _queues(waiting, statuses, evidence)
    for queue in queues:
        if queue.has_different_calls:
            return blame_different(verdict, queue)
    for queue in queues:
        if free := sorted(queue.behind - waiting.keys()):
            running = [it for it in free if statuses[it].state is InstanceState.RUNNING]
            return (
                _blame_absent(verdict, running, queue, evidence, read_line)
                if running
                else _blame_early(verdict, free, queue, hang)
            )
    if left := _left_to_finalize(hang, evidence, read_line):
        return _blame_early(verdict, left, None, hang)
    known = {index for queue in queues for index in queue.recorded}
    known |= {index for index, it in evidence.items() if collective_of(it.stacks)}  # waits without a report
    if absent := [it for it in hang.absent if it not in known]:
        return _blame_absent(verdict, absent, None, evidence, read_line)
    if early := hang.ended or (hang.waiting.get(FINALIZE, ()) if len(hang.waiting) > 1 else ()):
        return _blame_early(verdict, early, None, hang)
    return _blame_lone(verdict, queues, waiting, evidence) or _blame_order(verdict, queues)


def _find_outside_of_calls(
    verdict: Verdict, hang: Hang, evidence: Mapping[int, InstanceEvidence], read_line: ReadLine
) -> Verdict | None:
    """Return the verdict if instances wait for a file lock, or stand still but in no collective; None if not."""
    outside = {*hang.absent, *hang.standing}  # a helper of a waiting instance may wait for a lock by chance
    if any(known.awaited_locks for index, known in evidence.items() if index in outside):
        return _blame_lock(verdict, outside, evidence, read_line)
    return _blame_standing(verdict, hang.standing, evidence, read_line) if hang.standing else None


def _blame_lock(
    verdict: Verdict, outside: Collection[int], evidence: Mapping[int, InstanceEvidence], read_line: ReadLine
) -> Verdict:
    """Return the verdict that the instance which holds the file lock that others wait for is at fault."""
    waiting: dict[tuple[str, str], list[int]] = {}
    for index in sorted(evidence.keys() & outside):
        for lock in evidence[index].awaited_locks:
            waiting.setdefault(lock, []).append(index)
    (file, process), victims = next(iter(waiting.items()))
    holders = tuple(index for index, known in sorted(evidence.items()) if file in known.held_locks)
    wait = f"{name_instances(victims)} wait{'s' if len(victims) == 1 else ''} for the lock of a file:"
    verdict = replace(verdict, victims=tuple(victims))
    if not holders:
        return replace(verdict, details=(f"{wait} another program holds the lock, {process}",))
    frame = latest_own_frame(evidence[holders[0]])
    stands = f", and stands {_in_line(frame, read_line)}" if frame is not None else ""
    details = (f"{wait} {name_instances(holders)} holds the lock{stands}",)
    return replace(verdict, cause=Cause.ABSENT, culprits=holders, details=details)


def _blame_standing(
    verdict: Verdict, standing: Sequence[int], evidence: Mapping[int, InstanceEvidence], read_line: ReadLine
) -> Verdict:
    """Return the verdict on the instances ``standing`` still: where each is, and which wait for an ended child."""
    by_line: dict[str, list[int]] = {}
    details = []
    culprits = []
    for index in standing:
        known = evidence.get(index, InstanceEvidence())
        if (frame := latest_own_frame(known)) is not None:
            by_line.setdefault(_in_line(frame, read_line), []).append(index)
        if known.ended_children and any(_MULTIPROCESSING in frame.file for frame in known.stacks.main):
            culprits.append(index)
            details.append(f"instance {index} waits for its process {known.ended_children[0]}, which has ended")
    details += [f"{name_instances(who)}: {line}" for line, who in by_line.items()]
    cause = Cause.HELPER if culprits else Cause.UNKNOWN
    return replace(verdict, cause=cause, culprits=tuple(culprits), details=tuple(details))


_MULTIPROCESSING: Final = "/multiprocessing/"


def _left_to_finalize(
    hang: Hang, evidence: Mapping[int, InstanceEvidence], read_line: ReadLine
) -> tuple[int, ...]:
    """Return the instances that wait in MPI_Finalize while the other instances wait in a call; () if none do."""
    if set(hang.waiting) != {FINALIZE} or not hang.absent:
        return ()
    known = [evidence.get(index, InstanceEvidence()) for index in hang.absent]
    frames = {latest_own_frame(it) for it in known}
    are_at_one_line = len(known) > 1 and len(frames) == 1 and None not in frames
    lines = [read_line(frame.file, frame.line) if frame else "" for frame in frames]
    is_call = all(collective_of(it.stacks) for it in known) or all(map(_CALL_OF_MPI.search, lines))
    return hang.waiting[FINALIZE] if are_at_one_line or is_call else ()


_CALL_OF_MPI: Final = re.compile(r"\b(?:MPI|comm\w*)\.\w", re.IGNORECASE)


def _blame_lone(
    verdict: Verdict,
    queues: Sequence["Queue"],
    waiting: Mapping[int, str],
    evidence: Mapping[int, InstanceEvidence],
) -> Verdict | None:
    """Return the verdict that few instances are at fault, because they wait for a message, or search torch's
    store, while the others wait in a collective; None if this is not so.
    """
    culprits: tuple[int, ...] = ()
    details: tuple[str, ...] = ()
    for queue in queues:
        in_message = tuple(sorted(it for it in queue.behind if waiting.get(it, "").startswith(_MESSAGES)))
        if 0 < len(in_message) < len(queue.waiting):
            culprits = in_message
            details = (
                queue.describe(),
                f"{name_instances(culprits)} wait{'s' if len(culprits) == 1 else ''} for a message",
            )
    at_store = {
        index for index, known in evidence.items() if any(it.function == _STORE for it in known.stacks.main)
    }
    if not queues and at_store - {0} and evidence.keys() - at_store - {0}:
        # instance 0 has the store, and waits there for the other instances
        culprits = tuple(sorted(at_store - {0}))
        details = (
            f"{name_instances(culprits)} did not find torch's store: is there another MASTER_ADDR or MASTER_PORT?",
        )
    if not culprits:
        return None
    victims = tuple(index for index in verdict.victims if index not in culprits)
    return replace(verdict, cause=Cause.MISMATCH, culprits=culprits, victims=victims, details=details)


_MESSAGES: Final = ("recv", "irecv", "send", "isend", "batch_isend_irecv")
_STORE: Final = "_create_c10d_store"
_WITH_ROOT: Final = ("broadcast", "reduce(", "gather(", "scatter(")


def _blame_order(verdict: Verdict, queues: Sequence["Queue"]) -> Verdict:
    """Return the verdict of a hang in which every instance waits: the instances wait in different process groups,
    have passed tensors of different sizes, or wait for an unknown reason.
    """
    for queue in queues:
        if not queue.behind and len({call.sizes for call in queue.calls.values()}) > 1:
            return blame_different(verdict, queue)
    if any(queue.behind for queue in queues):
        rows = [f"  {queue.describe()}{verdict.at(min(queue.waiting))}" for queue in queues]
        details = ("they wait for each other in different groups:", *rows)
        return replace(verdict, cause=Cause.MISMATCH, details=details, advice=SAME_CALLS)
    has_root = any(str(call).startswith(_WITH_ROOT) for queue in queues for call in queue.waiting.values())
    advice = "all must give the same src or dst" if has_root else ""
    return replace(verdict, details=tuple(queue.describe() for queue in queues), advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One collective of a process group: who waits in it, with which calls, and who has not called it yet."""

    name: str
    number: int  # number of the collective in which the instances wait
    waiting: Mapping[int, Call]
    calls: Mapping[int, Call]  # the call of each member that has this number
    recorded: frozenset[int] = frozenset()  # members whose calls are known
    behind: frozenset[int] = frozenset()  # members that have not called the collective

    @property
    def has_different_calls(self) -> bool:
        """Whether members called different collectives where all must call the same."""
        return len({call.kind for call in self.calls.values()}) > 1

    @property
    def since_epoch_seconds(self) -> float:
        """The time at which the first instance began to wait, in seconds since 1970."""
        return min(call.begin_ns for call in self.waiting.values()) / _NANOSECONDS

    def describe(self) -> str:
        """Return, in words, who waits in which collective, and which members have not called it."""
        who, call = sorted(self.waiting), next(iter(self.waiting.values()))
        which = _of_group(self.name)
        text = (
            f"{name_instances(who)} wait{'s' if len(who) == 1 else ''} in collective {self.number}{which}: {call}"
        )
        if not self.behind:
            return text
        verb = "has" if len(self.behind) == 1 else "have"
        return f"{text}, which {name_instances(sorted(self.behind))} {verb} not called"


def _of_group(name: str) -> str:
    return "" if name in EVERYBODY else f" of group {name}"


def _queues(
    waiting: Mapping[int, str], statuses: Sequence[InstanceStatus], evidence: Mapping[int, InstanceEvidence]
) -> list[Queue]:
    """Return a :class:`Queue` for each process group in which instances wait, ordered by the first wait's time."""
    pending: dict[str, dict[int, GroupRecord]] = {}
    for index, known in evidence.items():
        group = _group_waited_in(known) if index in waiting else None
        if group is not None:
            pending.setdefault(group.name, {})[index] = group
    queues = [_queue(name, groups, statuses, evidence) for name, groups in pending.items()]
    return sorted(queues, key=lambda queue: queue.since_epoch_seconds)


def _group_waited_in(known: InstanceEvidence) -> GroupRecord | None:
    """Return the record of the process group whose open call began first; None if a program has no open call."""
    open_groups = [group for group in known.groups if group.pending is not None]
    return min(open_groups, key=lambda group: group.pending.begin_ns if group.pending else 0, default=None)


def _queue(
    name: str,
    groups: Mapping[int, GroupRecord],
    statuses: Sequence[InstanceStatus],
    evidence: Mapping[int, InstanceEvidence],
) -> Queue:
    calls = {index: group.pending for index, group in groups.items() if group.pending is not None}
    number = min(call.number for call in calls.values())
    records = {index: group for index, known in evidence.items() if (group := known.group(name)) is not None}
    named = next((group.ranks for group in groups.values() if group.ranks), ())
    everybody = range(len(statuses)) if name in EVERYBODY else ()
    members = frozenset((*records, *named, *everybody)) & frozenset(range(len(statuses)))
    ended = {index for index in members - records.keys() if statuses[index].exit_code is not None}
    called = {index: call for index, group in records.items() if (call := group.find(number)) is not None}
    behind = {index for index, group in records.items() if group.num_called < number}
    return Queue(
        name=name,
        number=number,
        waiting={index: call for index, call in calls.items() if call.number == number},
        recorded=frozenset(records),
        behind=frozenset(behind | ended),
        calls=called,
    )


def blame_different(verdict: Verdict, queue: Queue) -> Verdict:
    """Return the verdict that instances called different collectives; if they form two groups, the smaller group
    is at fault.
    """
    alike: dict[str, list[int]] = {}
    for index, call in sorted(queue.calls.items()):
        alike.setdefault(call.kind if queue.has_different_calls else str(call), []).append(index)
    kinds = sorted(alike.values(), key=lambda indices: -len(indices))
    culprits = minority(kinds)
    which = _of_group(queue.name)
    details = [f"as collective {queue.number}{which} they have called:"]
    details += [f"  {name_instances(who)}: {queue.calls[who[0]]}{verdict.at(who[0])}" for who in kinds]
    return replace(
        verdict,
        cause=Cause.MISMATCH,
        culprits=culprits,
        victims=tuple(index for index in verdict.victims if index not in culprits),
        details=tuple(details),
        since_epoch_seconds=queue.since_epoch_seconds,
        advice=SAME_CALLS,
    )


def minority(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the smaller one of two ``parts`` of the instances; () for equal parts, or more than two."""
    if len(parts) != 2 or len(parts[0]) == len(parts[1]):
        return ()
    smaller = min(parts, key=len)
    return tuple(sorted(smaller))


def _blame_absent(
    verdict: Verdict,
    absent: Sequence[int],
    queue: Queue | None,
    evidence: Mapping[int, InstanceEvidence],
    read_line: ReadLine,
) -> Verdict:
    """Return the verdict that the ``absent`` instances are at fault, because they run their own code, or wait for
    a stuck DataLoader worker, while other instances wait for them in a collective.
    """
    details = [] if queue is None else [queue.describe()]
    cause, places = Cause.ABSENT, dict(verdict.places)
    for index in absent:
        known = evidence.get(index, InstanceEvidence())
        helper = stuck_helper(known)
        frame = latest_own_frame(known)
        if helper is not None:
            cause, inside = Cause.HELPER, helper_frame(helper)
            stands = (
                "" if inside is None else f", process {helper.pid}, which stands {_in_line(inside, read_line)}"
            )
            details.append(f"instance {index} waits for its data loader's worker{stands or f': {helper.process}'}")
            frame = inside or frame
        elif frame is not None:
            details.append(f"instance {index} stands {_in_line(frame, read_line)}")
        elif known.stacks.processes:
            details.append(f"instance {index}: {known.stacks.processes[0]}")
        if frame is not None:
            places[index] = place_text(frame)
    return replace(
        verdict,
        cause=cause,
        culprits=tuple(absent),
        places=places,
        details=tuple(details),
        since_epoch_seconds=None if queue is None else queue.since_epoch_seconds,
        advice=OWN_CODE if places.keys() & set(absent) else "",
    )


def _blame_early(verdict: Verdict, ended: Sequence[int], queue: Queue | None, hang: Hang) -> Verdict:
    details = () if queue is None else (queue.describe(),)
    others = sorted({*verdict.victims, *hang.absent}.difference(ended))
    advice = remedy_of_lone_call(hang.waiting) or UNEVEN
    return blame_ends(verdict, ended, others, details, advice)


def blame_ends(
    verdict: Verdict, ended: Sequence[int], others: Sequence[int], details: Sequence[str], advice: str
) -> Verdict:
    """Return the verdict that the ``ended`` instances are at fault; ``others`` if more than half have ended."""
    verdict = replace(verdict, details=tuple(details), advice=advice)
    if 2 * len(ended) <= len(ended) + len(others):
        return replace(verdict, cause=Cause.EARLY_END, culprits=tuple(ended), victims=tuple(others))
    return replace(verdict, cause=Cause.MISMATCH, culprits=tuple(others), victims=())


def _in_line(frame: StackFrame, read_line: ReadLine) -> str:
    source = read_line(frame.file, frame.line).strip()
    return f"at {place_text(frame)}, in {frame.function}{f': {source}' if source else ''}"


def place_text(frame: StackFrame) -> str:
    """Return file and line of a call on a stack as ``file:line``."""
    return f"{frame.file}:{frame.line}"


def latest_own_frame(known: InstanceEvidence) -> StackFrame | None:
    """Return the latest call in the user's code on an instance's crash stack, or else its stack; None if none."""
    return own_frame(known.crash.main) or own_frame(known.stacks.main)


_PROCESS: Final = "/multiprocessing/process.py"
_LOADER: Final = "/torch/utils/data/dataloader.py"
_HELD_UP: Final = ("in an uninterruptible wait", "stopped by")


def stuck_helper(known: InstanceEvidence) -> Helper | None:
    """Return a DataLoader worker, in user code or held up, that the main thread waits for; None if none is."""
    if not any(frame.file.endswith(_LOADER) for frame in known.stacks.main):
        return None
    return next(
        (it for it in known.helpers if helper_frame(it) or any(state in it.process for state in _HELD_UP)), None
    )


def helper_frame(helper: Helper) -> StackFrame | None:
    """Return the latest call in the user's code on the stack of a child process; None if there is none."""
    main = helper.stacks.main
    starts = [number for number, frame in enumerate(main) if frame.file.endswith(_PROCESS)]
    return own_frame(main[starts[-1] + 1 :]) if starts else None
