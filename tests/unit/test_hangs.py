"""Who waits, who did not come, and since when nobody has got on: from values alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.layout import Parallelism
from popdist.ground.progress import Progress
from poprun.observe.account.state import InstanceState, InstanceStatus, Usage
from poprun.observe.judge.hangs import Hang, HangWatch, find_hang, find_idle
from poprun.observe.show.standstill import describe_hang
from tests.planning import CLUSTER_NODE, planned

NOW = 1000.0


def status(index: int, progress: Progress | None = None, *, idle_seconds: float = 10.0) -> InstanceStatus:
    """An instance that runs, was looked at just now, and got on so long ago."""
    return InstanceStatus(
        index=index,
        state=InstanceState.RUNNING,
        usage=Usage(at_seconds=NOW, memory_bytes=1, cpu_seconds=0.0, num_processes=1),
        progress=progress or Progress(has_joined=True, num_waits=3, collective="barrier()"),
        progressed_at_seconds=NOW - idle_seconds,
    )


def waiting(
    index: int,
    collective: str = "barrier()",
    member_runs: tuple[tuple[int, int], ...] = (),
    *,
    idle_seconds: float = 10.0,
) -> InstanceStatus:
    """An instance that waits, in a collective of all instances or of those in the runs."""
    progress = Progress(has_joined=True, collective=collective, member_runs=member_runs, waiting_since_seconds=1.0)
    return status(index, progress, idle_seconds=idle_seconds)


ENDED = replace(status(3), state=InstanceState.ENDED)
UNSEEN = replace(status(1), usage=None, progress=None, progressed_at_seconds=None)
PAIR = "barrier() among instances 0 and 1"
PAIR_RUNS = ((0, 1),)

TABLE = [
    ([status(0), status(1)], None),
    ([waiting(0), UNSEEN], None),
    ([waiting(0), status(1)], Hang(idle_seconds=10.0, waiting={"barrier()": (0,)}, absent=(1,))),
    (
        [waiting(0, idle_seconds=30), status(1, idle_seconds=2.5)],
        Hang(idle_seconds=2.5, waiting={"barrier()": (0,)}, absent=(1,)),
    ),
    ([waiting(0), waiting(1)], Hang(idle_seconds=10.0, waiting={"barrier()": (0, 1)})),
    (
        [waiting(0), waiting(1), status(2), ENDED],
        Hang(idle_seconds=10.0, waiting={"barrier()": (0, 1)}, absent=(2,), ended=(3,)),
    ),
    (
        [waiting(0, PAIR, PAIR_RUNS), status(1), status(2)],
        Hang(idle_seconds=10.0, waiting={PAIR: (0,)}, absent=(1,)),
    ),
    (
        [waiting(0, PAIR, PAIR_RUNS), waiting(1, "init()"), status(2)],
        Hang(idle_seconds=10.0, waiting={PAIR: (0,), "init()": (1,)}, absent=(2,)),
    ),
]


@pytest.mark.parametrize(("statuses", "hang"), TABLE)
def test_who_waits_and_who_does_not(statuses: list[InstanceStatus], hang: Hang | None) -> None:
    """One row, one hang; whoever is not waited for is not absent."""
    assert find_hang(statuses) == hang


@given(st.sets(st.integers(0, 40), min_size=1))
def test_only_members_are_waited_for(members: set[int]) -> None:
    """Those that the page names, of a collective among some instances."""
    runs = tuple((member, member) for member in sorted(members))
    statuses = [waiting(41, "barrier() among some", runs), *(status(index) for index in range(41))]

    hang = find_hang(sorted(statuses, key=lambda it: it.index))

    assert hang is not None
    assert set(hang.absent) == members


def test_one_hang_is_told_once_and_the_next_one_again() -> None:
    """It is another one when somebody has got on in between."""
    watch = HangWatch()
    watch.update([waiting(0), status(1)], now_seconds=1)
    watch.is_told = True
    watch.update([waiting(0, idle_seconds=12), status(1, idle_seconds=12)], now_seconds=2)
    assert (watch.is_told, watch.idle_seconds) == (True, 12)

    watch.update([waiting(0, idle_seconds=1), status(1, idle_seconds=13)], now_seconds=3)
    assert (watch.is_told, watch.idle_seconds) == (False, 1)

    watch.update([status(0), status(1)], now_seconds=4)
    assert watch.idle_seconds == 0


def test_a_watch_begins_anew_when_a_suspended_job_is_continued() -> None:
    """What hung before is no hang yet."""
    watch, statuses = HangWatch(), [waiting(0, idle_seconds=500), status(1, idle_seconds=500)]
    watch.update(statuses, now_seconds=NOW - 5)
    assert watch.idle_seconds == 500
    watch.is_told = True

    watch.begin_anew(NOW - 3)
    watch.update(statuses, now_seconds=NOW)

    assert (watch.is_told, watch.idle_seconds) == (False, 3)


def words(statuses: list[InstanceStatus]) -> list[str]:
    """The hang of these instances, in words."""
    hang = find_hang(statuses)
    assert hang is not None
    return describe_hang(hang, statuses)


def test_the_words_of_a_hang_in_shared_replicas() -> None:
    """Who waits and who did not arrive have their places in replicas, or what these have in common."""
    statuses = [waiting(0), waiting(1), status(2, Progress(has_joined=True, num_steps=3)), waiting(3)]
    hang = find_hang(statuses)
    assert hang is not None

    lines = describe_hang(hang, statuses, Parallelism(instances_per_replica=4, tensor=2, pipeline=2))

    assert "instances 0, 1 and 3 (replica 0) wait in" in lines[0]
    assert lines[1] == "instance 2 (replica 0, stage 1, shard 0) did not arrive: 3 steps done"


def test_the_words_of_a_hang() -> None:
    """Who waits, since when, who did not arrive and what is known of them."""
    statuses = [
        waiting(0),
        status(1, Progress(has_joined=True, step=17, num_steps=18, collective="all_gather()")),
        waiting(2),
        status(3, Progress(pid=5)),
        status(4, Progress(has_joined=True, num_steps=1)),
        status(5, Progress(has_joined=True)),
        status(6, Progress(has_joined=True, collective="init(backend=None, " + "x" * 80)),
    ]
    assert words(statuses) == [
        "no progress for 10 s: instances 0 and 2 wait in barrier()",
        "instance 1 did not arrive: reported step 17, last call all_gather()",
        "instance 3 did not arrive: popdist not called yet",
        "instance 4 did not arrive: 1 step done",
        "instance 5 did not arrive: popdist.init() not called yet",
        "instance 6 did not arrive: last call init(…)",
    ]


def test_several_that_did_not_arrive_are_told_of_at_once() -> None:
    """Where the same is known of them."""
    behind = Progress(has_joined=True, num_steps=2, collective="all_gather()")

    line = words([waiting(0), status(1, behind), status(2, behind)])[1]

    assert line == "instances 1 and 2 did not arrive: 2 steps done, last call all_gather()"


def test_the_words_when_all_have_arrived_or_some_have_ended() -> None:
    """It is nobody's fault that can be seen, or that of one who has gone."""
    together = [waiting(0), waiting(1)]
    left = [waiting(0), replace(status(1), state=InstanceState.EXITED)]

    assert words(together)[1:] == ["all have arrived: the network between them, or a GPU, may be stuck"]
    assert words(left)[1:] == ["instance 1 has ended"]
    apart = describe_hang(Hang(idle_seconds=5, waiting={"all_reduce()": (0,), "barrier()": (1,)}), together)
    assert apart[2].startswith(
        "each waits in one of these: all must make the same calls in the same order; or the"
    )


