"""The memory in which a model's gradients are added up, and the old gradients that exist when a step begins.

On a host whose instances share memory, the gradient that ends as an instance's part of the sum lies there from the
start, and each instance adds a share of the elements in place. Elsewhere the parts are sent to everybody. The
memory is the same in every step.
"""

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import GradientError, name_instances
from popdist.exchange.groups import Group
from popdist.gradients.flat_buffers import (
    FlatGradient,
    GradientLayout,
    SharedSum,
    add_flat,
    nodes_of,
    scale_flat,
)
from popdist.gradients.optimizer_steps import (
    is_reduced,
    is_used,
    mark_reduced,
    mark_used,
    remove_gradients,
    stepped_parameters,
)
from popdist.gradients.partial_gradients import PartialGradient
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import local_part
from popdist.ground.tree import span

if TYPE_CHECKING:
    from popdist.gradients.overlap import Overlap


class GradientPool:
    """A pool of memory blocks; each block has room for one gradient of every parameter. Steps reuse the blocks."""

    def __init__(self, make: Callable[[], FlatGradient]) -> None:
        self._make = make
        self._all: list[FlatGradient] = []
        self._free: list[FlatGradient] = []

    def begin_step(self) -> None:
        """Mark every memory block of the pool as free, because a new step begins."""
        self._free = list(self._all)

    def get(self) -> FlatGradient:
        """Return a free memory block of the pool; make a new block if no block is free."""
        if not self._free:
            self._all.append(self._make())
            return self._all[-1]
        return self._free.pop()

    def put_back(self, gradient: FlatGradient) -> None:
        """Mark the memory block of ``gradient`` as free."""
        self._free.append(gradient)

    def add(self, left: FlatGradient, right: FlatGradient) -> FlatGradient:
        """Add ``right`` to ``left`` in place, mark the memory block of ``right`` as free, and return ``left``."""
        add_flat(left.tensors, right.tensors)
        self.put_back(right)
        return left


