"""The memory of phases: two slots, of which one is read ahead and written behind while the other one computes.

A phase is a run of units whose weights are in memory together. A slot holds what one phase needs: its weights, the
optimizer's state of those that this instance updates, and room for a partial sum of their gradients.
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
from popdist.phases.store_file import Region, StoreFile, make_buffer, recorded
from popdist.phases.used_memory import give_back_memory

What: TypeAlias = Literal["weights", "state", "sum"]


class MemoryPlace(NamedTuple):
    """Where in memory the weights of a piece are, or the optimizer's state of it, or a sum of its gradients."""

    what: What
    piece: int


Wanted: TypeAlias = Mapping[MemoryPlace, StoredTensors]
"""What shall be in each place."""

Direction: TypeAlias = Literal["read", "write"]

Move: TypeAlias = tuple[StoreFile, int, Tensor]
"""Bytes of a file from a place on, and the memory that they are read into or written from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Units whose weights are in memory together, and the pieces that they use.

    The resident phase has no units: its weights, which no unit has by itself, never leave.
    """

    units: tuple[int, ...]
    pieces: tuple[PhasePiece, ...]


@dataclass(kw_only=True, eq=False)
class _Slot:
    """Memory that holds a phase."""

    memory: Tensor
    phase: Phase | None = None
    rooms: dict[MemoryPlace, tuple[int, int]] = field(default_factory=dict)  # begin and end in the memory
    # what is there, or on its way: where it was read from, and when it has come
    present: dict[MemoryPlace, tuple[StoredTensors, "Future[None] | None"]] = field(default_factory=dict)
    unwritten: dict[tuple[MemoryPlace, StoredTensors, str], None] = field(
        default_factory=dict
    )  # with names, in order
    writing: "Future[None] | None" = None

    def room(self, place: MemoryPlace) -> Tensor:
        """The bytes of ``place``."""
        begin, end = self.rooms[place]
        return self.memory[begin:end]


class Mover:
    """The thread that moves bytes between memory and the store, and how long that took.

    Attributes:
        waited_seconds: How long was waited for what was read or written.
    """

    def __init__(self, device: torch.device) -> None:
        self.waited_seconds = 0.0
        self._device = device
        self._moved: dict[Direction, tuple[int, float]] = {}  # bytes, and seconds that they took
        self._thread = ThreadPoolExecutor(1, "popdist-phases")
        self.close = weakref.finalize(self, self._thread.shutdown, wait=True)

    def start(self, direction: Direction, moves: Sequence[Move]) -> "Future[None]":
        """Begin to read or write, when all has happened that this thread has asked of the device."""
        ready = recorded(self._device)

        def move() -> None:
            start = perf_counter()
            transfers = [getattr(file, direction)(place, memory, ready) for file, place, memory in moves]
            for transfer in transfers:
                transfer.wait()
            num_bytes, seconds = self._moved.get(direction, (0, 0.0))
            num_bytes += sum(len(memory) for _, _, memory in moves)
            self._moved[direction] = (num_bytes, seconds + perf_counter() - start)

        return self._thread.submit(move)

    def wait_for(self, moving: "Future[None]") -> None:
        """Wait until a move is done; raises what has failed in it."""
        start = perf_counter()
        try:
            moving.result()
        finally:
            self.waited_seconds += perf_counter() - start

    def bytes_per_second(self, direction: Direction) -> float:
        """Return the speed of the store until now; infinite if nothing was moved."""
        num_bytes, seconds = self._moved.get(direction, (0, 0.0))
        return num_bytes / seconds if seconds else inf


