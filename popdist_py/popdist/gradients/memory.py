"""The memory in which the gradients of a model are added up, the same in every step.

On a host whose instances share memory, the gradient that ends as an instance's part of the job's sum lies there
from the start: autograd's results are moved into it while they are in the cache, and the sum over the instances is
made in place, each instance a share of the elements. Elsewhere the parts are sent to everybody.
"""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BackendError
from popdist.gradients.exchange import add_instances, nodes_of
from popdist.gradients.overlap import Overlap, OverlappedSum
from popdist.gradients.partial_gradients import GradientParts, parts_of
from popdist.gradients.rows import FlatGradients, GradientRows, Rows, add_rows, scale_rows
from popdist.groups import Group
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.segments import SharedBlock
from popdist.layout import ReplicaLayout
from popdist.tree import Node, finish, span

if TYPE_CHECKING:
    from popdist.host_memory.row_reduction import Reduction
    from popdist.host_memory.segments import Reservation


class SharedRows:
    """Room for the parts of the job's sum that the instances make.

    Args:
        host: The instances, all of one host.
        layout: Which replicas each of them owns.
        gradients: The same on all instances when they are added.
        room: This instance's memory, of :func:`num_bytes_of` bytes.

    Attributes:
        mine: This instance's parts, as `popdist.gradients.exchange.nodes_of` names them.
    """

    def __init__(self, host: HostGroup, layout: ReplicaLayout, gradients: FlatGradients, room: Tensor) -> None:
        self._host = host
        self._layout = layout
        self._gradients = gradients
        self.mine = [
            gradients.make_rows(_rows_in(room, gradients, position))
            for position, _ in enumerate(nodes_of(layout, host.rank))
        ]
        self._reductions: list[Reduction] = []

    def connect(self, block: SharedBlock) -> None:
        """From now on all instances' rooms, which are those of ``block``, are added."""
        nodes = [nodes_of(self._layout, instance) for instance in range(self._layout.num_instances)]
        parts = [
            [_rows_in(block.of(instance), self._gradients, position) for position, _ in enumerate(owned)]
            for instance, owned in enumerate(nodes)
        ]
        every_part = [part for owned in parts for part in owned]
        numbers = {node: number for number, node in enumerate(node for owned in nodes for node in owned)}
        pairs: list[tuple[int, int]] = []

        def add(left: int, right: int) -> int:
            pairs.append((left, right))
            return left

        finish(numbers, self._layout.num_replicas, add)
        self._reductions = [
            self._host.reduction(
                [part[kind] for part in every_part],
                outputs=[owned[0][kind] for owned in parts],
                pairs=pairs,
            )
            for kind in range(len(self._gradients.kinds))
        ]

    def reduce(self, over: float) -> GradientRows:
        """The sum of all parts divided by ``over``, in the memory of this instance's first one; all call it.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        for reduction in self._reductions:
            reduction.run(over=over)
        return self.mine[0]


def num_bytes_of(layout: ReplicaLayout, gradients: FlatGradients) -> int:
    """How much room each instance needs: the same for all."""
    num_parts = max(len(nodes_of(layout, instance)) for instance in range(layout.num_instances))
    return num_parts * _part_bytes(gradients)


def _part_bytes(gradients: FlatGradients) -> int:
    return sum(_room(it.size, it.dtype) for it in gradients.kinds)


def _room(size: int, dtype: torch.dtype) -> int:
    """Bytes of a row, rounded up so that the next one begins at a line of cache."""
    return -(-size * dtype.itemsize // 64) * 64


def _rows_in(memory: Tensor, gradients: FlatGradients, position: int) -> Rows:
    """The rows of an instance's part at ``position`` of its ``memory``."""
    start, rows = position * _part_bytes(gradients), []
    for kind in gradients.kinds:
        rows.append(memory[start : start + kind.size * kind.dtype.itemsize].view(kind.dtype))
        start += _room(kind.size, kind.dtype)
    return rows


