"""Phases: the runs of layers that are in memory one after another, while the rest of a model waits in a store.

Two slots of memory hold a phase each. While one computes, what the phase before changed is written from the other,
and the next phase is read into it. A slot keeps its phase until another one is read, so that two phases stay in
memory where the forward pass turns into the backward pass, and where that turns into the next forward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Final

_GIB: Final = 2**30
_HALVINGS: Final = 64
_WALKED: Final = 4
"""Micro batches whose schedule is walked: those between the first two and the last one are alike."""

_EQUALLY_FAST: Final = 1.01

_FINE: Final = 16
"""Up to so many phases each number is tried; above it numbers that grow by an eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What a unit, such as a layer, takes on one instance: the least that is read as a whole."""

    weight_bytes: float  # its weights, trained or not
    updated_bytes: float  # of these, what this instance updates and writes
    gradient_bytes: float  # gradients of its trained weights
    state_bytes: float  # the optimizer's state that this instance reads and writes
    input_bytes: float  # its inputs, which are kept from its forward pass to its backward pass
    running_bytes: float  # what it needs while it runs: what its layers keep for their backward pass
    forward_seconds: float  # its forward pass of a micro batch
    backward_seconds: float  # its backward pass of a micro batch, with the forward pass that is computed again
    update_seconds: float  # its update

    def slot_bytes(self, num_micro_batches: int) -> float:
        """Bytes of a slot that holds it; with several micro batches it has a partial sum of gradients, too."""
        return self.weight_bytes + self.state_bytes + (num_micro_batches > 1) * self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """How fast the store is for one instance, while the others of its host read and write, too."""

    read_bytes_per_second: float
    write_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """The most bytes that a step needs, by kind."""

    slots: float  # two times the largest phase: weights, optimizer state, partial sums of gradients
    activations: float  # the inputs of units, and the unit that runs, with its gradients

    @property
    def total(self) -> float:
        """All of it."""
        return self.slots + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStep:
    """What a step takes: seconds by what they are spent on, and bytes."""

    computing: float  # seconds of passes and updates
    reading: float  # seconds in which it waits for what is read, as nothing is computed meanwhile
    writing: float  # seconds in which it waits for what is written, likewise
    read_bytes: float  # from the store
    written_bytes: float  # to the store

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.computing + self.reading + self.writing

    def grown(self, shorter: "PhaseStep", times: int) -> "PhaseStep":
        """With what it takes more than ``shorter``, so many times more."""
        values = {f.name: (getattr(self, f.name), getattr(shorter, f.name)) for f in fields(self)}
        return PhaseStep(**{name: value + times * (value - less) for name, (value, less) in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Which units are read together, and what a step takes then."""

    cuts: tuple[int, ...]  # the first unit of each phase
    memory: PhaseMemory
    step: PhaseStep

    @property
    def sentence(self) -> str:
        """What a person reads when a program starts."""
        number, step = len(self.cuts), self.step
        return (
            f"{number} phase{'s' if number > 1 else ''} of up to {_shown(self.memory.slots / 2)}, and "
            f"{_shown(self.memory.activations)} of activations: a step is predicted to take "
            f"{step.seconds:.3g} s ({step.computing:.3g} s computing, {step.reading:.3g} s waiting for reads, "
            f"{step.writing:.3g} s waiting for writes)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """No phases fit."""

    budget_bytes: float  # what there is
    slots_bytes: float  # two slots with the largest unit
    activation_bytes: float  # activations at the fullest moment
    largest_unit: int  # the unit that takes most of a slot
    fullest_unit: int  # the unit that runs at the fullest moment

    @property
    def needed_bytes(self) -> float:
        """The least budget that would do."""
        return self.slots_bytes + self.activation_bytes

    def sentence(self, names: Sequence[str]) -> str:
        """What lacks, and what would do; ``names`` are those of the units."""
        return (
            f"phases of one layer each need {_shown(self.needed_bytes)} and have {_shown(self.budget_bytes)}: "
            f"{_shown(self.slots_bytes)} for two layers as large as {names[self.largest_unit]}, and "
            f"{_shown(self.activation_bytes)} for activations while {names[self.fullest_unit]} runs, "
            "which smaller micro batches lessen"
        )


def plan_phases(
    units: Sequence[UnitCost], budget_bytes: float, speed: StoreSpeed, num_micro_batches: int = 1
) -> PhasePlan | TooLarge:
    """The fewest phases that fit into ``budget_bytes`` and take at most a hundredth longer than the fastest.

    The largest phases need not be fastest: nothing is computed while the last one is written, and little while the
    first state of the optimizer is read.
    """
    sizes = [unit.slot_bytes(num_micro_batches) for unit in units]
    activations = _activation_bytes(units)
    plans = []
    for number in _numbers(len(units)):
        cuts = even_cuts(sizes, number)
        if 2 * _largest(sizes, cuts) + max(activations) <= budget_bytes:
            plans.append(plan_with(units, cuts, speed, num_micro_batches))
    if plans:
        fastest = min(plan.step.seconds for plan in plans)
        return next(plan for plan in plans if plan.step.seconds <= fastest * _EQUALLY_FAST)
    return TooLarge(
        budget_bytes=budget_bytes,
        slots_bytes=2 * max(sizes),
        activation_bytes=max(activations),
        largest_unit=sizes.index(max(sizes)),
        fullest_unit=activations.index(max(activations)),
    )


def plan_with(
    units: Sequence[UnitCost], cuts: Sequence[int], speed: StoreSpeed, num_micro_batches: int = 1
) -> PhasePlan:
    """What a step takes with phases that begin at these units."""
    sizes = [unit.slot_bytes(num_micro_batches) for unit in units]
    phases = [_joined(units[first:last]) for first, last in pairwise((*cuts, len(units)))]
    step = _walked(phases, speed, min(num_micro_batches, _WALKED))
    if num_micro_batches > _WALKED:
        step = step.grown(_walked(phases, speed, _WALKED - 1), num_micro_batches - _WALKED)
    memory = PhaseMemory(slots=2 * _largest(sizes, cuts), activations=max(_activation_bytes(units)))
    return PhasePlan(cuts=tuple(cuts), memory=memory, step=step)


def even_cuts(sizes: Sequence[float], num_phases: int) -> tuple[int, ...]:
    """The first units of ``num_phases`` phases, whose largest one is as small as it can be."""
    least, most = max(*sizes, sum(sizes) / num_phases), sum(sizes)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if len(_filled(sizes, middle, 1)) <= num_phases else (middle, most)
    return _filled(sizes, most, num_phases)


def _filled(sizes: Sequence[float], most: float, num_phases: int) -> tuple[int, ...]:
    """The first units of phases of up to ``most``, filled one after another; at least so many phases."""
    cuts, filled = [0], 0.0
    for place, size in enumerate(sizes):
        left = len(sizes) - place  # so many units are enough for the phases that lack
        if place and (filled + size > most or left <= num_phases - len(cuts)):
            cuts.append(place)
            filled = 0.0
        filled += size
    return tuple(cuts)


def _numbers(most: int) -> Iterator[int]:
    """Numbers of phases that are tried."""
    number = 1
    while number < most:
        yield number
        number += 1 if number < _FINE else number // 8
    yield most


def _largest(sizes: Sequence[float], cuts: Sequence[int]) -> float:
    """The size of the largest phase."""
    return max(sum(sizes[first:last]) for first, last in pairwise((*cuts, len(sizes))))


def _activation_bytes(units: Sequence[UnitCost]) -> list[float]:
    """While each unit runs: the inputs that are kept, what it needs itself, and its gradients."""
    kept = accumulate(unit.input_bytes for unit in units)
    return [inputs + unit.running_bytes + unit.gradient_bytes for inputs, unit in zip(kept, units, strict=True)]


def _joined(units: Sequence[UnitCost]) -> UnitCost:
    """What several units take together."""
    return UnitCost(**{f.name: sum(getattr(unit, f.name) for unit in units) for f in fields(UnitCost)})


@dataclass(frozen=True, slots=True)
class _Visit:
    """A phase that is computed once."""

    phase: int
    computing: float  # seconds
    read_bytes: float  # beside its weights, which a slot may have
    written_bytes: float


def _visits(phases: Sequence[UnitCost], num_micro_batches: int) -> Iterator[_Visit]:
    """The phases of a step in their order: of each micro batch forward and backward."""
    for number in range(num_micro_batches):
        for place, phase in enumerate(phases):
            yield _Visit(place, phase.forward_seconds, 0.0, 0.0)
        is_last = number == num_micro_batches - 1
        for place, phase in reversed([*enumerate(phases)]):
            partial = phase.gradient_bytes if number else 0.0
            if is_last:
                seconds = phase.backward_seconds + phase.update_seconds
                yield _Visit(place, seconds, partial + phase.state_bytes, phase.updated_bytes + phase.state_bytes)
            else:
                yield _Visit(place, phase.backward_seconds, partial, phase.gradient_bytes)


def _walked(phases: Sequence[UnitCost], speed: StoreSpeed, num_micro_batches: int) -> PhaseStep:
    """What a walk over a step finds, which begins with the first two phases in the slots.

    One transfer follows another: what a visit changed is written behind the read of the next visit, and before
    that of the one after it, which needs the slot.
    """
    held = {0, 1}
    reading = writing = read_bytes = started = ended = free = 0.0  # ``free``: when the store has nothing to do
    visits = [*_visits(phases, num_micro_batches)]
    done: list[tuple[float, float]] = []  # when each visit ended, and the seconds of its write
    for place, visit in enumerate(visits):
        if place > 1:
            free = max(free, done[-2][0]) + done[-2][1]
        size = visit.read_bytes
        if visit.phase not in held:
            size += phases[visit.phase].weight_bytes
            held = {visits[place - 1].phase, visit.phase}
        waited = 0.0
        if size:
            seconds = size / speed.read_bytes_per_second
            free = max(free, started) + seconds
            waited = max(0.0, free - ended)
            reading += min(waited, seconds)
            writing += waited - min(waited, seconds)
        started = ended + waited
        ended = started + visit.computing
        read_bytes += size
        done.append((ended, visit.written_bytes / speed.write_bytes_per_second))
    for end, seconds in done[-2:]:
        free = max(free, end) + seconds
    return PhaseStep(
        computing=sum(visit.computing for visit in visits),
        reading=reading,
        writing=writing + max(0.0, free - ended),
        read_bytes=read_bytes,
        written_bytes=sum(visit.written_bytes for visit in visits),
    )


def _shown(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
