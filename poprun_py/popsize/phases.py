"""Phases: the runs of layers that are in memory one after another, while the rest of a model waits in a store.

There are two slots of memory, for the phases of even and of odd numbers. While one computes, what the phase before
changed is written from the other, and the next phase is read into it. A slot keeps its phase until another one is
read: two phases stay where the forward pass turns into the backward pass, and where that turns into the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Final

_GIB: Final = 2**30
_HALVINGS: Final = 64
_WALKED: Final = 4
"""Micro batches whose schedule is walked: those between the first two and the last one are alike."""

_EQUALLY_FAST: Final = 1.01

_FINE: Final = 16
"""Up to so many phases each number is tried; above it two neighbours at so many places."""


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

    def slot_bytes(self, *, has_sums: bool) -> float:
        """Bytes of a slot that holds it, with a sum of its gradients where the store has those."""
        return self.weight_bytes + self.state_bytes + has_sums * self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a step runs."""

    num_micro_batches: int = 1
    updates_apart: bool = False  # whether updates have a pass of their own, as they need all gradients first
    is_shared: bool = False  # whether other instances update weights, too: these are read anew in the next step

    @property
    def has_sums(self) -> bool:
        """Whether gradients are written to the store and read from it."""
        return self.num_micro_batches > 1 or self.updates_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """How fast the store is for one instance, while the others of its host read and write, too."""

    read_bytes_per_second: float
    write_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """The most bytes that a step needs, by kind."""

    weights: float  # in two slots, each as large as the largest phase that it gets
    state: float  # of the optimizer, in these slots
    sums: float  # of gradients, in these slots
    activations: float  # inputs of units, and the unit that runs with its gradients, at the fullest moment

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.state + self.sums + self.activations


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

    def sentence(self, beside_bytes: float) -> str:
        """What a person reads when a program starts, which needs so much memory beside what is planned."""
        number, step, rest = len(self.cuts), self.step, self.memory.activations
        return (
            f"{number} phase{'s' if number > 1 else ''}: {_shown(self.memory.total - rest)} for {min(2, number)} "
            f"at once and {_shown(rest + beside_bytes)} for the rest. A step is predicted to take "
            f"{step.seconds:.3g} s: {step.computing:.3g} s computing, {step.reading:.3g} s waiting for "
            f"reads, {step.writing:.3g} s waiting for writes."
        )


def plan_phases(
    units: Sequence[UnitCost], budget_bytes: float, speed: StoreSpeed, loop: Loop
) -> PhasePlan | PhaseMemory:
    """The fewest phases that fit into ``budget_bytes`` and take at most a hundredth longer than the fastest.

    Where none fit, the memory of those that need least. The largest phases need not be fastest: nothing is
    computed while the last one is written, and little while the first state of the optimizer is read.
    """
    numbers = numbers_of_phases(len(units))
    plans = [plan_with(units, phase_cuts(units, number, loop), speed, loop) for number in numbers]
    fitting = [plan for plan in plans if plan.memory.total <= budget_bytes]
    if not fitting:
        return min((plan.memory for plan in plans), key=attrgetter("total"))
    fastest = min(plan.step.seconds for plan in fitting)
    return next(plan for plan in fitting if plan.step.seconds <= fastest * _EQUALLY_FAST)


def plan_with(units: Sequence[UnitCost], cuts: Sequence[int], speed: StoreSpeed, loop: Loop) -> PhasePlan:
    """What a step takes with phases that begin at these units."""
    phases, number = _joined(units, cuts), loop.num_micro_batches
    step = _walked(phases, speed, replace(loop, num_micro_batches=min(number, _WALKED)))
    if number > _WALKED:
        shorter = _walked(phases, speed, replace(loop, num_micro_batches=_WALKED - 1))
        step = step.grown(shorter, number - _WALKED)
    return PhasePlan(cuts=tuple(cuts), memory=memory_with(units, cuts, loop), step=step)


