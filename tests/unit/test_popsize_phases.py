"""Phases: which units are read together, how much memory that takes, and what a step waits for.

Holds popsize.phases.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsize.phases import Loop, PhaseMemory, PhasePlan, StoreSpeed, UnitCost, even_cuts, plan_phases, plan_with

SPEED = StoreSpeed(read_bytes_per_second=2.0, write_bytes_per_second=1.0)
UNIT = UnitCost(
    weight_bytes=8,
    updated_bytes=8,
    gradient_bytes=8,
    state_bytes=16,
    input_bytes=2,
    running_bytes=5,
    forward_seconds=10,
    backward_seconds=30,
    update_seconds=1,
)


@st.composite
def units(draw: st.DrawFn, most: int = 7) -> list[UnitCost]:
    """Units of any sizes, of which some are not trained, or compute in no time."""
    number = st.integers(0, 40)
    found = []
    for _ in range(draw(st.integers(1, most))):
        weights, trained = draw(st.integers(1, 40)), draw(st.booleans())
        found.append(
            UnitCost(
                weight_bytes=weights,
                updated_bytes=trained * weights,
                gradient_bytes=trained * weights,
                state_bytes=trained * draw(number),
                input_bytes=draw(number),
                running_bytes=draw(number),
                forward_seconds=draw(number),
                backward_seconds=draw(number),
                update_seconds=draw(number),
            )
        )
    return found


LOOPS = st.builds(Loop, num_micro_batches=st.integers(1, 7), updates_apart=st.booleans(), is_shared=st.booleans())


def step_seconds(model: Sequence[UnitCost], cuts: Sequence[int], loop: Loop) -> float:
    """The seconds of a step as the longest path: each visit of a phase, each read and each write is a node."""
    phases = [model[a:b] for a, b in pairwise((*cuts, len(model)))]
    forward, backward = [*range(len(phases))], [*reversed(range(len(phases)))]
    passes = [("forward", forward), ("backward", backward)] * loop.num_micro_batches
    passes += [("update", backward)] if loop.updates_apart else []
    slots: list[int] = [-1, -1] if loop.is_shared else [0, 1]
    order, reads, writes, computing = list[int](), list[float](), list[float](), list[float]()
    for number, (kind, places) in enumerate(passes):
        updates = number == len(passes) - 1
        for phase in places:
            gradients, state, weights, updated = (
                sum(float(getattr(unit, name)) for unit in phases[phase])
                for name in ("gradient_bytes", "state_bytes", "weight_bytes", "updated_bytes")
            )
            read = gradients * (kind != "forward" and number > 1) + state * updates
            if phase not in slots:
                slots.remove(next(it for it in slots if it != (order or [0])[-1]))
                slots.append(phase)
                read += weights
            order.append(phase)
            reads.append(read / SPEED.read_bytes_per_second)
            written = updated + state if updates else gradients * (kind == "backward")
            writes.append(written / SPEED.write_bytes_per_second)
            names = [f"{kind}_seconds", *(["update_seconds"] if updates and kind == "backward" else [])]
            computing.append(sum(float(getattr(unit, name)) for unit in phases[phase] for name in names))

    @cache
    def ended(kind: str, place: int) -> float:
        """When a node has ended: behind those that it needs, and behind the transfer before it."""
        if place < 0:
            return 0.0
        if kind == "compute":
            needs = [ended("compute", place - 1), *([ended("read", place)] if reads[place] else [])]
            return max(needs) + computing[place]
        if kind == "write":
            return max(ended("compute", place), ended("read", min(place + 1, len(order) - 1))) + writes[place]
        started = ended("compute", place - 2) if place > 1 else 0.0
        if reads[place] and place:  # no earlier than the visit before it starts
            started = max(started, ended("compute", place - 1) - computing[place - 1])
        return max(started, ended("write", place - 2), ended("read", place - 1)) + reads[place]

    last = len(order) - 1
    return max(ended("compute", last), max(ended("write", last - 1), ended("compute", last)) + writes[last])


def test_a_step_waits_for_transfers_that_take_longer_than_a_phase() -> None:
    """While one phase computes for 31 s, that before is written in 24 s and the next one is read in 12 s."""
    plan = plan_with([UNIT] * 4, range(4), SPEED, Loop())

    assert plan.cuts == (0, 1, 2, 3)
    assert (plan.memory.weights, plan.memory.state, plan.memory.sums) == (2 * 8, 2 * 16, 0)
    assert plan.memory.activations == 4 * 2 + 5 + 8
    assert (plan.step.computing, plan.step.reading, plan.step.writing) == (4 * 41, 2 * 5, 24)
    assert plan.step.read_bytes == 4 * 16 + (2 + 2) * 8  # state; weights but for two at each turn
    assert plan.step.written_bytes == 4 * 24


def test_partial_sums_are_written_and_read_between_micro_batches() -> None:
    """Each micro batch but the last one writes them, each but the first one reads them."""
    one, four = (plan_with([UNIT] * 4, range(4), SPEED, Loop(num_micro_batches=number)) for number in (1, 4))

    assert four.memory.total == one.memory.total + 2 * 8
    assert four.step.written_bytes == one.step.written_bytes + 3 * 4 * 8
    assert four.step.read_bytes == one.step.read_bytes + 3 * (4 * 8 + 4 * 8)


def test_updates_of_their_own_take_a_pass() -> None:
    """Which reads gradients and state, and all weights but for two phases; gradients are written before."""
    one, apart = (plan_with([UNIT] * 4, range(4), SPEED, Loop(updates_apart=is_so)) for is_so in (False, True))

    assert apart.step.computing == one.step.computing
    assert apart.step.read_bytes == one.step.read_bytes + 4 * 8 + 4 * 8
    assert apart.step.written_bytes == one.step.written_bytes + 4 * 8


@settings(max_examples=150)
@given(units(), LOOPS, st.data())
def test_the_walk_is_the_longest_path(model: list[UnitCost], loop: Loop, data: st.DataObject) -> None:
    """Whatever the units and the phases are."""
    cuts = sorted({0, *data.draw(st.lists(st.integers(0, len(model) - 1)))})
    few = replace(loop, num_micro_batches=min(4, loop.num_micro_batches))

    assert plan_with(model, cuts, SPEED, few).step.seconds == pytest.approx(step_seconds(model, cuts, few))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_the_largest_phase_is_as_small_as_it_can_be(sizes: list[int], data: st.DataObject) -> None:
    """Of all ways to cut, tried one by one; each unit is in one phase."""
    number = data.draw(st.integers(1, len(sizes)))
    cuts = even_cuts(tuple(sizes), number)

    def largest(places: Sequence[int]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise((*places, len(sizes))))

    assert cuts[0] == 0
    assert sorted(set(cuts)) == list(cuts)
    assert len(cuts) == number
    assert largest(cuts) == min(largest((0, *rest)) for rest in combinations(range(1, len(sizes)), number - 1))


@settings(max_examples=100)
@given(units(), LOOPS, st.integers(1, 900), st.integers(0, 300))
def test_more_memory_is_never_slower(model: list[UnitCost], loop: Loop, budget: int, more: int) -> None:
    """But for the hundredth that fewer phases may cost; what fits keeps to its budget."""
    found, larger = (plan_phases(model, size, SPEED, loop) for size in (budget, budget + more))

    if isinstance(found, PhaseMemory):
        assert found.total > budget
        enough = plan_phases(model, found.total, SPEED, loop)
        assert isinstance(enough, PhasePlan)
        assert enough.memory.total <= found.total
    else:
        assert found.memory.total <= budget
        assert isinstance(larger, PhasePlan)
        assert larger.step.seconds <= found.step.seconds * 1.0101


def test_faster_stores_of_more_micro_batches_take_no_longer() -> None:
    """What is not walked is what is walked: many micro batches take as much more as a few."""
    loops = [Loop(num_micro_batches=number) for number in (3, 4, 100)]
    plans = [plan_with([UNIT] * 5, (0, 2, 4), SPEED, loop).step for loop in loops]
    quick = StoreSpeed(read_bytes_per_second=1e9, write_bytes_per_second=1e9)

    assert plans[2].seconds == pytest.approx(plans[1].seconds + 96 * (plans[1].seconds - plans[0].seconds))
    fast = plan_with([UNIT] * 5, (0, 2, 4), quick, loops[2]).step
    assert fast.computing == plans[2].computing == 5 * (100 * 40 + 1)
    assert fast.reading + fast.writing < 1e-3


def test_what_a_person_reads() -> None:
    """Sizes and times with their units; where nothing fits, what would do."""
    gib = 2**30
    large = replace(UNIT, weight_bytes=gib, updated_bytes=gib, gradient_bytes=gib, state_bytes=2 * gib)
    speed = StoreSpeed(read_bytes_per_second=gib, write_bytes_per_second=gib)
    plan, none = (plan_phases([large] * 6, size, speed, Loop()) for size in (14 * gib, gib))

    assert isinstance(plan, PhasePlan)
    assert plan.sentence(gib / 2) == (
        "4 phases: 12.00 GiB for 2 at once and 1.50 GiB for the rest. A step is predicted to take 249 s: 246 s "
        "computing, 0 s waiting for reads, 3 s waiting for writes."
    )
    assert isinstance(none, PhaseMemory)
    assert none.total == pytest.approx(7 * gib)


def test_a_large_first_and_last_layer_share_a_slot() -> None:
    """An embedding and its head have even numbers, so that only one of the two slots is as large as they are."""
    large = replace(UNIT, weight_bytes=80)
    plan = plan_phases([large, *[UNIT] * 5, large], 160, SPEED, Loop())

    assert isinstance(plan, PhasePlan)
    assert len(plan.cuts) % 2
    assert plan.memory.total < 160 < 2 * large.slot_bytes(has_sums=False)