class PhaseMemory:
    """Which phases are in memory, and what is on its way between memory and the store.

    Attributes:
        addresses: Of each place, all that may come there; the first address of weights is that of all passes.
        wanted_back: Gives what a backward pass, or one of updates, needs of a piece beside its weights.
        phases: The phases in the order of the forward pass.
        resident: The phase that never leaves.
        phase_seconds: What each phase took in the last step, computing and waiting.
    """

    def __init__(
        self,
        layers: PhasedLayers,
        device: torch.device,
        wanted_back: Callable[[PhasePiece], Wanted] = lambda _: {},
    ) -> None:
        self.layers = layers
        self.device = device
        self.mover = Mover(device)
        self.addresses: dict[MemoryPlace, list[StoredTensors]] = {}
        self.wanted_back = wanted_back
        self.phases: list[Phase] = []
        self.resident = Phase(units=(), pieces=layers.resident)
        self.phase_seconds: list[float] = []
        self._counted: float | None = None  # until when they are counted; None between steps
        self._slots: list[_Slot] = []
        self._current: tuple[Phase, bool] | None = None  # the phase whose weights are bound, and whether backwards

    def size(self, what: What, piece: int) -> int:
        """Return the bytes of a place."""
        return max((it.num_bytes for it in self.addresses.get(MemoryPlace(what, piece), ())), default=0)

    def cut(self, phases: Iterable[Sequence[int]]) -> None:
        """Let these be the phases: the units of each, in the order of the forward pass."""
        self.wait()
        self._unbind()
        self.phases = [
            Phase(
                units=(*units,), pieces=tuple(it for it in self.layers.pieces if not {*units}.isdisjoint(it.units))
            )
            for units in phases
        ]
        self.place_anew()

    def place_anew(self) -> None:
        """Make slots for the phases and all addresses that there are now."""
        self.wait()
        self._unbind()
        self._slots = []
        give_back_memory(self.device)  # the slots that were there before
        sizes = [self._rooms(phase)[1] for phase in self.phases]
        most = [max(part) for part in (sizes[::2], sizes[1::2]) if part]
        most += [self._rooms(self.resident)[1]] if self.resident.pieces else []
        self._slots = [_Slot(memory=make_buffer(num_bytes, self.device)) for num_bytes in most]
        if self.resident.pieces:
            self._place(self._slots[-1], self.resident)
            self._bring(self._slots[-1], self._wanted(self.resident, backward=False))
            self._bind(self._slots[-1])

    def phase_of(self, unit: int) -> Phase:
        """Return the phase of a unit."""
        return next(phase for phase in self.phases if unit in phase.units)

    def last_phase(self, piece: PhasePiece) -> Phase:
        """Return the phase in whose backward pass the gradient of ``piece`` is complete."""
        return next((phase for phase in self.phases if piece in phase.pieces), self.resident)

    def _rooms(self, phase: Phase) -> tuple[dict[MemoryPlace, tuple[int, int]], int]:
        """Return the room in a slot of each place of ``phase``, and the bytes of all rooms."""
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
        """Count from now on what each phase takes."""
        self.phase_seconds, self._counted = [0.0] * len(self.phases), perf_counter()

    def end_step(self) -> None:
        """Stop counting the time of each phase."""
        self._count()
        self._counted = None

    def _count(self) -> None:
        """Add the time until now to that of the phase in memory."""
        if self._counted is not None and self._current is not None:
            now = perf_counter()
            self.phase_seconds[self.phases.index(self._current[0])] += now - self._counted
            self._counted = now

    def enter(self, phase: Phase, *, backward: bool, will_return: bool = False) -> None:
        """Have ``phase`` in memory, and begin to read the one that comes behind it.

        ``will_return`` says that a backward pass will follow this forward pass.
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
        """Begin to read what comes behind ``phase``; where a pass turns, the phase before it stays."""
        number = self.phases.index(phase)
        following = self.phases[:number][-1:] if backward else self.phases[number + 1 :][:1]
        for it in following:
            self._request(self._slot_for(it), self._wanted(it, backward=backward))
        if not following and will_return and not backward:
            for it in (phase, *self.phases[:number][-1:]):
                if (slot := self._slot_of(it)) is not None:
                    self._request(slot, self._wanted(it, backward=True))

    def _slot_of(self, phase: Phase) -> _Slot | None:
        return next((slot for slot in self._slots if slot.phase is phase), None)

    def _slot_for(self, phase: Phase) -> _Slot:
        """Return the slot that holds ``phase``; if no slot holds ``phase``, choose a slot for it."""
        slot = self._slot_of(phase)
        if slot is None:
            slot = self._slots[self.phases.index(phase) % 2]
            self._place(slot, phase)
        return slot

    def _wanted(self, phase: Phase, *, backward: bool) -> Wanted:
        """Return the places that a pass reads: weights; in the backward pass also places of complete gradients."""
        places = [MemoryPlace("weights", piece.index) for piece in phase.pieces]
        wanted = {place: self.addresses[place][0] for place in places}
        for piece in phase.pieces if backward else ():
            wanted |= self.wanted_back(piece) if self.last_phase(piece) is phase else {}
        return wanted

    def _place(self, slot: _Slot, phase: Phase) -> None:
        """Let ``slot`` hold ``phase``, whose tensors are read when all of the phase before is written."""
        self._write(slot)
        slot.phase = phase
        slot.present = {}
        slot.rooms, _ = self._rooms(phase)

    def _write(self, slot: _Slot) -> None:
        """Begin to write what was changed in ``slot``."""
        if slot.unwritten:
            slot.writing = self.mover.start("write", _joined(slot, slot.unwritten))
            slot.unwritten = {}

    def _request(self, slot: _Slot, wanted: Wanted) -> None:
        """Begin to read the tensors that are not in memory yet."""
        lacking = {place: it for place, it in wanted.items() if slot.present.get(place, (None,))[0] is not it}
        if not lacking:
            return
        self._write(slot)
        parts = [(place, it, name) for place, it in lacking.items() for name in it.offsets]
        reading = self.mover.start("read", _joined(slot, parts))
        slot.present |= {place: (it, reading) for place, it in lacking.items()}

    def _bring(self, slot: _Slot, wanted: Wanted) -> None:
        """Read the tensors that are not in memory yet, and wait until all tensors are in memory."""
        self._request(slot, wanted)
        for place, address in wanted.items():
            _, reading = slot.present[place]
            if reading is not None:
                try:
                    self.mover.wait_for(reading)
                except BaseException:
                    slot.present.clear()
                    raise
                slot.present[place] = (address, None)

    def _home(self, place: MemoryPlace) -> _Slot:
        """Return the slot that computes with ``place``."""
        is_resident = self.layers.pieces[place.piece] in self.resident.pieces or self._current is None
        phase = self.resident if is_resident or self._current is None else self._current[0]
        return next(slot for slot in self._slots if slot.phase is phase)

    def is_room(self, place: MemoryPlace, value: Tensor) -> bool:
        """Whether ``value`` begins where ``place`` does in the phase that computes."""
        return place in self.addresses and self._home(place).room(place).data_ptr() == value.data_ptr()

    def load(self, place: MemoryPlace, address: StoredTensors) -> Tensor:
        """Return ``place``, which may be written, with what is in the store at ``address``; waits for that."""
        self._bring(self._home(place), {place: address})
        return self.room(place)

    def room(self, place: MemoryPlace) -> Tensor:
        """Return the bytes of ``place``, of which nothing is on its way: they may be written."""
        slot = self._home(place)
        self._wait_for_writing(slot)
        _, reading = slot.present.pop(place, (None, None))
        if reading is not None:
            self.mover.wait_for(reading)
        return slot.room(place)

    def write_behind(self, place: MemoryPlace, address: StoredTensors, names: Iterable[str] | None = None) -> None:
        """Note that the tensors of ``address``, or some of them, have changed in ``place``."""
        home = self._home(place)
        home.present[place] = (address, None)
        home.unwritten |= {(place, address, name): None for name in (address.offsets if names is None else names)}
        for slot in self._slots:
            if slot is not home:
                slot.present.pop(place, None)

    def begin_writing(self) -> None:
        """Begin to write all that has changed."""
        for slot in self._slots:
            self._write(slot)

    def wait(self) -> None:
        """Wait until all that has changed is written."""
        self.begin_writing()
        for slot in self._slots:
            self._wait_for_writing(slot)

    def _wait_for_writing(self, slot: _Slot) -> None:
        writing, slot.writing = slot.writing, None
        if writing is not None:
            self.mover.wait_for(writing)

    def forget(self, what: What, pieces: Iterable[PhasePiece]) -> None:
        """Read the places of ``pieces`` anew when they are needed next: another instance has written them."""
        for piece in pieces:
            for slot in self._slots:
                slot.present.pop(MemoryPlace(what, piece.index), None)
        self._unbind()
        if self.resident.pieces:
            self._bring(self._slots[-1], self._wanted(self.resident, backward=False))

    def _bind(self, slot: _Slot) -> None:
        """Let the weights of the phase in ``slot`` be there."""
        for piece in () if slot.phase is None else slot.phase.pieces:
            place = MemoryPlace("weights", piece.index)
            views = self.addresses[place][0].views(slot.room(place))
            for name, parameter in piece.named:
                set_data(parameter, views[name])

    def _unbind(self) -> None:
        """Take the memory of the weights of the current phase away."""
        for piece in () if self._current is None else self._current[0].pieces:
            for parameter in piece.parameters:
                make_absent(parameter, self.device)
        self._current = None

    def close(self) -> None:
        """End the thread; what was not written is lost."""
        self._unbind()
        self.mover.close()


def _joined(slot: _Slot, parts: Iterable[tuple[MemoryPlace, StoredTensors, str]]) -> list[Move]:
    """Return the moves; neighbours in the file and in memory are joined to one move."""
    found: list[tuple[StoreFile, Region, int]] = []
    wanted = [
        (address.file, address.regions[name], slot.rooms[place][0] + address.offsets[name])
        for place, address, name in parts
    ]
    for file, region, begin in sorted(wanted, key=lambda part: (id(part[0]), part[1].start)):
        if found and found[-1][0] is file:
            _, last, first = found[-1]
            if last.end == region.start and first + last.length == begin:
                found[-1] = (file, Region(start=last.start, num_bytes=region.end - last.start), first)
                continue
        found.append((file, region, begin))
    return [(file, region.start, slot.memory[begin : begin + region.length]) for file, region, begin in found]
