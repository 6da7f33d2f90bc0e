"""The memory of phases: two slots, of which one is read ahead and written behind while the other one computes.

A phase is a run of units whose weights are in memory together. A slot holds what one phase needs: its weights, the
optimizer's state of those that this instance updates, and room for a partial sum of their gradients.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from popdist.phases.phase_layout import Region
from popdist.phases.phase_store import StoredTensors
from popdist.phases.phased_layers import PhasedLayers, PhasePiece, make_absent
from popdist.phases.store_file import StoreFile, make_buffer

What: TypeAlias = Literal["weights", "state", "sum"]

RESIDENT = -1
"""The number of the phase that never leaves: the weights that no unit has by itself."""


class Content(NamedTuple):
    """What may be in memory: the weights of a piece, the optimizer's state of it, or a partial sum."""

    what: What
    piece: int


class FileRange(NamedTuple):
    """Where some of a content lies: in a file, and from which byte of the content on."""

    file: StoreFile
    region: Region
    offset: int


Ranges: TypeAlias = tuple[FileRange, ...]


@dataclass(kw_only=True, eq=False)
class _Slot:
    """Memory that holds a phase."""

    memory: Tensor
    phase: int | None = None
    places: dict[Content, tuple[int, int]] = field(default_factory=dict)  # begin and end in the memory
    # what is there, or on its way: where it was read from, and when it has come
    present: dict[Content, tuple[Ranges, "Future[None] | None"]] = field(default_factory=dict)
    unwritten: list[tuple[Content, FileRange]] = field(default_factory=list)
    writing: "Future[None] | None" = None

    def room(self, content: Content) -> Tensor:
        """The bytes of ``content``."""
        begin, end = self.places[content]
        return self.memory[begin:end]


