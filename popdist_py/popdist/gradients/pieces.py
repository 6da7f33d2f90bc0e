"""How copies of the weights in different memories become equal again: everybody sends its pieces to all others."""

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from popdist.comm.backend import Backend
from popdist.gradients.shards import Ranges, flat_view

CHUNK_BYTES: Final = 1 << 22
"""How much of its pieces an instance sends at once: bounds the memory that all instances' pieces take."""

Piece = TypeVar("Piece", Tensor, range)


class Dealt(Protocol):
    """A tensor of which each instance has a part."""

    @property
    def content(self) -> Tensor:
        """All elements, dense in memory."""

    @property
    def ranges(self) -> Ranges:
        """Who has which."""


D = TypeVar("D", bound=Dealt)


class Pieces:
    """The pieces of tensors of one device and dtype, in rounds of messages of bounded size.

    Args:
        dealt: At least one.
        backend: The instances that send them to each other.
    """

    def __init__(self, dealt: Sequence[Dealt], backend: Backend) -> None:
        self._backend = backend
        self._like = dealt[0].content
        width = max(1, CHUNK_BYTES // self._like.element_size())
        flats = [flat_view(it.content, "a tensor in pieces") for it in dealt]
        self._rounds: list[list[list[Tensor]]] = []
        for member, instance in enumerate(backend.instances):
            owned = zip(flats, (it.ranges[instance] for it in dealt), strict=True)
            for number, views in enumerate(in_rounds([flat[it.start : it.stop] for flat, it in owned], width)):
                if number == len(self._rounds):
                    self._rounds.append([[] for _ in backend.instances])
                self._rounds[number][member] = views

    def exchange(self) -> None:
        """Overwrite the pieces of all other members with what these have.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        own = self._backend.instances.index(self._backend.instance_index)
        for pieces in self._rounds:
            lengths = [sum(map(len, views)) for views in pieces]
            sent = self._like.new_zeros(max(lengths))
            if lengths[own]:
                torch.cat(pieces[own], out=sent[: lengths[own]])
            received = self._backend.all_gather(sent)
            for member, (row, views) in enumerate(zip(received, pieces, strict=True)):
                if member != own:
                    parts = row[: lengths[member]].split(list(map(len, views)))
                    for view, part in zip(views, parts, strict=True):
                        view.copy_(part)


def group_by_kind(dealt: Sequence[D]) -> list[list[D]]:
    """Those of each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[D]] = {}
    for it in dealt:
        kinds.setdefault((it.content.device, it.content.dtype), []).append(it)
    return list(kinds.values())


def in_rounds(pieces: Sequence[Piece], width: int) -> list[list[Piece]]:
    """``pieces`` in order, cut so that each list but the last has ``width`` elements; none is empty."""
    rounds: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            if not room:
                rounds.append([])
                room = width
            rounds[-1].append(piece[start : start + room])
            taken = len(rounds[-1][-1])
            start, room = start + taken, room - taken
    return rounds
