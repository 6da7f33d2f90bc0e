"""The planner of phases: parts of a model that are in memory one after the other; the rest is in a store.

Two slots of memory hold phases with even and with odd numbers. While one slot's phase computes, the changes of the
phase before are written from the other slot, and then the next phase is read into this other slot. A slot keeps a
phase until another phase is read, so no phase is read when a forward pass turns into a backward pass, or back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Final, TypeVar

T = TypeVar("T")

_GIB: Final = 2**30
_HALVINGS: Final = 64
_WALKED: Final = 4
"""The largest number of micro batches that are simulated; each further micro batch takes as long as the last."""

_EQUALLY_FAST: Final = 1.01

_FINE: Final = 16
"""Up to this number of phases, each number is tried; of the larger numbers, pairs of neighbours at about so many
places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """The bytes and seconds of a unit (a layer, or several), which is read from slower memory as a whole."""

    weight_bytes: float  # the unit's weights, trained or not
    updated_bytes: float  # the part of the weights that this instance updates and writes
    gradient_bytes: float  # gradients of the unit's trained weights
    state_bytes: float  # the optimizer's state that this instance reads and writes
    input_bytes: float  # the unit's inputs, which are kept from the forward pass to the backward pass
    running_bytes: float  # activations that the unit's layers keep for the backward pass while the unit runs
    forward_seconds: float = 0.0  # the forward pass of a micro batch
    backward_seconds: float = 0.0  # the backward pass of a micro batch, with the forward pass computed again
    update_seconds: float = 0.0  # the update of the unit's weights

    def slot_bytes(self, *, has_sums: bool) -> float:
        """Return the bytes of the unit's weights and optimizer state, and with ``has_sums`` of its gradients."""
        return self.weight_bytes + self.state_bytes + has_sums * self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The settings of a step that loads layers group by group (in phases): micro batches, and weight updates."""

    num_micro_batches: int = 1
    updates_apart: bool = False  # whether updates have a pass of their own, because they need all gradients first
    is_shared: bool = False  # whether other instances also update weights, so that a step reads all weights anew

    @property
    def has_sums(self) -> bool:
        """Whether gradients are written to slower memory and read again, because they are summed up."""
        return self.num_micro_batches > 1 or self.updates_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """The bytes per second of the slower memory (store) for one instance, while all instances of a host use it."""

    read_bytes_per_second: float
    write_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """The largest number of bytes, by kind, in memory at once in a step that loads layers group by group."""

    weights: float  # weights in the two slots, each as large as the slot's largest phase
    state: float  # the optimizer's state in the two slots
    sums: float  # sums of gradients in the two slots
    activations: float  # inputs of units, and the running unit with its gradients, when this sum is largest

    @property
    def total(self) -> float:
        """Bytes in memory: weights, optimizer state, sums of gradients, and activations together."""
        return self.weights + self.state + self.sums + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStep:
    """The predicted seconds, reads and writes of a step that loads layers group by group (in phases)."""

    computing: float  # seconds of passes and updates
    reading: float  # seconds in which the step only waits for reads
    writing: float  # seconds in which the step only waits for writes
    read_bytes: float  # bytes read from the store
    written_bytes: float  # bytes written to the store

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step: computing and waiting for slower memory together."""
        return self.computing + self.reading + self.writing

    def grown(self, shorter: "PhaseStep", times: int) -> "PhaseStep":
        """Return this step with ``times`` more micro batches. Each of them adds the difference between this step
        and ``shorter``, a step with one micro batch fewer.
        """
        values = {f.name: (getattr(self, f.name), getattr(shorter, f.name)) for f in fields(self)}
        return PhaseStep(**{name: value + times * (value - less) for name, (value, less) in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """A division of a model's layers into groups (phases) that are loaded one by one, with its memory and time."""

    cuts: tuple[int, ...]  # the first unit of each phase
    memory: PhaseMemory
    step: PhaseStep

    def sentence(self, beside_bytes: float) -> str:
        """Return the plan as text for the user; the program needs ``beside_bytes`` in addition to the plan."""
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
    """Return the division of a model into the fewest phases (groups of layers that are loaded one by one) that
    fits into ``budget_bytes`` and is at most 1 % slower than the fastest division.

    If no plan fits, return the least memory of a plan. Few large phases are not always fastest, because nothing is
    computed while the last phase is written, and little while the first state of the optimizer is read.
    """
    numbers = numbers_of_phases(len(units))
    plans = [plan_with(units, phase_cuts(units, number, loop), speed, loop) for number in numbers]
    fitting = [plan for plan in plans if plan.memory.total <= budget_bytes]
    if not fitting:
        return min((plan.memory for plan in plans), key=attrgetter("total"))
    fastest = min(plan.step.seconds for plan in fitting)
    return next(plan for plan in fitting if plan.step.seconds <= fastest * _EQUALLY_FAST)


def plan_with(units: Sequence[UnitCost], cuts: Sequence[int], speed: StoreSpeed, loop: Loop) -> PhasePlan:
    """Return memory and time of a step that loads layer groups (phases) one by one, which begin at ``cuts``."""
    phases, number = _joined(units, cuts), loop.num_micro_batches
    step = _simulate_step(phases, speed, replace(loop, num_micro_batches=min(number, _WALKED)))
    if number > _WALKED:
        shorter = _simulate_step(phases, speed, replace(loop, num_micro_batches=_WALKED - 1))
        step = step.grown(shorter, number - _WALKED)
    return PhasePlan(cuts=tuple(cuts), memory=memory_with(units, cuts, loop), step=step)


def memory_with(units: Sequence[UnitCost], cuts: Sequence[int], loop: Loop) -> PhaseMemory:
    """Return the memory of a step that loads layer groups (phases) one by one, which begin at ``cuts``."""
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
    """Cut layers into ``num_phases`` groups of nearly equal bytes; return the index of each one's first layer."""
    return even_cuts(tuple(unit.slot_bytes(has_sums=loop.has_sums) for unit in units), num_phases)


@lru_cache(maxsize=4096)
def even_cuts(sizes: tuple[float, ...], number: int) -> tuple[int, ...]:
    """Cut ``sizes`` into ``number`` parts, so that the largest sum is smallest; return where each part begins."""
    least, most = max(*sizes, sum(sizes) / number), sum(sizes)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if len(_cut_parts(sizes, 1, middle)) <= number else (middle, most)
    return _cut_parts(sizes, number, most)


def _cut_parts(sizes: tuple[float, ...], number: int, most: float) -> tuple[int, ...]:
    """Cut ``sizes`` into ``number`` or more parts with sums up to ``most``; return the index where each begins."""
    begins, filled = list[int](), 0.0
    for place in reversed(range(1, len(sizes))):
        filled += sizes[place]
        if filled + sizes[place - 1] > most or place == number - len(begins) - 1:
            begins.append(place)
            filled = 0.0
    return (0, *reversed(begins))


def parts_at(cuts: Sequence[int], units: Sequence[T]) -> list[Sequence[T]]:
    """Return the parts of ``units``, for example the layers of each phase, that begin at the indices ``cuts``."""
    return [units[first:last] for first, last in pairwise((*cuts, len(units)))]


def numbers_of_phases(most: int) -> list[int]:
    """Return which numbers of phases (layer groups) to try: all from 1 to 16, and some above, up to ``most``."""
    step = most // _FINE + 1
    return [it for it in range(1, most + 1) if it <= _FINE or it % step in (0, 1) or it >= most - 1]


def _joined(units: Sequence[UnitCost], cuts: Sequence[int]) -> list[UnitCost]:
    """Return the cost of each phase, a group of layers: the sum of its layers' costs. Phases begin at ``cuts``."""
    names = [f.name for f in fields(UnitCost)]
    return [
        UnitCost(**{name: sum(getattr(unit, name) for unit in part) for name in names})
        for part in parts_at(cuts, units)
    ]


@dataclass(frozen=True, slots=True)
class _Visit:
    """One computation of a step with a phase, a group of layers: a forward pass, a backward pass or an update."""

    phase: int
    computing: float  # seconds
    read_bytes: float  # bytes to read, without the weights, which may be in a slot already
    written_bytes: float


def _visits(phases: Sequence[UnitCost], loop: Loop) -> Iterator[_Visit]:
    """Yield the computations of a step in order: each micro batch forward and backward, then later updates."""
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
    """Return the computation that updates the layers ``phase``, after ``seconds`` of a backward pass (or 0)."""
    seconds += phase.update_seconds
    return _Visit(place, seconds, read_bytes + phase.state_bytes, phase.updated_bytes + phase.state_bytes)


def _simulate_step(phases: Sequence[UnitCost], speed: StoreSpeed, loop: Loop) -> PhaseStep:
    """Simulate a step that loads the layer groups ``phases`` one by one; return its seconds, reads and writes.

    At first phases 0 and 1 are in the slots, unless other instances have changed them (``loop.is_shared``). Only
    one transfer runs at a time. The changes of a visit are written after the read of the next visit, and before
    the read of the second visit after it, which needs the slot.
    """
    held = set() if loop.is_shared else {0, 1}
    reading = writing = read_bytes = started = ended = free = 0.0  # ``free``: when the store is idle again
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
    """Return ``size`` bytes as text in GiB, or in MiB below 1 GiB."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
