"""Who keeps the others waiting, from what real programs have told when they stood still (torch 2.13, gloo).

Holds poprun.observe.judge.verdict.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from popdist.ground.layout import Parallelism
from popdist.ground.progress import FINALIZE
from poprun.observe.account.evidence import Call, GroupRecord, Helper, InstanceEvidence, StackFrame, Stacks
from poprun.observe.account.judgements import Cause
from poprun.observe.account.state import InstanceState, InstanceStatus
from poprun.observe.judge.hangs import Hang
from poprun.observe.judge.verdict import find_verdict_of_hang
from poprun.observe.show.standstill import MAX_LINES, describe_verdict

PROGRAM, TORCH, PYTHON = "/home/me/train.py", "/v/lib/python3.11/site-packages/torch", "/usr/lib/python3.11"
Frames = tuple[tuple[str, int, str], ...]

BACKWARD: Frames = ((PROGRAM, 22, "<module>"), (f"{TORCH}/_tensor.py", 623, "backward"))
BARRIER: Frames = ((PROGRAM, 25, "<module>"), (f"{TORCH}/distributed/distributed_c10d.py", 5356, "barrier"))
SLEEPING: Frames = ((PROGRAM, 15, "<module>"),)
LOADING: Frames = (
    (PROGRAM, 17, "<module>"),
    (f"{TORCH}/utils/data/dataloader.py", 1300, "_try_get_data"),
    (f"{PYTHON}/multiprocessing/queues.py", 113, "get"),
)
WORKER: Frames = (*LOADING[:1], (f"{PYTHON}/multiprocessing/process.py", 108, "run"))
STUCK_WORKER: Frames = (
    *WORKER,
    (f"{TORCH}/utils/data/_utils/worker.py", 349, "_worker_loop"),
    (PROGRAM, 11, "read"),
)
IDLE_WORKER: Frames = (*WORKER, (f"{PYTHON}/selectors.py", 415, "select"))


def stacks(frames: Frames) -> Stacks:
    """A program whose main thread is in these calls."""
    return Stacks(threads=(tuple(StackFrame(*frame) for frame in frames),))


def group(*names: str, first: int = 9, name: str = "0", is_pending: bool = True, **more: Any) -> GroupRecord:
    """A group's calls, numbered from ``first``, of which the last one is not done."""
    calls = [
        Call(name=text, number=number, sizes=((212,),), types=("float32",), begin_ns=(100 + number) * 10**9)
        for number, text in enumerate(names, first)
    ]
    if is_pending:
        calls[-1] = replace(calls[-1], is_done=False)
    last = calls[-1].number
    return GroupRecord(name=name, num_called=last, num_done=last - is_pending, calls=tuple(calls), **more)


def told(frames: Frames, *groups: GroupRecord, helpers: tuple[Helper, ...] = ()) -> InstanceEvidence:
    """What an instance has told."""
    return InstanceEvidence(stacks=stacks(frames), groups=groups, helpers=helpers)


def read_line(_file: str, line: int) -> str:
    """The source of a line."""
    return f"line {line}"


def running(num: int, *ended: int) -> list[InstanceStatus]:
    """Instances of which some have ended with 0."""
    made = [InstanceStatus(index=index, state=InstanceState.RUNNING) for index in range(num)]
    return [replace(it, state=InstanceState.ENDED, exit_code=0) if it.index in ended else it for it in made]


def sized(name: str, size: int) -> GroupRecord:
    """One call that is not done, of a tensor with so many elements."""
    call = Call(name=name, number=6, sizes=((size,),), types=("float32",), is_done=False)
    return GroupRecord(name="0", num_called=6, num_done=5, calls=(call,))


_INIT: Frames = ((PROGRAM, 3, "<module>"), (f"{TORCH}/distributed/distributed_c10d.py", 1, "init_process_group"))
AT_STORE: Frames = (*_INIT, (f"{TORCH}/distributed/rendezvous.py", 199, "_create_c10d_store"))
IN_GLOO: Frames = (*_INIT, (f"{TORCH}/distributed/distributed_c10d.py", 2169, "_new_process_group_helper"))

