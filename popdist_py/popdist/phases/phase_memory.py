"""The memory of phases: two slots, of which one is read ahead and written behind while the other one computes.

A phase is a run of units whose weights are in memory together. A slot holds what one phase needs: its weights, the
optimizer's state of those that this instance updates, and room for a partial sum of their gradients.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from time import perf_counter
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from popdist.phases.phase_store import StoredTensors
from popdist.phases.phased_layers import PhasedLayers, PhasePiece, make_absent, set_data
from popdist.phases.store_file import Ready, Region, StoreFile, make_buffer, recorded
from popdist.phases.used_memory import give_back_memory

What: TypeAlias = Literal["weights", "state", "sum"]

Place: TypeAlias = tuple[What, int]
"""What may be in memory: the weights of a piece, the optimizer's state of it, or a sum of its gradients."""

RESIDENT = -1
"""The number of the phase that never leaves: the weights that no unit has by itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Address:
    """Where tensors of one piece wait in a file, by name, and lie together in one place of the memory."""

    place: Place
    stored: StoredTensors
    offsets: dict[str, int]  # of each tensor in the place
    num_bytes: int

    @classmethod
    def of(cls, place: Place, stored: StoredTensors, names: Sequence[str]) -> Self:
        """Return the address of the tensors ``names`` of ``stored``."""
        ends = [0, *accumulate(stored.regions[name].length for name in names)]
        return cls(place=place, stored=stored, offsets=dict(zip(names, ends, strict=False)), num_bytes=ends[-1])

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors by name, in the ``memory`` of their place."""
        return {name: self.stored.forms[name].view(memory[begin:]) for name, begin in self.offsets.items()}


@dataclass(kw_only=True, eq=False)
class _Slot:
    """Memory that holds a phase."""

    memory: Tensor
    phase: int | None = None
    rooms: dict[Place, tuple[int, int]] = field(default_factory=dict)  # begin and end in the memory
    # what is there, or on its way: where it was read from, and when it has come
    present: dict[Place, tuple[Address, "Future[None] | None"]] = field(default_factory=dict)
    unwritten: dict[tuple[Address, str], None] = field(default_factory=dict)  # names of tensors, in order
    writing: "Future[None] | None" = None

    def room(self, place: Place) -> Tensor:
        """The bytes of ``place``."""
        begin, end = self.rooms[place]
        return self.memory[begin:end]


