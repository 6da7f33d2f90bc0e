"""What lies in a store beside weights: the optimizer's state, gradients, and sums of gradients, piece by piece."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from popdist.parallel.phase_layout import Form
from popdist.parallel.phase_memory import Content, FileRange, PhaseMemory, StoredTensors, What
from popdist.parallel.phase_store import PhaseStore
from popdist.parallel.phased_layers import PhasePiece

if TYPE_CHECKING:
    from popdist.parallel.phased_optimizer import PhasedOptimizer


class StoredPieces:
    """Tensors of each piece that wait in one file, and come into the memory of one content together."""

    def __init__(
        self, what: What, memory: PhaseMemory, stored: StoredTensors, names: Mapping[int, Iterable[str]]
    ) -> None:
        self.stored = stored
        self._what = what
        self._memory = memory
        self._places = {piece: stored.in_order(own) for piece, own in names.items()}

    def num_bytes(self, piece: int) -> int:
        """The memory that those of a piece need."""
        return self._places[piece][2]

    def ranges(self, piece: int) -> tuple[FileRange, ...]:
        """Where those of a piece lie in the store."""
        return self._places[piece][0]

    def load(self, piece: int) -> dict[str, Tensor]:
        """Those of a piece by name, in memory that may be written."""
        self._memory.load(Content(self._what, piece), self.ranges(piece))
        return self.room(piece)

    def room(self, piece: int) -> dict[str, Tensor]:
        """Memory for those of a piece, by name."""
        memory = self._memory.make_writable(Content(self._what, piece))
        return {
            name: self.stored.forms[name].view(memory[begin:]) for name, begin in self._places[piece][1].items()
        }

    def write_behind(self, piece: int) -> None:
        """Write those of a piece that are in memory."""
        self._memory.write_behind(Content(self._what, piece), self.ranges(piece), self.ranges(piece))


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
        content = Content("sum", piece)
        return content in self._memory.sizes and self._memory.bytes_of(content).data_ptr() == value.data_ptr()

    def load(self, piece: int, plane: int) -> Tensor:
        """The room of a piece with the sum that waits in ``plane``."""
        self._memory.load(Content("sum", piece), self.ranges(piece, plane))
        return self.room(piece)

    def keep(self, piece: int, plane: int) -> None:
        """Let the sum that is in the room of a piece wait in ``plane``."""
        ranges = self.ranges(piece, plane)
        self._memory.write_behind(Content("sum", piece), ranges, ranges)

    def ranges(self, piece: int, plane: int) -> tuple[FileRange, ...]:
        """Where a sum lies in the store."""
        return (FileRange(self._stored.file, self._stored.regions[f"{self._first_plane + plane}/{piece}"], 0),)


def make_state(
    optimizer: "PhasedOptimizer",
    pieces: Iterable[PhasePiece],
    owned: set[str],
    store: PhaseStore,
    memory: PhaseMemory,
) -> StoredPieces:
    """Room for the state of ``optimizer``, in memory for what is ``owned``; all instances call it."""
    forms, own = dict[str, Form](), dict[int, list[str]]()
    for piece in pieces:
        own[piece.index] = []
        for name, parameter in piece.named:
            found = {f"{name}/{key}": form for key, form in optimizer.forms_of(parameter).items()}
            forms |= found
            own[piece.index] += found if name in owned else ()
    made = StoredPieces("state", memory, StoredTensors.of(store.create_state(forms), forms), own)
    for index in own:
        memory.sizes[Content("state", index)] = made.num_bytes(index)
    return made
