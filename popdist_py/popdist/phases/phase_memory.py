"""The memory of a phased model: two slots; while the phase in one slot computes, the other slot is filled.

A phase is a run of layers whose weights are in memory together. A slot is memory for one phase: its weights, the
optimizer's state of the weights that this instance updates, and room for a partial sum of their gradients. Before
a slot is filled with the next phase, the changes of its last phase are written to the store.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from popdist.phases.phase_store import StoredTensors
from popdist.phases.phased_layers import PhasedLayers, PhasePiece, make_absent, set_data
from popdist.phases.store_file import Direction, Region, StoreFile, make_buffer, recorded
from popdist.phases.used_memory import give_back_memory
from popsize.phases import parts_at

What: TypeAlias = Literal["weights", "state", "sum"]


class MemoryPlace(NamedTuple):
    """The key of one part of memory: weights, optimizer state or gradient sum of one piece, a group of weights."""

    what: What
    piece: int


Wanted: TypeAlias = Mapping[MemoryPlace, StoredTensors]
"""The stored tensors that shall be in memory, by the place in memory that they are read into."""

Move: TypeAlias = tuple[StoreFile, int, Tensor]
"""One read or write: the file, the first byte in the file, and the memory that is filled or written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """A run of layers whose weights are in memory together. These weights are grouped in pieces: a piece has the
    weights that the same layers use.

    The resident phase has no layers: its weights are used outside of the layers, and never leave memory.
    """

    units: frozenset[int]
    pieces: tuple[PhasePiece, ...]


@dataclass(kw_only=True, eq=False)
class _Slot:
    """Memory for one phase (group of layers) at a time, with records of what was read, changed or is moving."""

    memory: Tensor
    phase: Phase
    rooms: dict[MemoryPlace, tuple[int, int]]  # first byte and end in the memory
    # the tensors of the store that are in memory, or are being read, with the future of the read
    present: dict[MemoryPlace, tuple[StoredTensors, "Future[None] | None"]] = field(default_factory=dict)
    # the tensors that must be written to the store, by place, file and name, in order
    unwritten: dict[tuple[MemoryPlace, StoredTensors, str], None] = field(default_factory=dict)
    writing: "Future[None] | None" = None

    def room(self, place: MemoryPlace) -> Tensor:
        """Return the part of this memory for ``place``: weights, optimizer state or gradients of some layers."""
        begin, end = self.rooms[place]
        return self.memory[begin:end]


class Mover:
    """A thread that moves bytes between memory and a phased model's store, and measures how long moves take.

    Attributes:
        waited_seconds: The seconds in which the model has waited for reads and writes.
    """

    def __init__(self, device: torch.device) -> None:
        self.waited_seconds = 0.0
        self._device = device
        self._moved: dict[Direction, tuple[int, float]] = {}  # the bytes, and the seconds of their moves
        self._thread = ThreadPoolExecutor(1, "popdist-phases")
        self.close = weakref.finalize(self, self._thread.shutdown, wait=True)

    def start(self, direction: Direction, moves: Sequence[Move]) -> "Future[None]":
        """Begin the reads or writes ``moves`` after the device's earlier work; return a future to wait for."""
        ready = recorded(self._device)

        def move() -> None:
            start = perf_counter()
            pieces = [it for file, place, memory in moves for it in file.pieces(direction, place, memory, ready)]
            if pieces:
                moves[0][0].threads.run(pieces)
            num_bytes, seconds = self._moved.get(direction, (0, 0.0))
            num_bytes += sum(len(memory) for _, _, memory in moves)
            self._moved[direction] = (num_bytes, seconds + perf_counter() - start)

        return self._thread.submit(move)

    def wait_for(self, moving: "Future[None] | None") -> None:
        """Wait until the reads or writes ``moving``, if any, have ended. Raise the error of one that failed."""
        start = perf_counter()
        try:
            if moving is not None:
                moving.result()
        finally:
            self.waited_seconds += perf_counter() - start

    def bytes_per_second(self, direction: Direction) -> float:
        """Return the mean speed of all reads, or of all writes, until now; infinite if no bytes were moved."""
        num_bytes, seconds = self._moved.get(direction, (0, 0.0))
        return num_bytes / seconds if seconds else inf