REDUCES = group("all_reduce", "all_reduce", "all_reduce")  # in the third, number 11
BEHIND = group("all_reduce", "all_reduce", is_pending=False)  # has done two, up to number 10
AT_BARRIER = group("all_reduce", "all_reduce", "barrier")
IN_BACKWARD, AT_END = "backward() of torch", "barrier() of torch.distributed"
WORKERS = (
    Helper(pid=8, process="process 8: sleeping in poll", stacks=stacks(IDLE_WORKER)),
    Helper(pid=9, process="process 9: sleeping in clock_nanosleep", stacks=stacks(STUCK_WORKER)),
)
HELD = (Helper(pid=7, process="process 7: in an uninterruptible wait in read"),)
ELSEWHERE = group("all_gather", first=4, name="7")

TABLE: list[tuple[str, Mapping[str, tuple[int, ...]], dict[int, InstanceEvidence], Cause, tuple[int, ...]]] = [
    ("sleeps", {IN_BACKWARD: (0,)}, {0: told(BACKWARD, REDUCES), 1: told(SLEEPING, BEHIND)}, Cause.ABSENT, (1,)),
    (
        "a worker sleeps",
        {IN_BACKWARD: (0,)},
        {0: told(BACKWARD, REDUCES), 1: told(LOADING, BEHIND, helpers=WORKERS)},
        Cause.HELPER,
        (1,),
    ),
    (
        "a worker waits for its disk",
        {IN_BACKWARD: (0,)},
        {0: told(BACKWARD, REDUCES), 1: told(LOADING, BEHIND, helpers=HELD)},
        Cause.HELPER,
        (1,),
    ),
    (
        "skips a batch, one of two",
        {IN_BACKWARD: (0,), AT_END: (1,)},
        {0: told(BACKWARD, REDUCES), 1: told(BARRIER, AT_BARRIER)},
        Cause.MISMATCH,
        (),
    ),
    (
        "skips a batch, one of three",
        {IN_BACKWARD: (0, 2), AT_END: (1,)},
        {0: told(BACKWARD, REDUCES), 1: told(BARRIER, AT_BARRIER), 2: told(BACKWARD, REDUCES)},
        Cause.MISMATCH,
        (1,),
    ),
    (
        "sleeps, with a call under way",
        {IN_BACKWARD: (0,)},
        {0: told(BACKWARD, group(*["all_reduce"] * 4)), 1: told(SLEEPING, REDUCES)},
        Cause.ABSENT,
        (1,),
    ),
    (
        "all have arrived",
        {IN_BACKWARD: (0, 1)},
        {0: told(BACKWARD, REDUCES), 1: told(BACKWARD, REDUCES)},
        Cause.UNKNOWN,
        (),
    ),
    (
        "each waits for the other in another group",
        {IN_BACKWARD: (0,), AT_END: (1,)},
        {
            0: told(BACKWARD, REDUCES, group("all_gather", first=3, name="7", is_pending=False)),
            1: told(BARRIER, BEHIND, ELSEWHERE),
        },
        Cause.MISMATCH,
        (),
    ),
    (
        "one sleeps, and another waits for it in another group",
        {IN_BACKWARD: (0,), AT_END: (1,)},
        {
            0: told(BACKWARD, REDUCES),
            1: told(BARRIER, BEHIND, ELSEWHERE),
            2: told(SLEEPING, BEHIND, group("all_gather", first=3, name="7", is_pending=False)),
        },
        Cause.ABSENT,
        (2,),
    ),
    ("does not record, sleeps", {IN_BACKWARD: (0,)}, {0: told(BACKWARD), 1: told(SLEEPING)}, Cause.ABSENT, (1,)),
    (
        "is stopped by a signal, one of three",
        {IN_BACKWARD: (0, 1)},
        {
            0: told(BACKWARD, replace(REDUCES, ranks=(0, 1, 2))),
            1: told(BACKWARD, REDUCES),
            2: InstanceEvidence(stacks=Stacks(processes=("process 7: stopped by a signal",))),
        },
        Cause.ABSENT,
        (2,),
    ),
    (
        "uneven sizes are one kind, one of four",
        {AT_END: (0, 1, 2, 3)},
        {
            **{index: told(BARRIER, sized("all_to_all", index + 1)) for index in range(3)},
            3: told(BARRIER, sized("all_reduce", 4)),
        },
        Cause.MISMATCH,
        (3,),
    ),
    (
        "waits for a message",
        {IN_BACKWARD: (0, 1), "recv() of torch.distributed": (2,)},
        {0: told(BACKWARD, REDUCES), 1: told(BACKWARD, REDUCES), 2: told(SLEEPING, BEHIND)},
        Cause.MISMATCH,
        (2,),
    ),
    (
        "does not find the store",
        {"init_process_group() of torch.distributed": (0, 1, 2)},
        {0: told(AT_STORE), 1: told(IN_GLOO), 2: told(AT_STORE)},
        Cause.MISMATCH,
        (2,),
    ),
    (
        "leaves, and waits in MPI_Finalize",
        {FINALIZE: (2,)},
        {0: told(SLEEPING), 1: told(SLEEPING)},
        Cause.EARLY_END,
        (2,),
    ),
    (
        "holds the lock of a file",
        {IN_BACKWARD: (2,)},
        {
            **{index: replace(told(SLEEPING), awaited_locks=(("fd:00:7", "process 9"),)) for index in range(2)},
            2: replace(told(BACKWARD), held_locks=("fd:00:7",)),
        },
        Cause.ABSENT,
        (2,),
    ),
    ("does not answer", {IN_BACKWARD: (0,)}, {0: told(BACKWARD)}, Cause.ABSENT, (1,)),
]