class PhaseMemory:
    """Which phases are in memory, and what is on its way between memory and the store."""

    def __init__(
        self,
        layers: PhasedLayers,
        device: torch.device,
        bind: Callable[[PhasePiece, Tensor], None],
        wanted_back: Callable[[PhasePiece], Iterable[tuple[Content, Ranges]]],
    ) -> None:
        """``bind`` lets weights have these bytes; ``wanted_back`` is what a backward pass reads beside weights."""
        self.layers = layers
        self.device = device
        self.sizes: dict[Content, int] = {}  # of all that may be in memory
        self.stored: dict[Content, Ranges] = {}  # of weights: where they lie
        self.phases: list[tuple[int, ...]] = []  # the units of each
        self.phase_of: dict[int, int] = {}  # by unit
        self._bind = bind
        self._wanted_back = wanted_back
        self._slots: list[_Slot] = []
        self._current: tuple[int, bool] | None = None
        self._bound: list[PhasePiece] = []
        self.waited_seconds = 0.0  # for what was read or written
        self.phase_seconds: list[float] = []  # of each phase in the last step, computing and waiting
        self._counted: float | None = None  # until when they are counted; None between steps
        self._moved = {"read": (0, 0.0), "write": (0, 0.0)}  # bytes, and seconds that they took
        self._mover = ThreadPoolExecutor(1, "popdist-phases")
        self._end = weakref.finalize(self, self._mover.shutdown, wait=True)

    def cut(self, phases: Sequence[Sequence[int]]) -> None:
        """Let these be the phases: the units of each, in the order of the forward pass."""
        self.wait()
        self._unbind()
        self.phases = [tuple(it) for it in phases]
        self.phase_of = {unit: number for number, units in enumerate(self.phases) for unit in units}
        self._current = None
        self._slots = []
        sizes = [self._places(number)[1] for number in range(len(self.phases))]
        most = [max(part) for part in (sizes[::2], sizes[1::2]) if part]
        most += [self._places(RESIDENT)[1]] if self.layers.resident else []
        self._slots = [_Slot(memory=make_buffer(num_bytes, self.device)) for num_bytes in most]
        if self.layers.resident:
            slot = self._slots[-1]
            self._place(slot, RESIDENT)
            self._read_resident(slot)
            for piece in self.layers.resident:
                self._bind(piece, slot.room(Content("weights", piece.index)))

    def _read_resident(self, slot: _Slot) -> None:
        """Read what is not there of the weights that stay in memory."""
        wanted = self._wanted(RESIDENT, backward=False)
        self._request(slot, wanted)
        self._arrive(slot, wanted)

    def pieces_of(self, phase: int) -> list[PhasePiece]:
        """The pieces that the units of a phase use."""
        if phase == RESIDENT:
            return [*self.layers.resident]
        units = set(self.phases[phase])
        return [piece for piece in self.layers.pieces if not units.isdisjoint(piece.units)]

    def last_phase(self, piece: PhasePiece) -> int:
        """The phase in whose backward pass the gradient of ``piece`` is complete."""
        return min((self.phase_of[unit] for unit in piece.units), default=RESIDENT)

    def _places(self, phase: int) -> tuple[dict[Content, tuple[int, int]], int]:
        """Where in a slot each content of ``phase`` is, and the bytes of all."""
        pieces, position = self.pieces_of(phase), 0
        places = {}
        for what in ("weights", "state", "sum"):
            for piece in pieces:
                content = Content(what, piece.index)
                if content in self.sizes and (what == "weights" or self.last_phase(piece) == phase):
                    places[content] = (position, position + self.sizes[content])
                    position += self.sizes[content]
        return places, position

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
        slot = self._slot_for(phase)
        if self._current_phase != phase:
            self._unbind()
        self._count()
        self._current = (phase, backward)
        wanted = self._wanted(phase, backward=backward)
        self._request(slot, wanted)
        self._read_ahead(phase, backward=backward, will_return=will_return)
        self._arrive(slot, wanted)
        if not self._bound:
            self._bound = self.pieces_of(phase)
            for piece in self._bound:
                self._bind(piece, slot.room(Content("weights", piece.index)))

    def _read_ahead(self, phase: int, *, backward: bool, will_return: bool) -> None:
        """Begin to read what comes behind ``phase``; where a pass turns, the phase before it stays."""
        following = phase + (-1 if backward else 1)
        if 0 <= following < len(self.phases):
            self._request(self._slot_for(following), self._wanted(following, backward=backward))
        elif will_return and not backward:
            for number in (phase, phase - 1):
                if (slot := self._slot_of(number)) is not None and number >= 0:
                    self._request(slot, self._wanted(number, backward=True))

    @property
    def _current_phase(self) -> int | None:
        return None if self._current is None else self._current[0]

    def _slot_of(self, phase: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.phase == phase), None)

    def _slot_for(self, phase: int) -> _Slot:
        """The slot that holds ``phase``, from now on if none did."""
        slot = self._slot_of(phase)
        if slot is None:
            slot = self._slots[phase % 2]
            self._place(slot, phase)
        return slot

    def _wanted(self, phase: int, *, backward: bool) -> list[tuple[Content, Ranges]]:
        """What a pass reads: the weights, and backwards what is used when gradients are complete."""
        pieces = self.pieces_of(phase)
        contents = [Content("weights", piece.index) for piece in pieces]
        wanted = [(content, self.stored[content]) for content in contents]
        if backward:
            complete = (piece for piece in pieces if self.last_phase(piece) == phase)
            wanted += [it for piece in complete for it in self._wanted_back(piece)]
        return wanted

    def _place(self, slot: _Slot, phase: int) -> None:
        """Let ``slot`` hold ``phase``, whose contents are read when all of the phase before is written."""
        self._write(slot)
        slot.phase = phase
        slot.present = {}
        slot.places, _ = self._places(phase)

    def _write(self, slot: _Slot) -> None:
        """Begin to write what was changed in ``slot``."""
        moves, slot.unwritten = _joined(slot, [(content, (it,)) for content, it in slot.unwritten]), []
        if moves:
            slot.writing = self._mover.submit(self._move, "write", moves)

    def _request(self, slot: _Slot, wanted: Sequence[tuple[Content, Ranges]]) -> None:
        """Begin to read what is not there yet."""
        lacking = [it for it in wanted if slot.present.get(it[0], ((), None))[0] != it[1]]
        if not lacking:
            return
        if slot.writing is not None or slot.unwritten:
            self._write(slot)
        reading = self._mover.submit(self._move, "read", _joined(slot, lacking))
        for content, ranges in lacking:
            slot.present[content] = (ranges, reading)

    def _arrive(self, slot: _Slot, wanted: Sequence[tuple[Content, Ranges]]) -> None:
        """Wait until it is there."""
        for content, _ in wanted:
            ranges, reading = slot.present[content]
            if reading is not None:
                try:
                    self._wait_for(reading)
                except BaseException:
                    slot.present.clear()
                    raise
                slot.present[content] = (ranges, None)

    def _home(self, content: Content) -> _Slot:
        resident = not self.layers.pieces[content.piece].units
        phase = RESIDENT if resident else self._current_phase
        return next(slot for slot in self._slots if slot.phase == phase)

    def is_room(self, content: Content, value: Tensor) -> bool:
        """Whether ``value`` begins where ``content`` does in the phase that computes."""
        return content in self.sizes and self._home(content).room(content).data_ptr() == value.data_ptr()

    def load(self, content: Content, ranges: Ranges) -> Tensor:
        """The bytes of ``content`` as they lie in the store; waits for them."""
        slot = self._home(content)
        self._request(slot, [(content, ranges)])
        self._arrive(slot, [(content, ranges)])
        return slot.room(content)

    def make_writable(self, content: Content) -> Tensor:
        """The bytes of ``content``, of which nothing is on its way: they may be written."""
        slot = self._home(content)
        if slot.writing is not None:
            self._wait_for(slot.writing)
            slot.writing = None
        _, reading = slot.present.pop(content, ((), None))
        if reading is not None:
            self._wait_for(reading)
        return slot.room(content)

    def write_behind(self, content: Content, ranges: Iterable[FileRange], whole: Ranges) -> None:
        """Note that these parts of ``content`` have changed; all of it lies at ``whole`` when they are written."""
        home = self._home(content)
        home.present[content] = (whole, None)
        home.unwritten.extend((content, it) for it in ranges)
        for slot in self._slots:
            if slot is not home:
                slot.present.pop(content, None)

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

    def _move(self, kind: Literal["read", "write"], moves: "Sequence[Move]") -> None:
        """Read or write, one after another in a thread, and note how fast that was."""
        start = perf_counter()
        transfers = [getattr(file, kind)(place, memory) for file, place, memory in moves]
        for transfer in transfers:
            transfer.wait()
        num_bytes, seconds = self._moved[kind]
        num_bytes += sum(len(memory) for _, _, memory in moves)
        self._moved[kind] = (num_bytes, seconds + perf_counter() - start)

    def bytes_per_second(self, kind: Literal["read", "write"]) -> float:
        """How fast the store was until now; infinite if it was not asked."""
        num_bytes, seconds = self._moved[kind]
        return num_bytes / seconds if seconds else inf

    def forget(self, contents: Iterable[Content]) -> None:
        """Read these anew when they are needed next: another instance has written them."""
        forgotten = {*contents}
        for slot in self._slots:
            for content in forgotten & slot.present.keys():
                del slot.present[content]
        self._current = None
        self._unbind()
        if self.layers.resident:
            self._read_resident(self._slots[-1])

    def _unbind(self) -> None:
        for piece in self._bound:
            for parameter in piece.parameters:
                make_absent(parameter)
        self._bound = []

    def close(self) -> None:
        """End the thread; what was not written is lost."""
        self._unbind()
        self._end()


