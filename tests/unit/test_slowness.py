"""Who is slow, in which phase: on timelines of jobs that are made up.

Holds poprun.observe.account.arrivals and poprun.observe.judge.watch.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from popdist.ground.progress import PhaseCounters
from popdist.startup.phase_sampler import LONG_SECONDS, NUM_ENDS, PHASES
from poprun.observe.account.arrivals import GroupMoments, Look, Window, find_arrivals, measure_window
from poprun.observe.account.judgements import Slowness
from poprun.observe.account.state import MachineTotals
from poprun.observe.account.time_shares import split_time
from poprun.observe.judge.slowness import NUM_WINDOWS, find_slow_link
from poprun.observe.judge.watch import PERIOD_SECONDS, PerformanceWatch

USUAL = {"data": 0.002, "forward": 0.010, "backward": 0.020, "optimizer": 0.003, "outside": 0.001}
NUM_BUCKETS = 3
RING = 64


@dataclass
class MadeUpJob:
    """A job of DistributedDataParallel: each step's phases, and buckets in the backward pass that all wait for."""

    num_instances: int
    noise: float = 0.1  # of each phase
    now: float = 1000.0
    num_steps: int = 0
    slow: dict[int, dict[str, float]] = field(default_factory=dict)  # seconds a step, by instance and phase
    seconds: list[dict[str, float]] = field(default_factory=list)
    calls: list[dict[int, float]] = field(default_factory=list)
    long_forward_seconds: list[float] = field(default_factory=list)
    idle_seconds: list[float] = field(default_factory=list)  # of the backward pass
    ends: list[float] = field(default_factory=list)
    message_seconds: float = 0.0
    machine: dict[int, MachineTotals] = field(default_factory=dict)
    randomness: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 - no secrets

    def __post_init__(self) -> None:
        """Nothing has happened yet."""
        self.seconds = [dict.fromkeys(PHASES, 0.0) for _ in range(self.num_instances)]
        self.long_forward_seconds = [0.0] * self.num_instances
        self.idle_seconds = [0.0] * self.num_instances
        self.calls = [{} for _ in range(self.num_instances)]

    def run_step(self, alone: Mapping[int, dict[str, float]] | None = None) -> None:
        """Do a step in all instances, with more time in some phases of those that are slow, or busy alone."""
        ends = []
        for index in range(self.num_instances):
            extra = {**self.slow.get(index, {}), **(alone or {}).get(index, {})}
            extra_forward = extra.get("forward", 0.0)
            times = {
                phase: self.randomness.uniform(1 - self.noise, 1 + self.noise) * seconds + extra.pop(phase, 0.0)
                for phase, seconds in USUAL.items()
            } | extra
            before = sum(seconds for phase, seconds in times.items() if phase != "backward")
            for bucket in range(NUM_BUCKETS):
                at = self.now + before + times["backward"] * (bucket + 1) / NUM_BUCKETS
                self.calls[index][self.num_steps * NUM_BUCKETS + bucket] = at
            self.long_forward_seconds[index] += extra_forward if extra_forward >= LONG_SECONDS else 0.0
            ends.append(self.now + sum(times.values()))
            for phase, seconds in times.items():
                self.seconds[index][phase] += seconds
        for index, end in enumerate(ends):
            self.seconds[index]["backward"] += max(ends) - end
            self.idle_seconds[index] += max(ends) - end
        self.num_steps += 1
        self.now = max(ends)
        self.ends.append(self.now)

    def look(self, index: int, clock_ahead: float = 0.0) -> Look:
        """What an instance tells now."""
        last = dict(list(self.calls[index].items())[-RING:])
        counters = PhaseCounters(
            seconds=dict(self.seconds[index]),
            idle_backward_seconds=self.idle_seconds[index],
            disk_seconds=0.0,
            worker_seconds=0.0,
            message_seconds=self.message_seconds,
            long_forward_seconds=self.long_forward_seconds[index],
            gc_seconds=0.0,
            began_at_seconds=1.0,
            num_optimizer_steps=self.num_steps,
            num_samples=0,
        )
        moments = {number: at + clock_ahead for number, at in last.items()}
        group = GroupMoments(ranks=tuple(range(self.num_instances)), by_number=moments)
        return Look(
            at_seconds=self.now,
            groups={"0": group},
            step_ends=[at + clock_ahead for at in self.ends[-NUM_ENDS:]],
            counters=counters,
            machine=self.machine.get(index, MachineTotals()),
            places={"forward": "train.py:7"},
        )


