"""Shards: the elements of parameters that each instance has, and the messages that send them to other instances.

The elements of a list of parameters, in a row, are cut into runs of about equal length. Inside a parameter, cuts
are at multiples of :data:`ALIGNMENT`: torch computes the last few elements of a tensor with other instructions
than the elements before, and being in a slice must not change the instructions of an element.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.errors import OptimizerError
from popdist.exchange.groups import Backend

Ranges: TypeAlias = tuple[range, ...]
"""For each instance, the elements of a parameter that it has, in the order of memory; an empty range for none."""

ALIGNMENT: Final = 128
"""Number of elements; a multiple of the elements that torch's loops process at once on any CPU."""


def deal_elements(sizes: Sequence[int], num_shares: int, *, may_cut: Sequence[bool]) -> list[list[range]]:
    """Cut the elements of all parameters into ``num_shares`` about equal shards; return each shard's ranges."""
    shares: list[list[range]] = [[] for _ in range(num_shares)]
    total, start = sum(sizes), 0
    for size, can_cut in zip(sizes, may_cut, strict=True):
        cuts = [_cut(total * k // num_shares - start, size, can_cut=can_cut) for k in range(num_shares + 1)]
        for share, first, last in zip(shares, [0, *cuts[1:-1]], [*cuts[1:-1], size], strict=True):
            share.append(range(first, last))
        start += size
    return shares


def _cut(position: int, size: int, *, can_cut: bool) -> int:
    """Return where to cut a parameter near ``position``: at a multiple of ``ALIGNMENT``, or its start or end."""
    if position <= 0 or position >= size:
        return min(max(position, 0), size)
    if can_cut:
        return min((position + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT, size)
    return size if 2 * position >= size else 0


def may_be_cut(parameter: Tensor) -> bool:
    """Whether updating ``parameter`` part by part gives bitwise the same elements as updating it whole."""
    # several threads cut a tensor at other places, and rounding to half precision makes the instructions visible
    is_wide = parameter.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return parameter.device.type != "cpu" or is_wide or torch.get_num_threads() == 1


def flat_view(tensor: Tensor, name: str) -> Tensor:
    """Return a flat view of ``tensor`` in the order of memory; raise OptimizerError if the memory has gaps."""
    dense = torch.empty_like(tensor, device="meta", requires_grad=False)
    if dense.stride() != tensor.stride():
        raise OptimizerError(
            f"{name} has the strides {tensor.stride()}, which leave gaps or overlap: make it contiguous() first"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """A parameter of a sharded optimizer, and the elements of the parameter that each instance updates."""

    parameter: weakref.ref[Parameter]
    ranges: Ranges
    optimizer: weakref.ref[object]


_owned: dict[int, _Owned] = {}
"""The parameters of sharded optimizers; the key is the identity of the parameter."""


def remember(ranges_of_parameters: Iterable[tuple[Parameter, Ranges]], optimizer: object) -> None:
    """Record which elements of each parameter each instance updates; valid as long as ``optimizer`` exists."""
    for parameter, ranges in ranges_of_parameters:
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _, key=key: _owned.pop(key, None))  # type: ignore[misc] # mypy takes no defaults here
        _owned[key] = _Owned(parameter=reference, ranges=ranges, optimizer=weakref.ref(optimizer))


def ranges_of(parameter: Tensor) -> Ranges | None:
    """Return the elements of ``parameter`` that each instance updates; None if no sharded optimizer updates it."""
    known = _owned.get(id(parameter))
    if known is None or known.parameter() is not parameter or known.optimizer() is None:
        return None
    return known.ranges


CHUNK_BYTES: Final = 1 << 22
"""The most bytes that an instance sends at once, which limits the memory for the data of all instances."""

Run = TypeVar("Run", Tensor, range)


class ShardedTensor(Protocol):
    """A tensor of which each instance has some elements."""

    @property
    def content(self) -> Tensor:
        """The whole tensor, with this instance's elements and room for the elements of all other instances, as one
        piece of memory without gaps between elements.
        """

    @property
    def ranges(self) -> Ranges:
        """The ranges of elements that the instances have, one range for each instance."""


Sharded = TypeVar("Sharded", bound=ShardedTensor)


class ShardExchange:
    """An exchange that gives every instance all elements of sharded tensors, in rounds that limit the memory."""

    def __init__(self, tensors: Sequence[ShardedTensor], backend: Backend) -> None:
        self._backend = backend
        self._like = tensors[0].content
        width = max(1, CHUNK_BYTES // self._like.element_size())
        flats = [flat_view(tensor.content, "a tensor in pieces") for tensor in tensors]
        self._rounds: list[list[list[Tensor]]] = []
        for member, instance in enumerate(backend.instances):
            owned = zip(flats, (tensor.ranges[instance] for tensor in tensors), strict=True)
            for number, views in enumerate(in_rounds([flat[run.start : run.stop] for flat, run in owned], width)):
                if number == len(self._rounds):
                    self._rounds.append([[] for _ in backend.instances])
                self._rounds[number][member] = views

    def run(self) -> None:
        """Exchange elements between all instances, so that each instance has all elements of the tensors."""
        own = self._backend.instances.index(self._backend.instance_index)
        for runs in self._rounds:
            lengths = [sum(map(len, views)) for views in runs]
            sent = self._like.new_zeros(max(lengths))
            if lengths[own]:
                torch.cat(runs[own], out=sent[: lengths[own]])
            received = self._backend.all_gather(sent)
            for member, (part_of_member, views) in enumerate(zip(received, runs, strict=True)):
                if member != own:
                    parts = part_of_member[: lengths[member]].split(list(map(len, views)))
                    for view, part in zip(views, parts, strict=True):
                        view.copy_(part)


def group_by_kind(tensors: Sequence[Sharded]) -> list[list[Sharded]]:
    """Return ``tensors`` in lists, one list for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Sharded]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.content.device, tensor.content.dtype), []).append(tensor)
    return list(kinds.values())


def in_rounds(runs: Sequence[Run], width: int) -> list[list[Run]]:
    """Cut ``runs``, ranges or flat tensors, into rounds: lists of ``width`` elements; the last may have fewer."""
    rounds: list[list[Run]] = []
    room = 0
    for run in runs:
        start = 0
        while start < len(run):
            if not room:
                rounds.append([])
                room = width
            rounds[-1].append(run[start : start + room])
            taken = len(rounds[-1][-1])
            start, room = start + taken, room - taken
    return rounds
