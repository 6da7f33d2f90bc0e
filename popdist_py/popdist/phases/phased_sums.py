"""Sums of the gradients of some parameters, added in the same order as the gradients of a whole model.

Partial sums that wait for further gradients form a stack. The newest sum is in memory, the others are in the
store; each micro batch adds some sums at the top of the stack.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.exchange.groups import Group
from popdist.gradients.flat_buffers import (
    FlatGradient,
    FlatTensors,
    GradientLayout,
    RepeatedSum,
    nodes_of,
)
from popdist.ground.layout import ReplicaLayout
from popdist.ground.tree import TreeSum
from popdist.phases.phase_memory import MemoryPlace, PhaseMemory, Wanted
from popdist.phases.phase_store import StoredTensors

_LINE_BYTES: Final = 64

_CHUNK: Final = 1 << 20
"""The largest number of elements that the instances add at once, in memory of this size that they share."""


def held_weights(
    layout: ReplicaLayout, instance: int, accumulation: int, weights: Sequence[float]
) -> Iterator[list[float]]:
    """Yield, after each micro batch of ``instance``, a list: for each partial sum of gradients, the total
    weight of the micro batches in this partial sum.
    """
    of_job: TreeSum[float] = TreeSum(layout.num_replicas, operator.add, start=layout.replicas_of(instance).start)
    for begin in range(0, len(weights), accumulation):
        of_replica: TreeSum[float] = TreeSum(accumulation, operator.add)
        for weight in weights[begin : begin + accumulation]:
            of_replica.push(weight)
            if of_replica.position < accumulation:
                yield of_job.values + of_replica.values
        of_job.push(of_replica.total)
        yield of_job.values


@lru_cache(maxsize=16)
def merges_of(layout: ReplicaLayout, instance: int, accumulation: int) -> tuple[tuple[int, ...], int]:
    """Return for each micro batch of ``instance`` how many earlier partial sums its gradient is added to.

    Also return the largest number of partial sums that any instance holds while a micro batch computes.
    """
    weights = [0.0] * layout.num_local_replicas * accumulation
    depths = [
        [0, *map(len, held_weights(layout, it, accumulation, weights))] for it in range(layout.num_instances)
    ]
    merges = tuple(before + 1 - after for before, after in pairwise(depths[instance]))
    return merges, max(depth for *before, last in depths for depth in (*before, last - 1))


class PieceGradient:
    """The layout of the gradients of ``named_parameters`` in one flat tensor of bytes."""

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self.layout = GradientLayout(named_parameters)
        self._places: list[tuple[int, int, torch.dtype]] = []
        self.num_bytes = 0
        for buffer in self.layout.flat_buffers:
            end = self.num_bytes + buffer.size * buffer.dtype.itemsize
            self._places.append((self.num_bytes, end, buffer.dtype))
            self.num_bytes = -(-end // _LINE_BYTES) * _LINE_BYTES

    def make(self, *, zeros: bool = False) -> Tensor:
        """Return a new tensor of bytes for the gradients: zeros if ``zeros`` is True, otherwise undefined."""
        make = torch.zeros if zeros else torch.empty
        return make(self.num_bytes, dtype=torch.uint8, device=self.layout.flat_buffers[0].device)

    def parts(self, memory: Tensor) -> FlatTensors:
        """Return the flat buffers of gradients, one for each dtype, as views of the tensor of bytes ``memory``."""
        return [memory[begin:end].view(dtype) for begin, end, dtype in self._places]

    def gradient(self, memory: Tensor) -> FlatGradient:
        """Return the gradients of the parameters as views of the tensor of bytes ``memory``."""
        return self.layout.make_wide(self.parts(memory))

    @torch.no_grad()
    def add(self, left: Tensor, right: Tensor | None) -> None:
        """Add the gradients in ``right`` to ``left`` in place; add zeros if ``right`` is None."""
        parts = self.parts(left)
        for total, part in zip(parts, parts if right is None else self.parts(right), strict=True):
            total.add_(0.0 if right is None else part)


class InstanceSums:
    """An adder of the instances' gradient sums, which adds one piece (weights of the same layers) at a time."""

    def __init__(self, group: Group, layout: ReplicaLayout) -> None:
        self.group = group
        self.layout = layout
        self._nodes = nodes_of(layout, group.backend.instance_index)
        self._sums: dict[tuple[int, torch.dtype], RepeatedSum] = {}  # by the number and dtype of the elements

    @torch.no_grad()
    def add(self, own: Sequence[Tensor]) -> None:
        """Add all instances' partial sums, here ``own``; write the total to ``own[0]``. All instances call it."""
        for chunks in zip(*(flat.split(_CHUNK) for flat in own), strict=True):
            total = self._sums.setdefault((len(chunks[0]), chunks[0].dtype), RepeatedSum())
            rows = {node: [chunk] for node, chunk in zip(self._nodes, chunks, strict=True)}
            (added,) = total.finish(self.group, self.layout, rows)
            chunks[0].copy_(added)