def run_job(job: MadeUpJob, watch: PerformanceWatch, num_windows: int) -> list[str]:
    """Run so many windows; the lines that were said."""
    said = []
    for _ in range(num_windows):
        end = job.now + PERIOD_SECONDS
        while job.now < end:
            job.run_step()
        said += watch.add_looks({index: job.look(index) for index in range(job.num_instances)})
    return said


@settings(max_examples=60)
@given(
    st.integers(2, 8),
    st.sampled_from(["data", "forward", "backward", "optimizer", "outside"]),
    st.floats(0.02, 0.5),
    st.data(),
)
def test_the_slow_one_is_named_with_its_phase(
    num_instances: int, phase: str, delay: float, data: st.DataObject
) -> None:
    """Once; and it is over when it is over."""
    slow = data.draw(st.integers(0, num_instances - 1))
    job, watch = MadeUpJob(num_instances, slow={slow: {phase: delay}}), PerformanceWatch(1000.0)
    said = run_job(job, watch, NUM_WINDOWS + 4)
    (found,) = watch.slowdowns

    assert (found.instance, found.phase) == (slow, phase)
    assert found.delay_seconds == pytest.approx(delay, rel=0.3)
    assert (len(said), found.until_seconds) == (1, None)
    assert said[0].startswith(f"instance {slow} is slow in {phase} since step ")
    assert said[0].endswith("at train.py:7") == (phase == "forward")
    assert watch.waiting_seconds[slow] < 0.2 * max(watch.waiting_seconds.values())
    job.slow.clear()
    assert run_job(job, watch, NUM_WINDOWS) == [f"instance {slow} is as fast as the others again"]
    assert watch.slowdowns[0].until_seconds is not None
    assert len(watch.summary()) == 1


@pytest.mark.parametrize("num_instances", [2, 4])
def test_who_is_late_now_and_then_is_named(num_instances: int) -> None:
    """And is as fast as the others again, once it is; a slowness that is over tells nothing of later steps."""
    job, watch = MadeUpJob(num_instances), PerformanceWatch(1000.0)
    said = []
    for number in range(1800):
        job.run_step({1: {"data": 0.6}} if number % 10 == 0 and number < 1000 else None)
        if number % 20 == 0:  # of which all calls are recorded
            said += watch.add_looks({index: job.look(index) for index in range(num_instances)})

    slow, over = said
    assert slow.startswith("instance 1 is slow in data since step ")
    assert slow.endswith(": late in one step of 10")
    assert over == "instance 1 is as fast as the others again"


def test_who_was_slow_for_a_while_is_not_late_now_and_then() -> None:
    """As a program is that compiles on one instance first."""
    job, watch = MadeUpJob(2), PerformanceWatch(1000.0)
    said = run_job(job, watch, 4)
    job.slow[1] = {"forward": 0.5}
    said += run_job(job, watch, 2)
    job.slow.clear()
    said += run_job(job, watch, 12)

    assert said == []


@example(2, 0.703125, 952)
@settings(max_examples=40)
@given(st.integers(2, 8), st.floats(0.0, 0.9), st.integers(0, 2**32))
def test_a_balanced_job_is_silent(num_instances: int, noise: float, seed: int) -> None:
    """However uneven its single steps are."""
    job = MadeUpJob(num_instances, noise, randomness=random.Random(seed))  # noqa: S311 - as above
    watch = PerformanceWatch(1000.0)

    assert run_job(job, watch, 12) == []
    assert (watch.slowdowns, watch.summary()) == ([], [])


