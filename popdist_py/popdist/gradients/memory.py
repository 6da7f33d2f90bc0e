"""The memory in which the gradients of a model are added up, the same in every step.

On a host whose instances share memory, the gradient that ends as an instance's part of the job's sum lies there
from the start: autograd's results are moved into it while they are in the cache, and the sum over the instances is
made in place, each instance a share of the elements. Elsewhere the parts are sent to everybody. Gradients that are
rounded are added over the replicas in narrow rows, of half the size, and made wide again at the end of the step.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BackendError
from popdist.gradients.exchange import nodes_of
from popdist.gradients.notes import is_used, module_parameters, take_gradients
from popdist.gradients.rows import FlatGradients, GradientRows, Rows, add_rows, scale_rows, sum_of
from popdist.groups import Group, as_floats
from popdist.host_memory.addition import node_additions
from popdist.host_memory.host_group import HostGroup
from popdist.layout import ReplicaLayout
from popdist.tree import Node, finish, span

if TYPE_CHECKING:
    from popdist.gradients.overlap import Overlap
    from popdist.host_memory.row_reduction import Reduction
    from popdist.host_memory.segments import Reservation

_LINE_BYTES = 64


class SharedRows:
    """Rows in memory that the instances of the job share, all of them on one host, and their sum.

    Args:
        host: The instances.
        nodes: For each instance, the parts of the job's sum that it makes.
        num_replicas: In the job.
        gradients: The same on all instances when they are added.
        narrow: The dtype of narrow rows; None for wide ones.

    Attributes:
        mine: Rows for this instance's parts; none as long as there is no room for them.
    """

    def __init__(
        self,
        host: HostGroup,
        nodes: Sequence[Sequence[Node]],
        num_replicas: int,
        gradients: FlatGradients,
        narrow: torch.dtype | None = None,
    ) -> None:
        self._host = host
        self._nodes = nodes
        self._num_replicas = num_replicas
        self._gradients = gradients
        self._narrow = narrow
        self._dtypes = [narrow or kind.dtype for kind in gradients.kinds]
        self._row_bytes = [
            -(-kind.size * dtype.itemsize // _LINE_BYTES) * _LINE_BYTES
            for kind, dtype in zip(gradients.kinds, self._dtypes, strict=True)
        ]
        self._num_bytes = max(map(len, nodes)) * sum(self._row_bytes)
        self._reserved: Reservation | None = None
        self._reductions: list[Reduction] = []
        self.mine: list[GradientRows] = []
        with suppress(BackendError):
            self._reserved = host.reserve(self._num_bytes)
            self._place_mine(self._reserved.row)

    def add(self, own: Sequence[GradientRows], over: float) -> GradientRows | None:
        """The sum of all instances' parts divided by ``over``; all call this together.

        The instances learn of each other's rows at the first call: not before do they know that all of them have
        the same gradients.

        Args:
            own: This instance's parts.
            over: The same on all instances; 1 for narrow rows.

        Returns:
            The first of :attr:`mine`; None on all instances where the host has no room.
        """
        if not self._reductions and not self._connect(own):
            return None
        for reduction in self._reductions:
            reduction.run(over=over)
        return self.mine[0]

    def _connect(self, own: Sequence[GradientRows]) -> bool:
        """Make the rows of all instances known to each; whether there is room for them."""
        try:
            block = self._host.allocate(self._num_bytes, self._reserved)
        except BackendError:
            return False
        if not self.mine:
            self._place_mine(block.mine)
        for mine, rows in zip(self.mine, own, strict=True):
            if mine is not rows:
                mine.copy(rows)
        parts = [
            [self._rows_in(block.of(instance), position) for position, _ in enumerate(owned)]
            for instance, owned in enumerate(self._nodes)
        ]
        pairs = node_additions([node for owned in self._nodes for node in owned], self._num_replicas)
        self._reductions = [
            self._host.reduction(
                [part[kind] for owned in parts for part in owned],
                sum_of(self._dtypes[kind]),
                outputs=[owned[0][kind] for owned in parts],
                pairs=pairs,
            )
            for kind in range(len(self._gradients.kinds))
        ]
        return True

    def _place_mine(self, memory: Tensor) -> None:
        own = self._nodes[self._host.rank]
        rows = [self._rows_in(memory, position) for position, _ in enumerate(own)]
        make, narrow = self._gradients.make_rows, self._narrow
        self.mine = [make(it) if narrow is None else self._gradients.make_narrow(narrow, it) for it in rows]

    def _rows_in(self, memory: Tensor, position: int) -> Rows:
        """The rows of an instance's part at ``position`` of its ``memory``; each begins at a line of cache."""
        start, rows = position * sum(self._row_bytes), []
        for kind, dtype, num_bytes in zip(self._gradients.kinds, self._dtypes, self._row_bytes, strict=True):
            rows.append(memory[start : start + kind.size * dtype.itemsize].view(dtype))
            start += num_bytes
        return rows