Move = tuple[StoreFile, int, Tensor]
"""Bytes of a file from a place on, and the memory that they are read into or written from."""


def _joined(slot: _Slot, wanted: Sequence[tuple[Content, Ranges]]) -> list[Move]:
    """What is to be moved, where neighbours in the file and in memory are moved together."""
    found: list[tuple[StoreFile, Region, int]] = []
    parts = [
        (it.file, it.region, slot.places[content][0] + it.offset) for content, ranges in wanted for it in ranges
    ]
    for file, region, begin in sorted(parts, key=lambda part: (id(part[0]), part[1].start)):
        if found and found[-1][0] is file:
            last = found[-1][1]
            if last.end == region.start and found[-1][2] + last.length == begin:
                joined = Region(start=last.start, num_bytes=region.end - last.start)
                found[-1] = (file, joined, found[-1][2])
                continue
            if last.start <= region.start < last.end:  # the same once more
                continue
        found.append((file, region, begin))
    return [(file, region.start, slot.memory[begin : begin + region.length]) for file, region, begin in found]


class StoredPieces:
    """Tensors of each piece that wait in one file, and come into the memory of one content together."""

    def __init__(
        self, what: What, memory: PhaseMemory, stored: StoredTensors, names: Mapping[int, Sequence[str]]
    ) -> None:
        self.stored = stored
        self._what = what
        self._memory = memory
        self._offsets = dict[int, dict[str, int]]()  # of each in the memory of its piece
        self.num_bytes = dict[int, int]()  # of the memory of each piece
        for piece, own in names.items():
            ends = [0, *accumulate(stored.regions[name].length for name in own)]
            self._offsets[piece] = dict(zip(own, ends, strict=False))
            self.num_bytes[piece] = ends[-1]

    def ranges(self, piece: int, names: Iterable[str] | None = None) -> Ranges:
        """Where those of a piece lie in the store, or some of them."""
        file, regions, offsets = self.stored.file, self.stored.regions, self._offsets[piece]
        return tuple(FileRange(file, regions[it], offsets[it]) for it in (offsets if names is None else names))

    def load(self, piece: int) -> dict[str, Tensor]:
        """Those of a piece by name, in memory that may be written."""
        self._memory.load(Content(self._what, piece), self.ranges(piece))
        return self.room(piece)

    def room(self, piece: int) -> dict[str, Tensor]:
        """Memory for those of a piece, by name."""
        return self.views(piece, self._memory.make_writable(Content(self._what, piece)))

    def views(self, piece: int, memory: Tensor) -> dict[str, Tensor]:
        """Those of a piece, by name, in its ``memory``."""
        forms = self.stored.forms
        return {name: forms[name].view(memory[begin:]) for name, begin in self._offsets[piece].items()}

    def write_behind(self, piece: int, names: Iterable[str] | None = None) -> None:
        """Write those of a piece, or some of them, from its memory."""
        self._memory.write_behind(Content(self._what, piece), self.ranges(piece, names), self.ranges(piece))


class StoredSums:
    """Where sums of gradients wait."""

    def __init__(self, memory: PhaseMemory, stored: StoredTensors, first_plane: int) -> None:
        self._memory = memory
        self._stored = stored
        self._first_plane = first_plane  # of this instance

    def room(self, piece: int) -> Tensor:
        """The room of a piece, which may be written."""
        return self._memory.make_writable(Content("sum", piece))

    def is_room(self, piece: int, value: Tensor) -> bool:
        """Whether ``value`` lies in the room of a piece."""
        return self._memory.is_room(Content("sum", piece), value)

    def load(self, piece: int, plane: int) -> Tensor:
        """The room of a piece with the sum that waits in ``plane``."""
        self._memory.load(Content("sum", piece), self.ranges(piece, plane))
        return self.room(piece)

    def keep(self, piece: int, plane: int) -> None:
        """Let the sum that is in the room of a piece wait in ``plane``."""
        ranges = self.ranges(piece, plane)
        self._memory.write_behind(Content("sum", piece), ranges, ranges)

    def ranges(self, piece: int, plane: int) -> Ranges:
        """Where a sum lies in the store."""
        return (FileRange(self._stored.file, self._stored.regions[f"{self._first_plane + plane}/{piece}"], 0),)