class GradientMemory:
    """The memory for the gradients of micro batches and for their sums, which every step uses again."""

    def __init__(
        self,
        group: Group,
        layout: ReplicaLayout,
        gradients: GradientLayout,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.group = group
        self.layout = layout
        self.gradients = gradients
        self.narrow = narrow  # the dtype to which each replica's gradient and each sum over replicas is rounded
        instance, num_replicas = group.backend.instance_index, layout.num_replicas
        self.first_replica = layout.replicas_of(instance).start
        # the number of each of this instance's nodes; the key is the node's first local replica
        self._node_of = {
            span(node, num_replicas).start - self.first_replica: number
            for number, node in enumerate(nodes_of(layout, instance))
        }
        self.of_micro_batches = wide = GradientPool(gradients.make_wide)
        self.of_replicas = wide if narrow is None else GradientPool(lambda: gradients.make_narrow(narrow))
        self.overlap: Overlap | None = None  # None before the first step whose gradients went over a network
        self.shared: SharedSum | None = None  # None if the instances share no memory
        self._shared_rooms: list[FlatGradient] = []
        host = group.backend.host_group
        forms = [(buffer.size, narrow or buffer.dtype) for buffer in gradients.flat_buffers]
        if host is not None and forms and all(it.device.type == "cpu" for it in gradients.flat_buffers):
            self.shared = SharedSum(host, layout, forms)

    def begin_step(self) -> None:
        """Mark all memory blocks as free, because a new step begins."""
        self.of_micro_batches.begin_step()
        self.of_replicas.begin_step()

    def room_for(self, replica: int, position: int) -> FlatGradient:
        """Return memory for the gradient of micro batch ``position`` of the local replica ``replica``."""
        shared = self._shared_for(replica) if position == 0 and self.narrow is None else None
        return shared or self.of_micro_batches.get()

    def _shared_for(self, replica: int) -> FlatGradient | None:
        """Return the shared memory for the partial sum that begins with ``replica``; None if there is none."""
        if replica not in self._node_of or not self.shared_rooms:
            return None
        return self.shared_rooms[self._node_of[replica]]

    @property
    def shared_rooms(self) -> list[FlatGradient]:
        """Shared memory for each partial sum of this instance; empty until the host has allocated the memory."""
        if self.shared is None:
            return []
        if not self._shared_rooms:
            layout, narrow = self.gradients, self.narrow
            make = layout.make_wide if narrow is None else partial(layout.make_narrow, narrow)
            self._shared_rooms = [make(tensors) for tensors in self.shared.mine]
        return self._shared_rooms

    def sum_in_host(self, own: Sequence[FlatGradient], over: float) -> FlatGradient | None:
        """Return the sum of ``own`` over all instances, divided by ``over``; None if the host shares no memory."""
        if self.shared is not None and self.shared.add([room.tensors for room in own], over):
            return self.shared_rooms[0]
        self.shared = None
        return None

    def rounded(self, gradient: FlatGradient, replica: int) -> FlatGradient:
        """Return a replica's ``gradient`` rounded to the dtype ``narrow``; unchanged if ``narrow`` is None."""
        if self.narrow is None:
            return gradient
        narrow = self._shared_for(replica) or self.of_replicas.get()
        narrow.copy(gradient)
        self.of_micro_batches.put_back(gradient)
        return narrow

    def widened(self, total: FlatGradient, over: float) -> FlatGradient:
        """Return a copy of the 16-bit gradients ``total``, divided by ``over``, in float32 or float64."""
        wide = self.of_micro_batches.get()
        wide.copy(total)
        scale_flat(wide.tensors, over=over)
        return wide


ParameterKind = tuple[int, bool, torch.device, torch.dtype]
"""A parameter's Python id, whether it is trained, device and dtype: while these stay equal, the layout stays."""


class ModelGradients:
    """The gradients of the parameters that a model trains; the trained parameters may change between steps."""

    def __init__(self, module: nn.Module, narrow: torch.dtype | None = None) -> None:
        self.narrow = narrow
        self._module = weakref.ref(module)  # the module may be deleted before this object
        self._kinds: list[ParameterKind] = []
        self._layout = GradientLayout(())
        self._memory: GradientMemory | None = None
        self.device = torch.device("cpu")

    def parameters(self) -> list[Parameter]:
        """Return all parameters that the model has now, including frozen parameters."""
        module = self._module()
        return [] if module is None else list(module.parameters())

    def unused(self) -> dict[int, Tensor]:
        """Return the gradients that no optimizer has used; the key is the Python id of the parameter."""
        return {
            id(parameter): gradient
            for parameter in self.parameters()
            if (gradient := parameter.grad) is not None and not is_used(gradient)
        }

    def remove(self) -> tuple[dict[int, Tensor], bool]:
        """Set every ``.grad`` to None. Return the gradients that no optimizer has used, by the Python id of the
        parameter, and whether an optimizer has used other gradients.
        """
        parameters = self.parameters()
        if parameters:
            self.device = parameters[0].device
        return remove_gradients(parameters)

    def layout(self) -> GradientLayout:
        """Return the layout of the gradients in flat buffers; a new layout only after a parameter has changed."""
        kinds = [(id(it), it.requires_grad, it.device, it.dtype) for it in self.parameters()]
        if kinds != self._kinds:
            module = self._module()
            self._layout = GradientLayout(module.named_parameters() if module is not None else ())
            self._kinds = kinds
            self.device = kinds[0][2] if kinds else torch.device("cpu")
        return self._layout

    def memory(self, group: Group, layout: ReplicaLayout) -> GradientMemory:
        """Return the memory in which gradients are added; a new one only after the layout or group changed."""
        gradients = self.layout()
        if self._memory is None or self._memory.gradients is not gradients or self._memory.group is not group:
            self._memory = GradientMemory(group, layout, gradients, self.narrow)
        return self._memory


_models: Final[weakref.WeakSet[ModelGradients]] = weakref.WeakSet()
"""The gradients of all models that have had a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A copy of a gradient that no optimizer has used, in memory that no step overwrites, and its parameter."""

    position: int
    parameter: Parameter
    gradient: Tensor
    is_reduced: bool


class OldGradients:
    """The gradients that a model has from before a step. The step removes them from ``.grad``, and keeps those
    that no optimizer has used, to add them to the new gradients or to raise an error.
    """

    __slots__ = ("_gradients", "_is_decided", "_module", "kept")

    def __init__(self, module: nn.Module, gradients: ModelGradients) -> None:
        self._module = module
        self._gradients = gradients
        self.kept: Sequence[_Kept] = ()
        self._is_decided = False
        _models.add(gradients)
        unused, are_some_used = gradients.remove()
        if unused:
            self._keep(unused, stepped_parameters() if are_some_used else None)

    def _keep(self, unused: Mapping[int, Tensor], held: set[int] | None) -> None:
        found = []
        for position, (_, parameter) in enumerate(self._module.named_parameters()):
            gradient = unused.get(id(parameter))
            if gradient is None or (held is not None and id(parameter) not in held):
                continue  # no optimizer has ever stepped on the parameter
            # ``zero_grad(set_to_none=False)`` leaves zeros; a partial gradient may be zero here and not elsewhere
            if _is_zero(gradient) and not isinstance(gradient, PartialGradient):
                continue
            kept = _Kept(
                position=position,
                parameter=parameter,
                gradient=_copy(gradient),
                is_reduced=is_reduced(gradient),
            )
            found.append(kept)
        self.kept = found

    def number(self, *, add: bool) -> int:
        """Return a number that names this instance's unused gradients, to compare instances; 0 if it has none."""
        if not self.kept or self._is_decided:
            return 0
        if add:  # a digest of the gradients' parameters; otherwise the first parameter's position plus 1
            text = repr([kept.position for kept in self.kept]).encode()
            return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        place = next((kept.position + 1 for kept in self.kept if not _is_zero(kept.gradient)), 0)
        return place if self._are_all_finite() else -place

    def _are_all_finite(self) -> bool:
        others = (unused for model in _models for unused in model.unused().values())
        return all(map(is_finite, [kept.gradient for kept in self.kept])) and all(map(is_finite, others))

    def drop_unless_added(
        self, numbers: Mapping[int, int], *, add: bool, name: Callable[[list[int]], str] = name_instances
    ) -> None:
        """Drop the gradients from before the step unless the step adds to them (``add``). Raise GradientError if
        an instance has unused ones to drop, or, with ``add``, if instances have gradients of other parameters.
        """
        self._is_decided = True
        if add and len(set(numbers.values())) > 1:
            raise GradientError(
                "add=True, and the instances do not have gradients of the same parameters: call zero_grad() on "
                "all of them or on none"
            )
        if add or not any(numbers.values()):
            return
        self.kept = ()
        if min(numbers.values()) < 0:  # NaN or infinity: a GradScaler has skipped the step without a hook
            for model in _models:
                if model is not self._gradients:
                    mark_used(model.parameters())
            return
        place = max(numbers.values())
        names = [name for name, _ in self._module.named_parameters()]
        owners = name([instance for instance, number in numbers.items() if number])
        raise GradientError(
            f"{names[place - 1]} has a gradient that no optimizer's step has used, on {owners}, and a loop over "
            "micro batches would drop it. If it shall go, call zero_grad() before the loop. If the loop shall add "
            "to it, as when an optimizer steps after every second loop only, write "
            "model.micro_batches(batch, add=True), or model.reduce_gradients(add=True)"
        )

    @torch.no_grad()
    def add_to_new(self) -> None:
        """Add each gradient from before the step to the new ``.grad``; restore the old if the new one is None."""
        for kept in self.kept:
            parameter, new = kept.parameter, kept.parameter.grad
            if new is None:
                parameter.grad = kept.gradient
                mark_reduced(kept.gradient, is_reduced=kept.is_reduced)
                continue
            if isinstance(new, PartialGradient) and _is_part_of_same(kept.gradient, new):
                new.content.add_(kept.gradient.content)  # type: ignore[attr-defined] # it is one of these, too
            else:
                new.add_(kept.gradient)
            mark_reduced(new, is_reduced=is_reduced(new) and kept.is_reduced)


def _is_part_of_same(old: Tensor, new: PartialGradient) -> bool:
    return isinstance(old, PartialGradient) and old.ranges == new.ranges and old.is_whole == new.is_whole


def _copy(gradient: Tensor) -> Tensor:
    if isinstance(gradient, PartialGradient):
        gradient.content = gradient.content.clone()
        return gradient
    return gradient.detach().clone()


def _numbers(gradient: Tensor) -> Tensor:
    """Return the elements of ``gradient`` that this instance has, as a tensor."""
    if isinstance(gradient, PartialGradient):
        return gradient.here
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else local_part(gradient)


def _is_zero(gradient: Tensor) -> bool:
    return not _numbers(gradient).any()


def is_finite(gradient: Tensor) -> bool:
    """Whether all elements of ``gradient`` that this instance has are finite."""
    return bool(_numbers(gradient).isfinite().all())