class PieceSum:
    """The sum of one piece's gradients (the gradients of some weights) in one step on this instance."""

    def __init__(
        self,
        gradient: PieceGradient,
        merges: Sequence[int],
        times: Callable[[int], float],
        place: MemoryPlace,
        planes: Sequence[StoredTensors],
        memory: PhaseMemory,
    ) -> None:
        """Make an empty sum. Stored tensors ``planes`` have partial sums; ``times`` returns a batch's factor."""
        self.gradient = gradient
        self._merges = merges
        self._times = times
        self._place = place
        self._planes = planes
        self._memory = memory
        self.used = 0  # bit i: whether the i-th parameter had a gradient on this instance
        self._waiting: list[bool] = []  # for each waiting sum whether it is not zero
        self._position = 0

    def awaited(self, number: int) -> Wanted:
        """Return the sum in the store (a file or memory) that popdist must read before it adds the gradient of
        micro batch ``number`` to this sum; return {} if there is no such sum or if the sum is zero.
        """
        is_needed = self._waiting and self._waiting[-1] and self._merges[number]
        return {self._place: self._planes[len(self._waiting) - 1]} if is_needed else {}

    def push(self, number: int, stop: int) -> Tensor | None:
        """Add the gradients of micro batch ``number`` to the sum; others before ``stop`` count as zeros.

        Return the newest partial sum; None if that sum is zero.
        """
        value: Tensor | None = None
        for position in range(self._position, stop):
            value = self._added(position, has_gradient=position == number)
            if position + 1 < len(self._merges):
                self._put_aside(value, is_in_room=not self._merges[position])
        self._position = stop
        return value

    def total(self, number: int) -> list[Tensor]:
        """Add the ``.grad`` of the last micro batch ``number``; return this instance's final partial sums."""
        value = self.push(number, len(self._merges))
        planes = zip(self._waiting, self._planes, strict=False)
        sums = [self._memory.load(self._place, it).clone() if is_there else None for is_there, it in planes]
        self._waiting = []
        return [self.gradient.make(zeros=True) if it is None else it for it in (*sums, value)]

    def _added(self, position: int, *, has_gradient: bool) -> Tensor | None:
        """Return the gradient of micro batch ``position`` plus partial sums that it completes; None if zero."""
        gradient, merges = self.gradient, self._merges[position]
        value: Tensor | None = None
        times = self._times(position) if has_gradient else 0.0
        if times and gradient.layout.used():
            is_new = not merges and position + 1 < len(self._merges)
            value = self._memory.room(self._place) if is_new else gradient.make()
            self.used |= gradient.layout.fill(gradient.gradient(value), times=times, clears=True)
        if has_gradient:
            gradient.layout.clear()
        for _ in range(merges):
            is_there, held = self._waiting.pop(), None
            if is_there:
                held = self._memory.load(self._place, self._planes[len(self._waiting)])
            if value is not None:
                gradient.add(value, held)
            elif held is not None:
                value = held.clone()
                gradient.add(value, None)
        return value

    def _put_aside(self, value: Tensor | None, *, is_in_room: bool) -> None:
        """Put the sum ``value`` (None if zero) on the stack of partial sums that wait for later gradients."""
        if value is not None:
            if not is_in_room:
                self._memory.room(self._place)[: len(value)].copy_(value)
            self._memory.write_behind(self._place, self._planes[len(self._waiting)])
        self._waiting.append(value is not None)