def memory_with(units: Sequence[UnitCost], cuts: Sequence[int], loop: Loop) -> PhaseMemory:
    """The most bytes that a step needs with phases that begin at these units."""
    phases = _joined(units, cuts)
    size = partial(UnitCost.slot_bytes, has_sums=loop.has_sums)
    slots = [max(part, key=size) for part in (phases[::2], phases[1::2]) if part]
    inputs = accumulate(unit.input_bytes for unit in units)
    return PhaseMemory(
        weights=sum(phase.weight_bytes for phase in slots),
        state=sum(phase.state_bytes for phase in slots),
        sums=sum(phase.gradient_bytes for phase in slots) if loop.has_sums else 0.0,
        activations=max(
            kept + it.gradient_bytes + it.running_bytes for kept, it in zip(inputs, units, strict=True)
        ),
    )


def phase_cuts(units: Sequence[UnitCost], num_phases: int, loop: Loop) -> tuple[int, ...]:
    """The first units of ``num_phases`` phases, of which the largest is as small as it can be."""
    return even_cuts(tuple(unit.slot_bytes(has_sums=loop.has_sums) for unit in units), num_phases)


@lru_cache(maxsize=4096)
def even_cuts(sizes: tuple[float, ...], number: int) -> tuple[int, ...]:
    """Where each of ``number`` parts of ``sizes`` begins, of which the largest is as small as it can be."""
    least, most = max(*sizes, sum(sizes) / number), sum(sizes)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if len(_filled(sizes, 1, middle)) <= number else (middle, most)
    return _filled(sizes, number, most)


def _filled(sizes: tuple[float, ...], number: int, most: float) -> tuple[int, ...]:
    """Where parts of up to ``most`` begin, ``number`` at least, of which the last ones are filled first."""
    begins, filled = list[int](), 0.0
    for place in reversed(range(1, len(sizes))):
        filled += sizes[place]
        if filled + sizes[place - 1] > most or place == number - len(begins) - 1:
            begins.append(place)
            filled = 0.0
    return (0, *reversed(begins))


def numbers_of_phases(most: int) -> list[int]:
    """The numbers of phases that are tried, even and odd ones."""
    step = most // _FINE + 1
    return [it for it in range(1, most + 1) if it <= _FINE or it % step in (0, 1) or it >= most - 1]


def _joined(units: Sequence[UnitCost], cuts: Sequence[int]) -> list[UnitCost]:
    """What the units of each phase take together."""
    names = [f.name for f in fields(UnitCost)]
    return [
        UnitCost(**{name: sum(getattr(unit, name) for unit in units[first:last]) for name in names})
        for first, last in pairwise((*cuts, len(units)))
    ]


@dataclass(frozen=True, slots=True)
class _Visit:
    """A phase that is computed once."""

    phase: int
    computing: float  # seconds
    read_bytes: float  # beside its weights, which a slot may have
    written_bytes: float


def _visits(phases: Sequence[UnitCost], loop: Loop) -> Iterator[_Visit]:
    """The phases of a step in their order: of each micro batch forward and backward; updates apart are last."""
    rows = [*enumerate(phases)]
    for number in range(loop.num_micro_batches):
        for place, phase in rows:
            yield _Visit(place, phase.forward_seconds, 0.0, 0.0)
        updates = number == loop.num_micro_batches - 1 and not loop.updates_apart
        for place, phase in reversed(rows):
            read = phase.gradient_bytes if number else 0.0
            if updates:
                yield _updated(place, phase, phase.backward_seconds, read)
            else:
                yield _Visit(place, phase.backward_seconds, read, phase.gradient_bytes)
    if loop.updates_apart:
        for place, phase in reversed(rows):
            yield _updated(place, phase, 0.0, phase.gradient_bytes)


def _updated(place: int, phase: UnitCost, seconds: float, read_bytes: float) -> _Visit:
    """A visit that updates a phase, too."""
    seconds += phase.update_seconds
    return _Visit(place, seconds, read_bytes + phase.state_bytes, phase.updated_bytes + phase.state_bytes)


def _walked(phases: Sequence[UnitCost], speed: StoreSpeed, loop: Loop) -> PhaseStep:
    """What a walk over a step finds, which begins with the first two phases in the slots if no others wrote them.

    One transfer follows another: what a visit changed is written behind the read of the next visit, and before
    that of the one after it, which needs the slot.
    """
    held = set() if loop.is_shared else {0, 1}
    reading = writing = read_bytes = started = ended = free = 0.0  # ``free``: when the store has nothing to do
    visits = [*_visits(phases, loop)]
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