@pytest.mark.parametrize(("phase", "named"), [("checkpoint", "checkpoint"), ("forward", "long forward pass")])
def test_who_saves_or_validates_alone_is_no_culprit(phase: str, named: str) -> None:
    """It is said at the end."""
    job, watch = MadeUpJob(3), PerformanceWatch(1000.0)
    said = []
    for _ in range(6):
        said += run_job(job, watch, 1)
        job.run_step({0: {phase: 2.5}})

    assert said == []
    assert watch.slowdowns == []
    assert watch.summary() == [f"instance 0 alone: {named}, 4 times, 10 s in all, while the others waited"]


def test_what_the_machine_shows_is_the_reason() -> None:
    """The strongest one."""
    job, watch = MadeUpJob(2, slow={1: {"forward": 0.05}}), PerformanceWatch(1000.0)
    for number in range(NUM_WINDOWS + 2):
        job.machine[1] = MachineTotals(throttled_seconds=2.0 * number, run_delay_seconds=2.5 * number)
        run_job(job, watch, 1)

    assert watch.slowdowns[0].reasons == (
        "its control group was throttled for 8.0 of 16 s",
        "at train.py:7",
    )


def test_nobody_is_named_where_instances_exchange_messages() -> None:
    """As the stages of a pipeline do, which are late when others are."""
    job, watch = MadeUpJob(2, slow={1: {"forward": 0.1}}), PerformanceWatch(1000.0)
    for number in range(NUM_WINDOWS + 2):
        job.message_seconds = 0.1 * number
        assert run_job(job, watch, 1) == []


def test_who_wants_a_core_like_all_others_is_not_named_for_it() -> None:
    """On too few cores somebody is always last; one that alone wants a core is named."""
    for others, num_named in ((1.5, 0), (0.1, 1)):
        job, watch = MadeUpJob(2, slow={1: {"forward": 0.01}}), PerformanceWatch(1000.0)
        for number in range(NUM_WINDOWS + 2):
            job.machine[0] = MachineTotals(run_delay_seconds=others * number)
            job.machine[1] = MachineTotals(run_delay_seconds=2.4 * number)
            run_job(job, watch, 1)

        assert len(watch.slowdowns) == num_named
        assert all("it wanted a core and had none" in it.reasons[0] for it in watch.slowdowns)


def test_only_collectives_that_all_members_have_called_count() -> None:
    """A group is the instances that torch names, or those that have called it."""
    group = GroupMoments(ranks=(0, 1), by_number={1: 5.0, 2: 6.0})
    look = replace(MadeUpJob(1).look(0), groups={"a": group, "b": replace(group, ranks=(0, 2))})
    other = replace(look, groups={"a": replace(group, by_number={2: 6.5, 3: 7.0})})

    assert find_arrivals({0: look, 1: other}, 0.0) == [{0: 6.0, 1: 6.5}]
    assert find_arrivals({0: look, 1: other}, 6.5) == []
    assert measure_window({0: look, 1: other}, {0: look, 1: other}, 0.0, 0.0) is None


@given(
    st.lists(st.floats(0.0, 1e4), min_size=len(PHASES), max_size=len(PHASES)),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
)
def test_the_parts_of_the_time_add_up(seconds: list[float], idle: float, unseen: float, waiting: float) -> None:
    """Whatever was measured; none is negative."""
    counters = replace(
        MadeUpJob(1).look(0).counters,
        seconds=dict(zip(PHASES, seconds, strict=True)),
        idle_backward_seconds=idle,
    )
    elapsed = sum(seconds) + unseen
    parts = split_time(elapsed, counters, waiting)

    assert sum(parts.values()) == pytest.approx(elapsed, abs=1e-6)
    assert min(parts.values()) >= -1e-9
    assert parts.keys() == {*PHASES, "waiting"}