def test_the_words_when_a_program_is_in_mpi_finalize() -> None:
    """Those that use popdist are told of as ever; who finalizes while others wait keeps them waiting."""
    early = [
        waiting(0, "MPI_Finalize"),
        status(1, Progress(pid=5)),
        status(2, Progress(has_joined=True, num_steps=2)),
    ]
    apart = [waiting(0, "MPI_Finalize"), waiting(1, "init()")]

    assert words(early)[1:] == [
        "instance 1 did not arrive: MPI_Finalize not called yet",
        "instance 2 did not arrive: 2 steps done",
    ]
    assert words(apart)[1:] == ["instance 1 waits in init()", "instance 0 will take part in nothing more"]


def test_a_program_that_has_ended_waits_no_more() -> None:
    """Whatever its page says last."""
    last = waiting(0, "MPI_Finalize")

    assert (last.is_waiting, replace(last, state=InstanceState.EXITED).is_waiting) == (True, False)


def idle(index: int, seconds: float) -> InstanceStatus:
    """An instance that was seen computing so long ago, and says nothing of itself."""
    return replace(status(index, Progress()), busy_at_seconds=NOW - seconds)


REDUCE = "all_reduce() of torch.distributed"


def test_programs_that_say_nothing_are_suspected_when_one_computes_nothing() -> None:
    """How long the longest has done so is all that is known before they are asked; one unseen is waited for."""
    suspected = find_idle([idle(0, 7.0), idle(1, 2.0)], {}, 0.0)

    assert suspected == Hang(idle_seconds=7.0, waiting={}, is_told_by_programs=False)
    assert find_idle([idle(0, 7.0), replace(idle(1, 2.0), usage=None)], {}, 0.0) is None
    assert find_idle([idle(0, 7.0)], {}, NOW - 1.5) == replace(suspected, idle_seconds=1.5)