class RowPool:
    """Rows of one kind that are used again in each step.

    Args:
        make: Makes new ones.
    """

    def __init__(self, make: Callable[[], GradientRows]) -> None:
        self._make = make
        self._all: list[GradientRows] = []
        self._free: list[GradientRows] = []

    def begin_step(self) -> None:
        """Forget what the rows hold."""
        self._free = list(self._all)

    def take(self) -> GradientRows:
        """Rows that nobody uses."""
        if not self._free:
            self._all.append(self._make())
            return self._all[-1]
        return self._free.pop()

    def give_back(self, rows: GradientRows) -> None:
        """Nobody uses ``rows`` any more."""
        self._free.append(rows)

    def add(self, left: GradientRows, right: GradientRows) -> GradientRows:
        """Add ``right``, which is no longer needed then, to ``left``."""
        add_rows(left.rows, right.rows)
        self.give_back(right)
        return left


class GradientMemory:
    """Rows for the gradients of micro batches, and what their sum needs again in the next step.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
        gradients: Of one model, the same on all instances when they are added.
        narrow: The dtype to which each replica's gradient and each sum over replicas is rounded; None for none.

    Attributes:
        nodes: For each instance, the parts that it makes of the sum over all replicas.
        first_replica: Job-wide number of this instance's first replica.
        shared: Rows in the host's memory; None where the instances share none.
        overlap: What sends gradients early; None before the first step in which they went over a network.
    """

    def __init__(
        self,
        group: Group,
        layout: ReplicaLayout,
        gradients: FlatGradients,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.group = group
        self.layout = layout
        self.gradients = gradients
        self.narrow = narrow
        self.nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        instance, num_replicas = group.backend.instance_index, layout.num_replicas
        self.first_replica = layout.replicas_of(instance).start
        self._part_of = {
            span(node, num_replicas).start - self.first_replica: part
            for part, node in enumerate(self.nodes[instance])
        }
        """For the first replica of each part, counted in this instance: the number of the part."""
        self._wide = RowPool(gradients.make_rows)
        self._narrow = self._wide if narrow is None else RowPool(lambda: gradients.make_narrow(narrow))
        self._weights: tuple[list[list[int]], float] = ([], 0.0)
        """The last ones that were added, and their sum: most steps have the same."""
        self.overlap: Overlap | None = None
        self.shared: SharedRows | None = None
        host = group.backend.host_group
        if host is not None and gradients.kinds and all(kind.device.type == "cpu" for kind in gradients.kinds):
            self.shared = SharedRows(host, self.nodes, num_replicas, gradients, narrow)

    def begin_step(self) -> None:
        """Forget what the rows hold."""
        self._wide.begin_step()
        self._narrow.begin_step()

    def rows_for(self, replica: int, position: int) -> GradientRows:
        """Room for a micro batch.

        Args:
            replica: Its replica, among those of this instance.
            position: Which of the replica's micro batches it is.
        """
        shared = self._shared_for(replica) if position == 0 and self.narrow is None else None
        return shared or self._wide.take()

    def _shared_for(self, replica: int) -> GradientRows | None:
        """Rows in the host's memory, if the part that begins with ``replica`` can be made there."""
        if self.shared is None or not self.shared.mine or replica not in self._part_of:
            return None
        return self.shared.mine[self._part_of[replica]]

    def of_replica(self, rows: GradientRows, replica: int) -> GradientRows:
        """What is added over the replicas of a replica's gradient: ``rows`` themselves, or these rounded.

        Args:
            rows: The sum over its micro batches, which belongs to this object then.
            replica: Among those of this instance.
        """
        if self.narrow is None:
            return rows
        narrow = self._shared_for(replica) or self._narrow.take()
        narrow.copy(rows)
        self._wide.give_back(rows)
        return narrow

    def widen(self, total: GradientRows, over: float) -> GradientRows:
        """The sum over all replicas, in narrow rows, as wide ones, divided by ``over``."""
        rows = self._wide.take()
        rows.copy(total)
        scale_rows(rows.rows, over=over)
        return rows

    def total_weight(self, weights: list[list[int]]) -> float:
        """The weights of the whole job, added in the order of the gradients: equal bits for every split.

        Args:
            weights: For each instance those of its :attr:`nodes`, as words of a header.
        """
        if weights != self._weights[0]:
            partials = {
                node: weight
                for nodes, words in zip(self.nodes, weights, strict=True)
                for node, weight in zip(nodes, as_floats(words), strict=True)
            }
            self._weights = weights, finish(partials, self.layout.num_replicas, operator.add)
        return self._weights[1]

    def take_all(self) -> GradientRows:
        """All gradients that there are, as those of the one micro batch of a step."""
        self.begin_step()
        rows = self.rows_for(0, 0)
        self.gradients.fill(rows)
        return rows

    def add(self, left: GradientRows, right: GradientRows) -> GradientRows:
        """Add the micro batch ``right``, whose rows are no longer needed then, to ``left``."""
        return self._wide.add(left, right)

    def add_replicas(self, left: GradientRows, right: GradientRows) -> GradientRows:
        """Add the replica ``right``, whose rows are no longer needed then, to ``left``."""
        return self._narrow.add(left, right)


ParameterKind = tuple[int, bool, torch.device, torch.dtype]
"""A parameter's identity, whether it is trained, device and dtype: while they stay, its place in the rows does."""


class ModelGradients:
    """The gradients of the parameters that a model trains now.

    Args:
        module: The model, which is not kept alive by this; its parameters may change from step to step.
        narrow: As of :class:`GradientMemory`.

    Attributes:
        narrow: As given.
        device: Where the first parameter was when they were last cleared or found; the CPU without one.
        has_begun: Whether the model has had a step.
    """

    def __init__(self, module: nn.Module, narrow: torch.dtype | None = None) -> None:
        self.narrow = narrow
        self._module = weakref.ref(module)
        self._kinds: list[ParameterKind] = []
        self._found = FlatGradients(())
        self._memory: GradientMemory | None = None
        self.device = torch.device("cpu")
        self.has_begun = False

    def parameters(self) -> list[Parameter]:
        """The model's parameters now, frozen ones too; a tied one may come twice."""
        return module_parameters(self._module())

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        self.take_unused()

    def unused(self) -> dict[int, Tensor]:
        """The gradients that no optimizer has used, by the identity of their parameters."""
        return {
            id(parameter): gradient
            for parameter in self.parameters()
            if (gradient := parameter.grad) is not None and not is_used(gradient)
        }

    def take_unused(self) -> tuple[dict[int, Tensor], bool]:
        """Set every ``.grad`` to None, also those of parameters that were frozen in the meantime.

        Returns:
            :meth:`unused` of before, and whether there were others.
        """
        parameters = module_parameters(self._module())
        if parameters:
            self.device = parameters[0].device
        return take_gradients(parameters)

    def find(self) -> FlatGradients:
        """The gradients of the parameters of this moment; the same object until these change."""
        module = self._module()
        kinds = [
            (id(parameter), parameter.requires_grad, parameter.device, parameter.dtype)
            for parameter in self.parameters()
        ]
        if kinds != self._kinds:
            self._found = FlatGradients(module.named_parameters() if module is not None else ())
            self._kinds = kinds
            self.device = kinds[0][2] if kinds else torch.device("cpu")
        return self._found

    def memory(self, group: Group, layout: ReplicaLayout) -> GradientMemory:
        """The memory in which they are added; the same object until the parameters change."""
        gradients = self.find()
        if self._memory is None or self._memory.gradients is not gradients or self._memory.group is not group:
            self._memory = GradientMemory(group, layout, gradients, self.narrow)
        return self._memory