def test_a_slow_link_is_named_where_its_host_can_be_told() -> None:
    """By the way of a message to each host and back, if communication takes much of a step."""
    job, watch = MadeUpJob(3), PerformanceWatch(1000.0)
    run_job(job, watch, NUM_WINDOWS + 2)
    busy = [
        replace(
            it,
            phases={index: {**it.phases[index], "communication": 0.1} for index in it.phases},
            step_seconds=0.137,
        )
        for it in watch.windows
    ]

    def who(
        trips: dict[str, float], windows: Sequence[Window] = busy, own_host: str | None = "n1"
    ) -> tuple[str, ...] | None:
        found = find_slow_link(windows, trips, own_host)
        return None if found is None else found.hosts

    assert who({"n2": 0.0003, "n3": 0.02}) == ("n3",)
    assert who({"n2": 0.021, "n3": 0.02}) == ("n1",)
    assert who({"n2": 0.021}) == ("n1", "n2")
    assert who({"n2": 0.0003, "n3": 0.0003}) is None
    assert who({}) is None
    assert who({"n2": 0.021}, watch.windows) is None
    assert who({"n1": 0.011, "n2": 0.010, "n3": 0.011}, own_host=None) is None
    assert who({"n1": 0.011, "n2": 0.010, "n3": 0.031}, own_host=None) == ("n3",)
    assert watch.note_links({"n1": 0.021}, None) == watch.note_links({"n2": 0.021}, "n1") == []
    found = find_slow_link(busy, {"n2": 0.0003, "n3": 0.02}, "n1")
    assert found is not None
    assert found.text.startswith("the link of host n3 is slow since step ")
    assert found.text.endswith("%): a message from n1 to n3 and back takes 20 ms")
    assert replace(found, hosts=("n1", "n2")).text.startswith("the network is slow since ")


def test_who_is_at_the_end_of_a_slow_link_is_not_named_for_it() -> None:
    """It hears of a collective later than the others; what it loses beyond that is its own."""
    for seconds, num_named in ((0.015, 0), (0.05, 1)):
        job, watch = MadeUpJob(3, slow={2: {"outside": seconds}}), PerformanceWatch(1000.0)
        watch.note_links({"n2": 0.0003, "n3": 0.02}, "n1")
        run_job(job, watch, NUM_WINDOWS + 2)

        assert len(watch.slowdowns) == num_named


@pytest.mark.parametrize(("works_longer", "link"), [(True, None), (False, ())])
def test_who_hears_late_and_works_no_longer_is_not_slow(
    works_longer: bool,  # noqa: FBT001 - a parameter of the test
    link: tuple[str, ...] | None,
) -> None:
    """Over a narrow link a collective ends later, and so the next one is called later: the network is named."""
    job, watch = MadeUpJob(3), PerformanceWatch(1000.0)
    for _ in range(NUM_WINDOWS + 2):
        for _ in range(64):
            job.run_step(alone={1: {"backward": 0.03}})
            for index in range(3):
                job.seconds[index]["communication"] += 0.05
                if index == 1 and not works_longer:
                    job.idle_seconds[index] += 0.03
        watch.note_links({"n2": 0.0003, "n3": 0.0003}, "n1")
        watch.add_looks({index: job.look(index) for index in range(3)})
    watch.note_links({"n2": 0.0003, "n3": 0.0003}, "n1")

    assert [it.instance for it in watch.slowdowns] == ([1] if works_longer else [])
    assert (None if watch.slow_link is None else watch.slow_link.hosts) == link


def test_a_slowness_in_one_line() -> None:
    """It begins with who is slow."""
    slowness = Slowness(
        instance=2,
        phase="data",
        delay_seconds=0.048,
        share=0.39,
        since_seconds=12.3,
        since_step=120,
        reasons=("its loader",),
    )

    assert slowness.text == "instance 2 is slow in data since step 120: +48 ms a step (39%): its loader"
    assert replace(slowness, hosts=("n2",)).text.startswith("instance 2 (host n2) is slow in data")
    assert "since 12 s until 40 s:" in replace(slowness, since_step=0, until_seconds=40.0).text