def test_who_stands_in_a_collective_of_torch_waits_for_the_others() -> None:
    """Also for one that computes: it did not come. How long is the time of those that wait."""
    hang = find_idle([idle(0, 7.0), idle(1, 0.0), idle(2, 9.0), ENDED], {0: REDUCE, 2: REDUCE}, 0.0)

    assert hang == Hang(
        idle_seconds=7.0, waiting={REDUCE: (0, 2)}, absent=(1,), ended=(3,), is_told_by_programs=False
    )
    assert describe_hang(hang, [idle(0, 7.0), idle(1, 0.0), idle(2, 9.0), ENDED]) == [
        f"no progress for 7 s: instances 0 and 2 wait in {REDUCE}",
        "instance 1 did not arrive",
        "instance 3 has ended",
    ]


def test_a_suspicion_is_settled_by_where_the_programs_stand() -> None:
    """Nobody in a collective: asked again later, as one computes. Somebody: that is a hang until it computes."""
    watch, statuses = HangWatch(), [idle(0, 7.0), idle(1, 1.0)]
    watch.update(statuses, NOW)
    seen = [(watch.is_suspected, watch.idle_seconds)]
    watch.note_calls({}, statuses, NOW - 2.0)
    watch.update(statuses, NOW + 1)
    seen.append((watch.is_suspected, watch.idle_seconds))
    watch.note_calls({0: REDUCE}, statuses, NOW)
    watch.update(statuses, NOW + 2)
    seen.append((watch.is_suspected, watch.idle_seconds))
    watch.update([replace(statuses[0], busy_at_seconds=NOW + 1), statuses[1]], NOW + 3)

    assert seen == [(True, 7.0), (True, 2.0), (False, 7.0)]
    assert watch.is_suspected


def test_all_stand_still_where_nobody_computes_and_nobody_waits() -> None:
    """As long as the instance has done so that computed last; a report of progress counts as computing."""
    watch, statuses = HangWatch(), [idle(0, 7.0), replace(idle(1, 8.0), progressed_at_seconds=NOW - 5.0)]
    watch.note_calls({}, statuses, NOW - 2.0)
    watch.update(statuses, NOW)

    assert watch.hang == Hang(idle_seconds=5.0, waiting={}, standing=(0, 1), is_told_by_programs=False)
    assert describe_hang(watch.hang, statuses) == [
        "no progress for 5 s: instances 0 and 1 stand still, and nobody waits in a collective"
    ]


def test_a_program_that_may_wait_for_its_user_is_not_suspected() -> None:
    """Such as one in a debugger; what it says of itself counts."""
    watch = HangWatch()
    watch.is_interactive = True
    watch.update([idle(0, 500.0)], NOW)
    assert watch.hang is None

    watch.update([waiting(0)], NOW + 1)
    assert watch.idle_seconds == 10.0


def test_a_program_that_computes_does_not_wait_where_it_stands() -> None:
    """It may be in the middle of a backward pass of its own."""
    watch, statuses = HangWatch(), [idle(0, 0.0), idle(1, 8.0)]
    watch.note_calls({0: "backward() of torch", 1: REDUCE}, statuses, NOW)
    watch.update(statuses, NOW)

    assert watch.hang is not None
    assert (watch.hang.waiting, watch.hang.absent) == ({REDUCE: (1,)}, (0,))


def test_a_hang_names_hosts_where_there_are_several() -> None:
    """Those that all named instances share, before their place in a shared replica."""
    plan = planned(CLUSTER_NODE, hosts=("a", "b"), num_instances=4)
    hang = Hang(idle_seconds=9.0, waiting={"all_reduce": (0, 2, 3)}, absent=(1,), is_told_by_programs=False)

    assert describe_hang(hang, [status(index) for index in range(4)], plan.places)[:2] == [
        "no progress for 9 s: instances 0, 2 and 3 wait in all_reduce",
        "instance 1 (host a) did not arrive",
    ]
    assert plan.places.describe([2, 3]) == "host b"
    assert planned(CLUSTER_NODE, num_instances=4).places.describe([2, 3]) == ""