class GradientMemory:
    """Rows for the gradients of micro batches, and their sum over the job.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
        gradients: Of one model, the same on all instances when they are added.
    """

    def __init__(self, group: Group, layout: ReplicaLayout, gradients: FlatGradients) -> None:
        self.group = group
        self.gradients = gradients
        self._layout = layout
        instance, num_replicas = group.backend.instance_index, layout.num_replicas
        first = layout.replicas_of(instance).start
        self._node_at = {
            span(node, num_replicas).start - first: k for k, node in enumerate(nodes_of(layout, instance))
        }
        self._own: list[GradientRows] = []
        self._free: list[GradientRows] = []
        is_on_cpu = all(kind.device.type == "cpu" for kind in gradients.kinds)
        self._host = group.backend.host_group if is_on_cpu and gradients.kinds else None
        self._reserved: Reservation | None = None
        self._shared: SharedRows | None = None
        self._is_connected = False
        self._overlap: Overlap | None = None
        self._is_sent = False
        if self._host is not None:
            with suppress(BackendError):
                self._reserved = self._host.reserve(num_bytes_of(layout, gradients))
                self._shared = SharedRows(self._host, layout, gradients, self._reserved.row)

    def begin(self) -> None:
        """A step begins: what the rows hold is no longer needed."""
        self._free = list(self._own)

    def rows_for(self, replica: int, position: int) -> GradientRows:
        """Room for a micro batch.

        Args:
            replica: Its replica, among those of this instance.
            position: Which of the replica's micro batches it is.
        """
        if self._shared is not None and position == 0 and replica in self._node_at:
            return self._shared.mine[self._node_at[replica]]
        if not self._free:
            self._own.append(self.gradients.make_rows())
            self._free.append(self._own[-1])
        return self._free.pop()

    def take_all(self) -> GradientRows:
        """All gradients that there are, as those of the one micro batch of a step."""
        self.begin()
        rows = self.rows_for(0, 0)
        self.gradients.fill(rows)
        return rows

    def add(self, left: GradientRows, right: GradientRows) -> GradientRows:
        """Add ``right``, which is no longer needed then, to ``left``."""
        add_rows(left.rows, right.rows)
        self._free.append(right)
        return left

    def parts(self) -> GradientParts | None:
        """The parts of the sum that the instances need, where not all get all of it anyway."""
        return None if self._host is not None or self._layout.num_instances == 1 else parts_of(self.gradients)

    def prepare_overlap(self) -> None:
        """After a step that was announced: from now on they may go early. All instances are together here."""
        if self._overlap is None and self._is_sent:
            channel = self.group.backend.channel([kind.device for kind in self.gradients.kinds])
            self._overlap = None if channel is None else Overlap(channel, self._layout, self.gradients)
        self._is_sent = False

    def begin_overlap(self, *, scales: bool) -> OverlappedSum | None:
        """The next step, if it may go early; ``scales`` as in `popdist.training.step`."""
        if self._overlap is None or self.parts() is not None:
            return None
        number = self._overlap.offer()
        return OverlappedSum(self._overlap, number, scales=scales) if number else None

    def finish(
        self,
        nodes: Mapping[Node, GradientRows],
        over: float,
        parts: GradientParts | None = None,
        early: GradientRows | None = None,
    ) -> GradientRows:
        """The sum over all replicas, divided by ``over``, when all instances have said that they come to it.

        Args:
            nodes: This instance's part of the tree.
            over: The same on all instances.
            parts: What the instances need, if they have agreed to get no more.
            early: The sum, where it has been made already.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        if early is not None:
            scale_rows(early.rows, over=over)
            return early
        own = list(nodes.values())
        if self._host is not None and not self._is_connected:
            self._connect(self._host, own)
        if self._is_connected and self._shared is not None:
            return self._shared.reduce(over)
        if parts is not None:
            return parts.add(self.group, self._layout, own, over)
        if self._layout.num_instances == 1:
            total = finish(nodes, self._layout.num_replicas, self.add)
        else:
            for row_of_nodes in zip(*(it.rows for it in own), strict=True):
                add_instances(self.group, self._layout, list(row_of_nodes))
            total = own[0]
            self._is_sent = True
        scale_rows(total.rows, over=over)
        return total

    def _connect(self, host: HostGroup, own: list[GradientRows]) -> None:
        """Make the instances' rows known to all; where one has no room, they are sent as between hosts.

        Not before: that all instances have the same gradients is known only when they come to add them.
        """
        try:
            block = host.allocate(num_bytes_of(self._layout, self.gradients), self._reserved)
        except BackendError:
            self._host = None
            return
        if self._shared is None:
            self._shared = SharedRows(host, self._layout, self.gradients, block.mine)
        for mine, rows in zip(self._shared.mine, own, strict=True):
            if mine is not rows:
                mine.copy(rows)
        self._shared.connect(block)
        self._is_connected = True


ParameterKind = tuple[int, bool, torch.device, torch.dtype]
"""What tells whether a parameter's place in the rows is still right: identity, whether it is trained, and kind."""


class ModelGradients:
    """The gradients of the parameters that a model trains now.

    Args:
        module: The model, which is not kept alive by this; its parameters may change from step to step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._kinds: list[ParameterKind] = []
        self._found = FlatGradients(())
        self._memory: GradientMemory | None = None
        self.device = torch.device("cpu")
        """Where the first parameter was when they were last cleared or found; the CPU without one."""

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        parameters = _parameters_of(self._module())
        for it in parameters:
            if it.requires_grad:
                it.grad = None
        if parameters:
            self.device = parameters[0].device

    def find(self) -> FlatGradients:
        """Those of this moment; made anew only when the parameters have changed."""
        kinds = [(id(it), it.requires_grad, it.device, it.dtype) for it in _parameters_of(self._module())]
        if kinds != self._kinds:
            module = self._module()
            self._found = FlatGradients(module.named_parameters() if module is not None else ())
            self._kinds = kinds
            self.device = kinds[0][2] if kinds else torch.device("cpu")
        return self._found

    def memory(self, group: Group, layout: ReplicaLayout) -> GradientMemory:
        """Where they are added over the replicas of the job; the same one until the parameters change."""
        gradients = self.find()
        if self._memory is None or self._memory.gradients is not gradients or self._memory.group is not group:
            self._memory = GradientMemory(group, layout, gradients)
        return self._memory


def _parameters_of(module: nn.Module | None) -> list[Parameter]:
    """The parameters in ``module``, if it is still there, in a fixed order; a tied one may come twice.

    Several times faster than ``module.parameters()``, because this is asked in every step.
    """
    if module is None:
        return []
    found: list[Parameter | None] = []
    seen, waiting = {module}, [module]
    while waiting:
        current = waiting.pop()
        found += current._parameters.values()  # noqa: SLF001 - what parameters() reads
        for child in current._modules.values():  # noqa: SLF001 - as above
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return [it for it in found if it is not None]
