"""The gradients of one step that are kept until the optimizer's step, and their sum over all replicas of the job.

The micro batches of a replica are added in a tree over the accumulation steps, and the replicas in a tree over the
global replica index. At the end the instances add what each has of that tree.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from popdist.exchange.groups import Exchange
from popdist.gradients.flat_buffers import FlatGradient, add_instances, scale_flat
from popdist.gradients.memory import GradientMemory
from popdist.gradients.overlap import Overlap, OverlappedSum
from popdist.gradients.partial_gradients import GradientParts, parts_of
from popdist.gradients.reduction import GradientKeeper, NotFinite
from popdist.ground.tree import TreeSum, finish


class KeptGradients(GradientKeeper):
    """The gradients of one step, which are added up in ``memory`` and kept until the optimizer's step."""

    def __init__(self, memory: GradientMemory, *, accumulation: int = 1, checks_finite: bool = False) -> None:
        super().__init__(memory.gradients)
        self.awaited = memory.gradients.moved_early
        self._memory = memory
        self._accumulation = accumulation
        self._checks_finite = checks_finite
        self._replicas: TreeSum[FlatGradient] = TreeSum(
            memory.layout.num_replicas, memory.of_replicas.add, start=memory.first_replica
        )
        self._open: dict[int, TreeSum[FlatGradient]] = {}  # sums over micro batches; the key is the replica
        self._current: FlatGradient | None = None  # memory for the micro batch that runs now
        self._streams = set[torch.Stream]()  # the streams that computed gradients of the current micro batch
        self._has_begun = False  # whether the step began with a header of a whole batch
        self._early: OverlappedSum | None = None
        self._parts: GradientParts | None = None  # None if all instances get the whole sum
        memory.begin_step()

    def begin(self, *, scales: bool) -> int:
        """Begin a step. Return a digest of the gradients that this instance sends during the backward pass, by
        which instances see whether all send the same; 0 if this instance sends none.
        """
        overlap = self._memory.overlap
        if overlap is not None and self._find_parts() is None:
            self._early = overlap.begin_step(scales=scales)
            self.awaited = self.gradients.trained if self._early is not None else self.awaited
        return 0 if self._early is None else self._early.number

    def announce(self, header: Exchange) -> None:
        """Keep ``header``, the messages that begin the step: before all have come, no gradient is sent."""
        self._has_begun = True
        if self._early is not None:
            self._early.set_header(header)

    def begin_micro_batch(self, index: int, weight: float) -> None:
        """Begin micro batch ``index``. In the last micro batch gradients may be sent during the backward pass."""
        self._current = self._next_room(index)
        is_last = index + 1 == self._memory.layout.num_local_replicas * self._accumulation
        if self._early is not None and is_last:
            self._early.begin_last(self._sum_of(index // self._accumulation), self._replicas, weight)

    def add_gradient(self, parameter: Tensor) -> None:
        """Move the gradient that was just accumulated in ``parameter.grad`` into the memory of the sum."""
        if self._current is None:
            return
        if not parameter.is_cpu:
            self._streams.add(torch.accelerator.current_stream(parameter.device))
        self._current.move_in(parameter, even_small=self._early is not None)
        if self._early is not None:
            self._early.add_gradient(parameter)

    def add(self, index: int, weight: float, scale: float, *, clears: bool = True) -> None:
        """Add the gradients that the backward passes of micro batch ``index`` left in ``.grad`` to the sum."""
        for stream in self._streams:  # a program may compute its backward pass in a stream of its own
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        self._streams.clear()
        if self._checks_finite and weight and self.not_finite is None:
            parameter = self.gradients.not_finite()
            replica = self._memory.first_replica + index // self._accumulation
            self.not_finite = None if parameter is None else NotFinite(replica, parameter)
        room, self._current = self._current or self._next_room(index), None
        if weight:
            self.used |= self.gradients.fill(room, times=weight / scale, clears=clears)
        else:
            room.clear()
            self.gradients.clear()
        self._push(index, room)

    def skip(self, index: int) -> None:
        """Add zeros to the sum for micro batch ``index``, which has no samples."""
        room = self._next_room(index)
        room.clear()
        self._push(index, room)

    def close(self) -> int:
        """Send the gradients that are left if some were sent in the backward pass. Return a number that says how
        the gradients are added: 0 all now, above 0 only those that each instance needs, below 0 already added.
        """
        self._parts = self._find_parts()
        way = 0 if self._early is None else self._early.close(self._replicas.values)
        return way if self._parts is None else self._parts.number

    def finish(self, over: float, used: int, way: int) -> None:
        """Set ``.grad`` of the parameters in the mask ``used`` to the sum over replicas, divided by ``over``."""
        parts = self._parts if way > 0 else None
        self.gradients.set_gradients(self._sum(over, parts, are_early_right=way < 0), used)
        if parts is not None:
            parts.replace_grads(self._memory.group)

    def end(self) -> None:
        """Release the channel, the thread that sends gradients during the backward pass. Never raises."""
        if self._early is not None:
            self._early.end()

    def _next_room(self, index: int) -> FlatGradient:
        return self._memory.room_for(*divmod(index, self._accumulation))

    def _push(self, index: int, gradient: FlatGradient) -> None:
        """Add a micro batch's ``gradient`` to its replica's sum; add a complete sum to the sum over replicas."""
        if self._accumulation > 1:
            own = self._sum_of(index // self._accumulation)
            own.push(gradient)
            if own.position < self._accumulation:
                return
            gradient = self._open.pop(index // self._accumulation).total
        replica = self._replicas.position - self._memory.first_replica
        self._replicas.push(self._memory.rounded(gradient, replica))

    def _sum_of(self, replica: int) -> TreeSum[FlatGradient]:
        """Return the sum over the micro batches that the local replica ``replica`` has run so far."""
        if replica not in self._open:
            self._open[replica] = TreeSum(self._accumulation, self._memory.of_micro_batches.add)
        return self._open[replica]

    def _find_parts(self) -> GradientParts | None:
        """Return the elements of gradients that each instance's optimizer needs; None if all get all elements."""
        if self._memory.shared is not None or len(self._memory.group.instances) == 1:
            return None
        return parts_of(self.gradients)

    def _sum(self, over: float, parts: GradientParts | None, *, are_early_right: bool) -> FlatGradient:
        """Return the sum over all replicas, divided by ``over``, in float32 or float64. All instances call it."""
        early = None if self._early is None else self._early.wait(over, are_right=are_early_right)
        if early is not None:
            return early
        if self._memory.narrow is None:
            return self._sum_at_end(over, parts)
        return self._memory.widened(self._sum_at_end(1.0, parts), over)

    def _sum_at_end(self, over: float, parts: GradientParts | None) -> FlatGradient:
        """Add the gradients of all replicas, after all backward passes; return the sum, divided by ``over``."""
        memory, own = self._memory, self._replicas.values
        if (total := memory.sum_in_host(own, over)) is not None:
            return total
        if parts is not None:
            return parts.add(memory.group, memory.layout, own, over)
        if len(memory.group.instances) == 1:
            total = finish(self._replicas.nodes, memory.layout.num_replicas, memory.of_replicas.add)
        else:
            total = self._sum_over_network(own)
        scale_flat(total.tensors, over=over)
        return total

    def _sum_over_network(self, own: Sequence[FlatGradient]) -> FlatGradient:
        memory, buffers = self._memory, self.gradients.flat_buffers
        for nodes in zip(*(node.tensors for node in own), strict=True):
            add_instances(memory.group, memory.layout, list(nodes))
        if buffers and memory.overlap is None and self._has_begun:  # all instances are at this place
            channel = memory.group.backend.channel([buffer.device for buffer in buffers])
            if channel is not None:
                local = memory.group.backend.local_collectives
                memory.overlap = Overlap(channel, memory.layout, self.gradients, local, memory.narrow)
        return own[0]