class PhaseMemory:
    """The memory of a phased model: the phases that are in memory, and the reads and writes that run.

    Attributes:
        addresses: The stored tensors that may be read into each place in memory; passes use the first weights.
        wanted_back: Returns the stored tensors that a backward pass or an update needs beside a piece's weights.
        phases: The phases in the order of the forward pass.
        cuts: For each phase the place of its first layer in the order of the forward pass.
        resident: The phase that never leaves memory.
        phase_seconds: The seconds of each phase in the last step, computing and waiting.
    """

    def __init__(self, layers: PhasedLayers, device: torch.device) -> None:
        self.layers = layers
        self.device = device
        self.mover = Mover(device)
        self.addresses: dict[MemoryPlace, list[StoredTensors]] = {}
        self.wanted_back: Callable[[PhasePiece], Wanted] = lambda _: {}
        self.phases: list[Phase] = []
        self.cuts: Sequence[int] = ()
        self.resident = Phase(units=frozenset(), pieces=layers.resident)
        self.phase_seconds: list[float] = []
        self._counted: float | None = None  # the time until which seconds are counted; None between steps
        self._slots: list[_Slot] = []
        self._current: tuple[Phase, bool] | None = None  # the phase whose weights are bound, and whether backwards

    def size(self, what: What, piece: int) -> int:
        """Return the bytes that the weights, optimizer state or gradient sum of some layers needs in memory."""
        return max((it.num_bytes for it in self.addresses.get(MemoryPlace(what, piece), ())), default=0)

    def cut(self, order: Sequence[int], cuts: Sequence[int]) -> None:
        """Divide the layers, whose indices are ``order`` in forward order, into phases: groups of layers that are
        in memory together. ``cuts`` has the place in ``order`` at which each phase begins.
        """
        self.cuts = cuts
        groups = map(frozenset, parts_at(cuts, order))
        self.phases = [
            Phase(units=units, pieces=tuple(it for it in self.layers.pieces if not units.isdisjoint(it.units)))
            for units in groups
        ]
        self.place_anew()

    def place_anew(self) -> None:
        """Make new memory blocks for the phases (groups of layers), so that the present phases and tensors fit."""
        self.wait()
        self._unbind()
        self._slots = []
        give_back_memory(self.device)  # which the slots before had
        resident = [self.resident] if self.resident.pieces else []
        for phases in filter(None, (self.phases[::2], self.phases[1::2], resident)):
            most = max(self._rooms(phase)[1] for phase in phases)
            rooms, _ = self._rooms(phases[0])
            self._slots.append(_Slot(memory=make_buffer(most, self.device), phase=phases[0], rooms=rooms))
        if resident:
            self._bring(self._slots[-1], self._wanted(self.resident, backward=False))
            self._bind(self._slots[-1])

    def last_phase(self, piece: PhasePiece) -> Phase:
        """Return the group of layers (phase) whose backward pass completes the gradients of ``piece``."""
        return next((phase for phase in self.phases if piece in phase.pieces), self.resident)

    def _rooms(self, phase: Phase) -> tuple[dict[MemoryPlace, tuple[int, int]], int]:
        """Return the byte range of each tensor of the layers ``phase`` in a memory block, and the total."""
        rooms, position = dict[MemoryPlace, tuple[int, int]](), 0
        whats: tuple[What, ...] = ("weights", "state", "sum")
        for what in whats:
            for piece in phase.pieces:
                place = MemoryPlace(what, piece.index)
                if place in self.addresses and (what == "weights" or self.last_phase(piece) is phase):
                    rooms[place] = (position, position + self.size(*place))
                    position += self.size(*place)
        return rooms, position

    def begin_step(self) -> None:
        """Begin a step: measure the time of each phase (group of layers) from now on."""
        self.phase_seconds, self._counted = [0.0] * len(self.phases), perf_counter()

    def end_step(self) -> None:
        """End a step: stop measuring the time of each phase (group of layers)."""
        self._count()
        self._counted = None

    def _count(self) -> None:
        """Add the seconds since the last call, or since the step began, to the time of the current layers."""
        if self._counted is not None and self._current is not None:
            now = perf_counter()
            self.phase_seconds[self.phases.index(self._current[0])] += now - self._counted
            self._counted = now

    def enter(self, phase: Phase, *, backward: bool, will_return: bool = False) -> None:
        """Read the layers of ``phase`` into memory, wait for them, and begin to read the layers that come next.

        ``will_return`` says whether a backward pass will follow this forward pass.
        """
        if phase is self.resident or (phase, backward) == self._current:
            return
        slot, wanted = self._slot_for(phase), self._wanted(phase, backward=backward)
        self._count()
        is_bound = self._current is not None and self._current[0] is phase
        if not is_bound:
            self._unbind()
        self._request(slot, wanted)
        self._read_ahead(phase, backward=backward, will_return=will_return)
        self._bring(slot, wanted)
        if not is_bound:
            self._bind(slot)
        self._current = (phase, backward)

    def _read_ahead(self, phase: Phase, *, backward: bool, will_return: bool) -> None:
        """Begin to read the next group of layers; before a backward pass, the first two groups of that pass."""
        number = self.phases.index(phase)
        ahead = self.phases[:number][-1:] if backward else self.phases[number + 1 :][:1]
        if not ahead and will_return and not backward:
            ahead, backward = [phase, *self.phases[:number][-1:]], True
        for it in ahead:
            self._request(self._slot_for(it), self._wanted(it, backward=backward))

    def _slot_for(self, phase: Phase) -> _Slot:
        """Return the memory for the layers ``phase``; if it had other layers, begin to write their changes."""
        slot = self._slots[self.phases.index(phase) % 2]
        if slot.phase is not phase:
            self._write(slot)
            slot.phase, slot.present = phase, {}
            slot.rooms, _ = self._rooms(phase)
        return slot

    def _wanted(self, phase: Phase, *, backward: bool) -> Wanted:
        """Return the stored tensors that a pass over the layers ``phase`` needs: the weights, and for a backward
        pass also optimizer states and gradient sums.
        """
        places = [MemoryPlace("weights", piece.index) for piece in phase.pieces]
        wanted = {place: self.addresses[place][0] for place in places}
        for piece in phase.pieces if backward else ():
            wanted |= self.wanted_back(piece) if self.last_phase(piece) is phase else {}
        return wanted

    def _write(self, slot: _Slot) -> None:
        """Begin to write the changed tensors in the memory ``slot`` to the store (files or host memory)."""
        if slot.unwritten:
            slot.writing = self.mover.start("write", _joined(slot, slot.unwritten))
            slot.unwritten = {}

    def _request(self, slot: _Slot, wanted: Wanted) -> None:
        """Begin to read the stored tensors ``wanted`` into the memory ``slot``, unless they are there already."""
        lacking = {place: it for place, it in wanted.items() if slot.present.get(place, (None,))[0] is not it}
        if not lacking:
            return
        self._write(slot)
        parts = [(place, it, name) for place, it in lacking.items() for name in it.offsets]
        reading = self.mover.start("read", _joined(slot, parts))
        slot.present |= {place: (it, reading) for place, it in lacking.items()}

    def _bring(self, slot: _Slot, wanted: Wanted) -> None:
        """Read the stored tensors ``wanted`` into the memory ``slot`` if necessary; wait until all are there."""
        self._request(slot, wanted)
        try:
            for place in wanted:
                self.mover.wait_for(slot.present[place][1])
        except BaseException:
            slot.present.clear()
            raise

    def _home(self, place: MemoryPlace) -> _Slot:
        """Return the memory block (slot) that has ``place``: the block of the layers that compute now, or the last
        block if no layers compute or ``place`` always stays in memory.
        """
        if self._current is None or self.layers.pieces[place.piece] in self.resident.pieces:
            return self._slots[-1]
        return self._slot_for(self._current[0])

    def load(self, place: MemoryPlace, address: StoredTensors) -> Tensor:
        """Read the stored tensors ``address`` into the memory of ``place`` if necessary; return the memory."""
        self._bring(self._home(place), {place: address})
        return self.room(place)

    def room(self, place: MemoryPlace) -> Tensor:
        """Return the memory of ``place``, for the caller to overwrite; first wait for its reads and writes."""
        slot = self._home(place)
        if any(changed == place for changed, _, _ in slot.unwritten):
            self._write(slot)
        self._wait_for_writing(slot)
        _, reading = slot.present.pop(place, (None, None))
        self.mover.wait_for(reading)
        return slot.room(place)

    def write_behind(self, place: MemoryPlace, address: StoredTensors, names: Iterable[str] | None = None) -> None:
        """Record that the tensors ``names`` (None: all) of ``address`` are changed and must be written later."""
        home = self._home(place)
        home.present[place] = (address, None)
        home.unwritten |= {(place, address, name): None for name in (address.offsets if names is None else names)}
        for slot in self._slots:
            if slot is not home:
                slot.present.pop(place, None)

    def begin_writing(self) -> None:
        """Begin to write all changed tensors in memory to the store (files or host memory)."""
        for slot in self._slots:
            self._write(slot)

    def wait(self) -> None:
        """Wait until all changed tensors in memory are written to the store (files or host memory)."""
        self.begin_writing()
        for slot in self._slots:
            self._wait_for_writing(slot)

    def _wait_for_writing(self, slot: _Slot) -> None:
        writing, slot.writing = slot.writing, None
        self.mover.wait_for(writing)

    def forget(self, what: What, pieces: Iterable[PhasePiece]) -> None:
        """Discard the weights or state (``what``) of ``pieces`` from memory: the store has newer values."""
        for piece in pieces:
            for slot in self._slots:
                slot.present.pop(MemoryPlace(what, piece.index), None)
        self._unbind()
        if self.resident.pieces:
            self._bring(self._slots[-1], self._wanted(self.resident, backward=False))

    def _bind(self, slot: _Slot) -> None:
        """Set the data of the layers' parameters to views of the memory ``slot``, into which they were read."""
        for piece in slot.phase.pieces:
            place = MemoryPlace("weights", piece.index)
            views = self.addresses[place][0].views(slot.room(place))
            for name, parameter in piece.weights.items():
                set_data(parameter, views[name])

    def _unbind(self) -> None:
        """Replace the data of the current layers' parameters by placeholders without memory, which read as NaN."""
        for piece in () if self._current is None else self._current[0].pieces:
            for parameter in piece.weights.values():
                make_absent(parameter, self.device)
        self._current = None

    def close(self) -> None:
        """End the thread that reads and writes; changes that were not written are lost."""
        self._unbind()
        self.mover.close()


def _joined(slot: _Slot, parts: Iterable[tuple[MemoryPlace, StoredTensors, str]]) -> list[Move]:
    """Return the reads or writes of the tensors ``parts``; neighbours in file and in memory become one."""
    moves: list[tuple[StoreFile, Region, int]] = []
    regions = [
        (address.file, address.regions[name], slot.rooms[place][0] + address.offsets[name])
        for place, address, name in parts
    ]
    for file, region, begin in sorted(regions, key=lambda part: (id(part[0]), part[1].start)):
        if moves and moves[-1][0] is file:
            _, last, first = moves[-1]
            if last.end == region.start and first + last.length == begin:
                moves[-1] = (file, Region(start=last.start, num_bytes=region.end - last.start), first)
                continue
        moves.append((file, region, begin))
    return [(file, region.start, slot.memory[begin : begin + region.length]) for file, region, begin in moves]