@pytest.mark.parametrize(
    ("waiting", "evidence", "cause", "culprits"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_table(
    waiting: Mapping[str, tuple[int, ...]],
    evidence: dict[int, InstanceEvidence],
    cause: Cause,
    culprits: tuple[int, ...],
) -> None:
    """One row, one verdict; who waits is a victim."""
    waits = sorted(index for indices in waiting.values() for index in indices)
    size = max(2, len(evidence), *(index + 1 for index in waits))
    absent = tuple(index for index in range(size) if index not in waits)
    hang = Hang(idle_seconds=5, waiting=waiting, absent=absent)
    verdict = find_verdict_of_hang(hang, running(size), evidence, read_line)

    assert (verdict.cause, verdict.culprits) == (cause, culprits)
    assert {*waits, *culprits} <= {*verdict.victims, *verdict.culprits}
    assert not {*verdict.victims} & {*culprits}
    assert len(describe_verdict(verdict, Parallelism())) <= MAX_LINES


def test_one_that_has_ended_is_named() -> None:
    """Where the others wait in a collective that it has not called, where it is gone, or in MPI_Finalize."""
    evidence = {0: told(BACKWARD, REDUCES)}
    hang = Hang(idle_seconds=5, waiting={IN_BACKWARD: (0,)}, ended=(1,))
    left = Hang(idle_seconds=5, waiting={"barrier()": (0,), FINALIZE: (1,)})

    for found in (
        find_verdict_of_hang(hang, running(2, 1), evidence, read_line),
        find_verdict_of_hang(hang, running(2, 1), {}, read_line),
        find_verdict_of_hang(left, running(2), {}, read_line),
    ):
        assert (found.cause, found.culprits, found.victims) == (Cause.EARLY_END, (1,), (0,))
    assert "join.Join" in find_verdict_of_hang(hang, running(2, 1), {}, read_line).advice
    assert "call barrier() on all instances" in find_verdict_of_hang(left, running(2), {}, read_line).advice


def test_a_lock_for_which_a_helper_waits_by_chance_says_nothing() -> None:
    """The instance itself waits in a collective, and another one sleeps."""
    waits = replace(told(BACKWARD, REDUCES), awaited_locks=(("fd:00:7", "process 9"),))
    hang = Hang(idle_seconds=5, waiting={IN_BACKWARD: (0,)}, absent=(1,))

    found = find_verdict_of_hang(hang, running(2), {0: waits, 1: told(SLEEPING, BEHIND)}, read_line)

    assert (found.cause, found.culprits) == (Cause.ABSENT, (1,))
    assert "lock" not in " ".join(found.details)


def test_where_most_have_ended_the_others_are_the_odd_ones() -> None:
    """Two of three have ended, and the third waits for them."""
    hang = Hang(idle_seconds=5, waiting={IN_BACKWARD: (2,)}, ended=(0, 1))

    found = find_verdict_of_hang(hang, running(3, 0, 1), {2: told(BACKWARD)}, read_line)

    assert (found.cause, found.culprits) == (Cause.MISMATCH, (2,))


def test_where_all_stand_still_their_lines_are_shown() -> None:
    """Nobody is blamed, but an instance whose child has ended."""
    hang = Hang(idle_seconds=5, waiting={}, standing=(0, 1, 2))
    alone = replace(told(LOADING), ended_children=(9,))
    evidence = {0: told(SLEEPING), 1: told(SLEEPING), 2: alone}

    found = find_verdict_of_hang(hang, running(3), evidence, read_line)
    nobody = find_verdict_of_hang(hang, running(3), {**evidence, 2: told(SLEEPING)}, read_line)

    assert (found.cause, found.culprits) == (Cause.HELPER, (2,))
    assert found.details == (
        "instance 2 waits for its process 9, which has ended",
        f"instances 0 and 1: at {PROGRAM}:15, in <module>: line 15",
        f"instance 2: at {PROGRAM}:17, in <module>: line 17",
    )
    assert (nobody.cause, nobody.culprits) == (Cause.UNKNOWN, ())
    assert nobody.details == (f"instances 0 to 2: at {PROGRAM}:15, in <module>: line 15",)


def test_who_holds_a_lock_is_said() -> None:
    """Another program, or an instance, and where that stands."""
    waits = replace(told(SLEEPING), awaited_locks=(("fd:00:7", "process 9: sleeping"),))
    hang = Hang(idle_seconds=5, waiting={}, standing=(0, 1))

    at_backward = f"at {PROGRAM}:22, in <module>: line 22"
    other = find_verdict_of_hang(hang, running(2), {0: waits, 1: waits}, read_line)
    own = find_verdict_of_hang(
        hang, running(2), {0: waits, 1: replace(told(BACKWARD), held_locks=("fd:00:7",))}, read_line
    )

    assert (other.culprits, other.details) == (
        (),
        ("instances 0 and 1 wait for the lock of a file: another program holds the lock, process 9: sleeping",),
    )
    assert (own.culprits, own.details) == (
        (1,),
        (f"instance 0 waits for the lock of a file: instance 1 holds the lock, and stands {at_backward}",),
    )


def test_a_verdict_is_told_with_calls_places_and_lines() -> None:
    """Of one that sleeps, of a loader's worker, and of calls that differ."""

    def told_of(row: int, **more: object) -> list[str]:
        _, waiting, evidence, *_ = TABLE[row]
        hang = Hang(idle_seconds=5, waiting=waiting, absent=(1,))
        verdict = find_verdict_of_hang(hang, running(len(evidence)), evidence, read_line)
        return describe_verdict(replace(verdict, **more), Parallelism())  # type: ignore[arg-type]

    assert told_of(0) == [
        "instance 0 waits in collective 11: all_reduce(float32[212]), which instance 1 has not called",
        f"instance 1 stands at {PROGRAM}:15, in <module>: line 15",
    ]
    assert told_of(1)[1:] == [
        f"instance 1 waits for its data loader's worker, process 9, which stands at {PROGRAM}:11, in read: line 11"
    ]
    assert (
        told_of(2)[1]
        == "instance 1 waits for its data loader's worker: process 7: in an uninterruptible wait in read"
    )
    assert told_of(3)[:4] == [
        "these differ, and nothing shows which of them is wrong",
        "as collective 11 they have called:",
        f"  instance 0: all_reduce(float32[212]), at {PROGRAM}:22",
        f"  instance 1: barrier(float32[212]), at {PROGRAM}:25",
    ]
    assert told_of(4)[0] == "instance 1 differs from the others"
    assert told_of(3, details=("x",) * 20)[-2] == "… 14 more …"


def test_sizes_that_may_differ_are_blamed_last() -> None:
    """Of a scatter, for instance, only where all have arrived."""
    scatter, other = group("scatter"), group("scatter")
    other = replace(other, calls=(replace(other.calls[0], sizes=((5,),)),))
    hang = Hang(idle_seconds=5, waiting={"scatter()": (0, 1)})

    evidence = {0: told(BACKWARD, scatter), 1: told(BACKWARD, other)}
    both = find_verdict_of_hang(hang, running(2), evidence, read_line)

    assert (both.cause, both.culprits) == (Cause.MISMATCH, ())
    assert both.since_epoch_seconds == 109.0
