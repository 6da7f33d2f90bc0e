"""Plan the phases of a model: measure its first steps, then choose phases that fit the memory limit.

In the first steps each phase has one layer, which needs least memory. The memory that the process then uses beside
the phases, torch included, is taken to be the same with larger phases.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Final, Literal, TypeAlias

import torch

from popdist.errors import WeightsError
from popdist.ground.local_tensors import part_itself
from popdist.phases.phase_memory import PhaseMemory
from popdist.phases.phased_layers import Unit
from popdist.phases.used_memory import give_back_memory, peak_bytes, reset_peak, resident_bytes
from popsize.hardware import bytes_of
from popsize.phases import Loop, PhasePlan, StoreSpeed, UnitCost, memory_with, plan_phases, plan_with

_NUM_MEASURED: Final = 2
"""The number of measured steps: the first for memory, because it makes many buffers, and the second for time."""

_NUM_SHOWN: Final = 3
"""The number of steps after the plan whose mean time is printed beside the predicted time."""

_SPARE: Final = 0.02
"""The share of the memory limit that stays free, because the use of memory differs from step to step."""


Work: TypeAlias = Literal["forward", "backward", "update"]


def limit_of(memory: str | int) -> int:
    """Return the memory limit ``memory``, a number or a text such as ``2 GB`` or ``1.5 GiB``, in bytes."""
    size = None if isinstance(memory, bool) else bytes_of(str(memory))
    if size is None:
        raise WeightsError(f"memory={memory!r} is no size: give bytes, or a text such as '2 GB' or '1.5 GiB'")
    return size


class PhaseBudget:
    """A planner for a phased model, which is trained one phase (group of layers) after the other because it is
    larger than the memory. The planner measures the first steps, chooses the phases, and prints the plan.
    """

    def __init__(self, memory: PhaseMemory, owned: Collection[str], *, is_first: bool) -> None:
        self.limit_bytes: int | None = None  # None if the user has given the phases
        self._memory = memory
        self._owned = owned  # the names of the weights that this instance updates
        self._is_shared = len(owned) < len(memory.layers.weights)
        self._is_first = is_first  # whether this is the instance that prints
        self._num_steps = 0  # the number of steps that have ended
        self._is_measuring = False
        self._began = 0.0
        self._loop = Loop()
        # the seconds of each layer's passes and updates in the last measured step
        self._seconds: defaultdict[tuple[int, Work], float] = defaultdict(float)
        self._peak_bytes = 0  # the largest memory use in the first step
        self._inside = 0.0  # seconds of updates inside of a backward pass
        self._beside = 0.0  # bytes that the process has in use beside phases and activations
        self._needed: dict[int, int] = {}  # the bytes that a pass of each layer needs beside the weights
        self.predicted_seconds: float | None = None  # the planned seconds of a step
        self._later: list[float] = []

    def begin_step(self, num_micro_batches: int, *, updates_apart: bool) -> None:
        """Begin to measure a step. Raise WeightsError if two layers at a time do not fit into the memory limit."""
        self._is_measuring = self._num_steps < _NUM_MEASURED
        self._loop = Loop(
            num_micro_batches=num_micro_batches, updates_apart=updates_apart, is_shared=self._is_shared
        )
        if self._is_measuring:
            self._seconds.clear()
        if not self._num_steps:
            give_back_memory(self._memory.device)
            self._check_room()
            self._next_peak()
            self._peak_bytes = 0
        self._began = perf_counter()

    @contextmanager
    def passes(self, unit: Unit, *, backward: bool) -> Iterator[None]:
        """A context that measures time and memory of a pass of the layer ``unit``, in the first steps only."""
        self._make_room(unit)
        if not self._is_measuring:
            yield
            return
        is_first = not self._num_steps
        if is_first:
            self._next_peak()
        before, self._inside = resident_bytes(self._memory.device), 0.0
        start = self._computed()
        yield
        seconds = self._computed() - start - self._inside
        if is_first:
            self._needed[unit.index] = max(self._needed.get(unit.index, 0), self._next_peak() - before)
        self._seconds[unit.index, "backward" if backward else "forward"] += seconds

    @contextmanager
    def updating(self, units: Sequence[int]) -> Iterator[None]:
        """A context in which weights of the layers with indices ``units`` are updated; it measures the time."""
        if not self._is_measuring:
            yield
            return
        start = self._computed()
        yield
        seconds = self._computed() - start
        self._inside += seconds
        if units:
            self._seconds[min(units), "update"] += seconds

    def end_step(self, order: Sequence[int]) -> None:
        """End a step. After the last measured step, divide the layers ``order`` (forward order) into phases."""
        seconds = perf_counter() - self._began
        self._num_steps += 1
        self._is_measuring = False
        if self._num_steps == 1:
            self._note_memory()
        if self._num_steps == _NUM_MEASURED:
            rest = (unit.index for unit in self._memory.layers.units if unit.index not in order)
            self._plan([*order, *rest])
        elif self._num_steps > _NUM_MEASURED and len(self._later) < _NUM_SHOWN:
            self._later.append(seconds)
            if len(self._later) == _NUM_SHOWN:
                self._report()

    def _make_room(self, unit: Unit) -> None:
        """Have malloc return free memory to the system if computing ``unit`` might exceed the memory limit."""
        device = self._memory.device
        if self.limit_bytes is None or device.type != "cpu":
            return
        needed = self._needed.get(unit.index, 0) if self._num_steps else inf
        most = self.limit_bytes * (1 - _SPARE) - needed
        if resident_bytes(device) > most:
            give_back_memory(device)

    def _note_memory(self) -> None:
        """Record the largest memory use of the first step, without the memory of the layers' own tensors."""
        self._next_peak()
        costs = [self._cost(unit) for unit in self._memory.layers.units]
        self._beside = self._peak_bytes - memory_with(costs, self._memory.cuts, self._loop).total

    def _next_peak(self) -> int:
        """Return the largest memory use of the process since the last call, in bytes; begin a new measurement."""
        peak = peak_bytes(self._memory.device)
        self._peak_bytes = max(self._peak_bytes, peak)
        reset_peak(self._memory.device)
        return peak

    def _check_room(self) -> None:
        """Raise WeightsError if the memory in use, with two layers at a time, exceeds the memory limit."""
        if self.limit_bytes is None:
            return
        units = [self._cost(unit) for unit in self._memory.layers.units]
        slots = memory_with(units, range(len(units)), self._loop)
        now = resident_bytes(self._memory.device)
        if now + slots.total > self.limit_bytes:
            raise WeightsError(
                f"memory={_words(self.limit_bytes)!r} is too little for phases of one layer each: this process "
                f"has {_words(now)} in use, and two layers at once take {_words(slots.total)}. Give at least "
                f"memory={_words(now + slots.total)!r}, and room for activations"
            )

    def _computed(self) -> float:
        """Wait for the device; return the clock's time in seconds, less the time of all waits for files."""
        if self._memory.device.type != "cpu":
            torch.accelerator.synchronize(self._memory.device)
        return perf_counter() - self._memory.mover.waited_seconds

    def _cost(self, unit: Unit) -> UnitCost:
        """Return the cost of the layer ``unit``: bytes of weights, gradients and optimizer state, and measured
        seconds. A weight that several layers share is updated with the first of these layers.
        """
        seconds, size, number = self._seconds, self._memory.size, self._loop.num_micro_batches
        first_pieces = [piece for piece in unit.pieces if piece.units[0] == unit.index]
        trained = [(name, it) for piece in first_pieces for name, it in piece.weights.items() if it.requires_grad]
        return UnitCost(
            weight_bytes=sum(size("weights", piece.index) for piece in unit.pieces),
            updated_bytes=sum(part_itself(it).nbytes for name, it in trained if name in self._owned),
            gradient_bytes=sum(part_itself(it).nbytes for _, it in trained),
            state_bytes=sum(size("state", piece.index) for piece in first_pieces),
            input_bytes=0.0,  # activations count as memory beside the phases: see _note_memory
            running_bytes=0.0,
            forward_seconds=seconds[unit.index, "forward"] / number,
            backward_seconds=seconds[unit.index, "backward"] / number,
            update_seconds=seconds[unit.index, "update"],
        )

    def _plan(self, order: Sequence[int]) -> None:
        """Divide the layers ``order`` into phases, unless the user has given the phases, and print the plan."""
        modules = [self._memory.layers.units[index] for index in order]
        units = [self._cost(unit) for unit in modules]
        speed = StoreSpeed(
            read_bytes_per_second=self._memory.mover.bytes_per_second("read"),
            write_bytes_per_second=self._memory.mover.bytes_per_second("write"),
        )
        if self.limit_bytes is None:
            plan = plan_with(units, self._memory.cuts, speed, self._loop)
        else:
            plan = self._fitting(units, [unit.name for unit in modules], speed)
            self._memory.cut(order, plan.cuts)
        self.predicted_seconds = plan.step.seconds
        self._print(plan.sentence(self._beside))

    def _fitting(self, units: list[UnitCost], names: list[str], speed: StoreSpeed) -> PhasePlan:
        """Return the fastest plan of phases (within 1 %) for the memory limit. Raise WeightsError if none fits."""
        limit = self.limit_bytes or 0
        plan = plan_phases(units, limit * (1 - _SPARE) - self._beside, speed, self._loop)
        if isinstance(plan, PhasePlan):
            return plan
        needed, slots = (plan.total + self._beside) / (1 - 2 * _SPARE), plan.total - plan.activations
        largest = max(range(len(units)), key=lambda it: units[it].slot_bytes(has_sums=self._loop.has_sums))
        raise WeightsError(
            f"memory={_words(limit)!r} is too little: give {_words(needed)}. Of it two layers at once take "
            f"{_words(slots)}, of which {names[largest]!r} is the largest, and {_words(needed - slots)} are for "
            "the rest of the process, its activations included, which smaller micro batches lessen"
        )

    def _report(self) -> None:
        first, mean = _NUM_MEASURED + 1, sum(self._later) / _NUM_SHOWN
        steps = f"Steps {first} to {first + _NUM_SHOWN - 1}"
        self._print(f"{steps} took {mean:.3g} s each; {self.predicted_seconds:.3g} s were predicted.")

    def _print(self, text: str) -> None:
        """Print ``text`` to standard error, on the first instance only."""
        if self._is_first:
            sys.stderr.write(f"popdist: {text}\n")


def _words(size: float) -> str:
    """Return ``size``, a number of bytes, rounded up, as a text such as ``12 MB``, which ``memory=`` accepts."""
    return f"{-(-size // 10**6):.0f} MB"