class PhaseMemory:
    """Which phases are in memory, and what is on its way between memory and the store.

    Attributes:
        addresses: Of each place, all that may come there; the first address of weights is that of all passes.
        wanted_back: Gives what a backward pass, or one of updates, needs of a piece beside its weights.
        phases: The units of each phase.
        phase_of: The phase of each unit.
        waited_seconds: How long was waited for what was read or written.
        phase_seconds: What each phase took in the last step, computing and waiting.
    """

    wanted_back: Callable[[PhasePiece], Iterable[Address]]

    def __init__(self, layers: PhasedLayers, device: torch.device) -> None:
        self.layers = layers
        self.device = device
        self.addresses: dict[Place, list[Address]] = {}
        self.phases: list[tuple[int, ...]] = []
        self.phase_of: dict[int, int] = {}
        self.waited_seconds = 0.0
        self.phase_seconds: list[float] = []
        self._counted: float | None = None  # until when they are counted; None between steps
        self._moved = {"read": (0, 0.0), "write": (0, 0.0)}  # bytes, and seconds that they took
        self._slots: list[_Slot] = []
        self._current: tuple[int, bool] | None = None  # the phase whose weights are bound, and whether backwards
        self._mover = ThreadPoolExecutor(1, "popdist-phases")
        self._end = weakref.finalize(self, self._mover.shutdown, wait=True)

    def size(self, what: What, piece: int) -> int:
        """Return the bytes of a place."""
        return max((it.num_bytes for it in self.addresses.get((what, piece), ())), default=0)

    def cut(self, phases: Sequence[Sequence[int]]) -> None:
        """Let these be the phases: the units of each, in the order of the forward pass."""
        self.wait()
        self._unbind()
        self.phases = [tuple(it) for it in phases]
        self.phase_of = {unit: number for number, units in enumerate(self.phases) for unit in units}
        self._slots = []
        give_back_memory(self.device)  # the slots that were there before
        sizes = [self._rooms(number)[1] for number in range(len(self.phases))]
        most = [max(part) for part in (sizes[::2], sizes[1::2]) if part]
        most += [self._rooms(RESIDENT)[1]] if self.layers.resident else []
        self._slots = [_Slot(memory=make_buffer(num_bytes, self.device)) for num_bytes in most]
        if self.layers.resident:
            self._place(self._slots[-1], RESIDENT)
            self._bring(self._slots[-1], self._wanted(RESIDENT, backward=False))
            self._bind(self._slots[-1], RESIDENT)

    def pieces_of(self, phase: int) -> list[PhasePiece]:
        """The pieces that the units of a phase use."""
        if phase == RESIDENT:
            return [*self.layers.resident]
        units = set(self.phases[phase])
        return [piece for piece in self.layers.pieces if not units.isdisjoint(piece.units)]

    def last_phase(self, piece: PhasePiece) -> int:
        """The phase in whose backward pass the gradient of ``piece`` is complete."""
        return min((self.phase_of[unit] for unit in piece.units), default=RESIDENT)

    def _rooms(self, phase: int) -> tuple[dict[Place, tuple[int, int]], int]:
        """Where in a slot each place of ``phase`` is, and the bytes of all."""
        pieces, position = self.pieces_of(phase), 0
        rooms: dict[Place, tuple[int, int]] = {}
        whats: tuple[What, ...] = ("weights", "state", "sum")
        for what in whats:
            for piece in pieces:
                place = (what, piece.index)
                if place in self.addresses and (what == "weights" or self.last_phase(piece) == phase):
                    rooms[place] = (position, position + self.size(*place))
                    position += self.size(*place)
        return rooms, position

    def begin_step(self) -> None:
        """Count from now on what each phase takes."""
        self.phase_seconds, self._counted = [0.0] * len(self.phases), perf_counter()

    def end_step(self) -> None:
        """Count no longer."""
        self._count()
        self._counted = None

    def _count(self) -> None:
        """Add the time until now to that of the phase in memory."""
        if self._counted is not None and self._current is not None:
            now = perf_counter()
            self.phase_seconds[self._current[0]] += now - self._counted
            self._counted = now

    def enter(self, phase: int, *, backward: bool, will_return: bool = False) -> None:
        """Have ``phase`` in memory, and begin to read the one that comes behind it.

        ``will_return`` says that a backward pass will follow this forward pass.
        """
        if phase == RESIDENT or (phase, backward) == self._current:
            return
        slot, wanted = self._slot_for(phase), self._wanted(phase, backward=backward)
        self._count()
        is_bound = self._current is not None and self._current[0] == phase
        if not is_bound:
            self._unbind()
        self._request(slot, wanted)
        self._read_ahead(phase, backward=backward, will_return=will_return)
        self._bring(slot, wanted)
        if not is_bound:
            self._bind(slot, phase)
        self._current = (phase, backward)

    def _read_ahead(self, phase: int, *, backward: bool, will_return: bool) -> None:
        """Begin to read what comes behind ``phase``; where a pass turns, the phase before it stays."""
        following = phase + (-1 if backward else 1)
        if 0 <= following < len(self.phases):
            self._request(self._slot_for(following), self._wanted(following, backward=backward))
        elif will_return and not backward:
            for number in (phase, phase - 1):
                if (slot := self._slot_of(number)) is not None and number >= 0:
                    self._request(slot, self._wanted(number, backward=True))

    def _slot_of(self, phase: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.phase == phase), None)

    def _slot_for(self, phase: int) -> _Slot:
        """The slot that holds ``phase``, from now on if none did."""
        slot = self._slot_of(phase)
        if slot is None:
            slot = self._slots[phase % 2]
            self._place(slot, phase)
        return slot

    def _wanted(self, phase: int, *, backward: bool) -> list[Address]:
        """What a pass reads: the weights, and backwards what is used when gradients are complete."""
        pieces = self.pieces_of(phase)
        wanted = [self.addresses["weights", piece.index][0] for piece in pieces]
        for piece in pieces if backward else ():
            wanted += self.wanted_back(piece) if self.last_phase(piece) == phase else ()
        return wanted

    def _place(self, slot: _Slot, phase: int) -> None:
        """Let ``slot`` hold ``phase``, whose tensors are read when all of the phase before is written."""
        self._write(slot)
        slot.phase = phase
        slot.present = {}
        slot.rooms, _ = self._rooms(phase)

    def _write(self, slot: _Slot) -> None:
        """Begin to write what was changed in ``slot``."""
        if slot.unwritten:
            moves, ready = _joined(slot, slot.unwritten), recorded(self.device)
            slot.writing = self._mover.submit(self._move, "write", moves, ready)
            slot.unwritten = {}

    def _request(self, slot: _Slot, wanted: Iterable[Address]) -> None:
        """Begin to read what is not there yet."""
        lacking = [it for it in wanted if it.place not in slot.present or slot.present[it.place][0] is not it]
        if not lacking:
            return
        self._write(slot)
        parts = [(address, name) for address in lacking for name in address.offsets]
        moves, ready = _joined(slot, parts), recorded(self.device)
        reading = self._mover.submit(self._move, "read", moves, ready)
        slot.present |= {address.place: (address, reading) for address in lacking}

    def _bring(self, slot: _Slot, wanted: Sequence[Address]) -> None:
        """Read what is not there yet, and wait until all of it is there."""
        self._request(slot, wanted)
        for address in wanted:
            _, reading = slot.present[address.place]
            if reading is not None:
                try:
                    self._wait_for(reading)
                except BaseException:
                    slot.present.clear()
                    raise
                slot.present[address.place] = (address, None)

    def _home(self, place: Place) -> _Slot:
        """The slot that computes with ``place``."""
        is_resident = not self.layers.pieces[place[1]].units
        phase = RESIDENT if is_resident or self._current is None else self._current[0]
        return next(slot for slot in self._slots if slot.phase == phase)

    def is_room(self, place: Place, value: Tensor) -> bool:
        """Whether ``value`` begins where ``place`` does in the phase that computes."""
        return place in self.addresses and self._home(place).room(place).data_ptr() == value.data_ptr()

    def load(self, address: Address) -> Tensor:
        """Return the place of ``address``, which may be written, with what is in the store; waits for that."""
        self._bring(self._home(address.place), [address])
        return self.room(address.place)

    def room(self, place: Place) -> Tensor:
        """Return the bytes of ``place``, of which nothing is on its way: they may be written."""
        slot = self._home(place)
        if slot.writing is not None:
            self._wait_for(slot.writing)
            slot.writing = None
        _, reading = slot.present.pop(place, (None, None))
        if reading is not None:
            self._wait_for(reading)
        return slot.room(place)

    def write_behind(self, address: Address, names: Iterable[str] | None = None) -> None:
        """Note that the tensors at ``address``, or some of them, have changed in their place."""
        home = self._home(address.place)
        home.present[address.place] = (address, None)
        home.unwritten |= {(address, name): None for name in (address.offsets if names is None else names)}
        for slot in self._slots:
            if slot is not home:
                slot.present.pop(address.place, None)

    def begin_writing(self) -> None:
        """Begin to write all that has changed."""
        for slot in self._slots:
            self._write(slot)

    def wait(self) -> None:
        """Wait until all that has changed is written."""
        self.begin_writing()
        for slot in self._slots:
            if slot.writing is not None:
                writing, slot.writing = slot.writing, None
                self._wait_for(writing)

    def _wait_for(self, moving: "Future[None]") -> None:
        start = perf_counter()
        try:
            moving.result()
        finally:
            self.waited_seconds += perf_counter() - start

    def _move(self, kind: Literal["read", "write"], moves: "Sequence[Move]", ready: Ready) -> None:
        """Read or write, one after another in a thread, and note how fast that was."""
        start = perf_counter()
        transfers = [getattr(file, kind)(place, memory, ready) for file, place, memory in moves]
        for transfer in transfers:
            transfer.wait()
        num_bytes, seconds = self._moved[kind]
        num_bytes += sum(len(memory) for _, _, memory in moves)
        self._moved[kind] = (num_bytes, seconds + perf_counter() - start)

    def bytes_per_second(self, kind: Literal["read", "write"]) -> float:
        """How fast the store was until now; infinite if it was not asked."""
        num_bytes, seconds = self._moved[kind]
        return num_bytes / seconds if seconds else inf

    def forget(self, what: What, pieces: Iterable[PhasePiece]) -> None:
        """Read the places of ``pieces`` anew when they are needed next: another instance has written them."""
        for piece in pieces:
            for slot in self._slots:
                slot.present.pop((what, piece.index), None)
        self._unbind()
        if self.layers.resident:
            self._bring(self._slots[-1], self._wanted(RESIDENT, backward=False))

    def _bind(self, slot: _Slot, phase: int) -> None:
        """Let the weights of ``phase`` be in ``slot``."""
        for piece in self.pieces_of(phase):
            place: Place = ("weights", piece.index)
            views = self.addresses[place][0].views(slot.room(place))
            for name, parameter in piece.named:
                set_data(parameter, views[name])

    def _unbind(self) -> None:
        """Take the memory of the weights of the current phase away."""
        for piece in [] if self._current is None else self.pieces_of(self._current[0]):
            for parameter in piece.parameters:
                make_absent(parameter, self.device)
        self._current = None

    def close(self) -> None:
        """End the thread; what was not written is lost."""
        self._unbind()
        self._end()


Move = tuple[StoreFile, int, Tensor]
"""Bytes of a file from a place on, and the memory that they are read into or written from."""


def _joined(slot: _Slot, parts: Iterable[tuple[Address, str]]) -> list[Move]:
    """What is to be moved, where neighbours in the file and in memory are moved together."""
    found: list[tuple[StoreFile, Region, int]] = []
    wanted = [
        (address.stored.file, address.stored.regions[name], slot.rooms[address.place][0] + address.offsets[name])
        for address, name in parts
    ]
    for file, region, begin in sorted(wanted, key=lambda part: (id(part[0]), part[1].start)):
        if found and found[-1][0] is file:
            _, last, first = found[-1]
            if last.end == region.start and first + last.length == begin:
                found[-1] = (file, Region(start=last.start, num_bytes=region.end - last.start), first)
                continue
        found.append((file, region, begin))
    return [(file, region.start, slot.memory[begin : begin + region.length]) for file, region, begin in found]
