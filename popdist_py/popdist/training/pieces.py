"""How copies of the weights in different memories become equal again: everybody sends its pieces to all others."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from popdist.backends.base import Backend
from popdist.training.sharded_parameters import ShardedParameter
from popdist.training.shards import flat_view

CHUNK_BYTES: Final = 1 << 22
"""How much of its pieces an instance sends at once: bounds the memory that all instances' pieces take."""


class Pieces:
    """The pieces of parameters of one device and dtype, in rounds of messages of bounded size.

    Args:
        sharded: At least one.
        backend: The instances that send them to each other.
    """

    def __init__(self, sharded: Sequence[ShardedParameter], backend: Backend) -> None:
        self._backend = backend
        self._like = sharded[0].whole.detach()
        width = max(1, CHUNK_BYTES // self._like.element_size())
        flats = [flat_view(it.whole.detach(), it.name) for it in sharded]
        self._rounds: list[list[list[Tensor]]] = []
        for member, instance in enumerate(backend.instances):
            owned = zip(flats, (it.ranges[instance] for it in sharded), strict=True)
            for number, views in enumerate(_in_rounds([flat[it.start : it.stop] for flat, it in owned], width)):
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


def group_by_kind(sharded: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    """The parameters of each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[ShardedParameter]] = {}
    for it in sharded:
        kinds.setdefault((it.whole.device, it.whole.dtype), []).append(it)
    return list(kinds.values())


def _in_rounds(views: Sequence[Tensor], width: int) -> list[list[Tensor]]:
    """``views`` in order, cut so that each list but the last has ``width`` elements; none is empty."""
    rounds: list[list[Tensor]] = []
    room = 0
    for view in views:
        start = 0
        while start < len(view):
            if not room:
                rounds.append([])
                room = width
            rounds[-1].append(view[start : start + room])
            taken = len(rounds[-1][-1])
            start, room = start + taken, room - taken
    return rounds
