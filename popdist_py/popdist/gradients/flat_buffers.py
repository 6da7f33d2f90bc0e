"""The gradients of a model's parameters, laid end to end in flat buffers, and their sum over all replicas.

Gradients are added in float32, or wider, and rounded once; with ``gradient_dtype`` replicas are added in narrow
buffers, of that dtype. An instance adds what it can of the tree over all replicas (`popdist.ground.tree`), the
instances exchange these partial sums, in shared memory within a host, and each finishes the same tree.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.errors import BackendError, CollectiveError, GradientError
from popdist.exchange.groups import Group
from popdist.exchange.host_memory.addition import HALVES, node_additions, sum_of
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.transport.two_level import CHUNK_SIZE, TwoLevelReduction, WaitingPeers
from popdist.gradients.optimizer_steps import mark_reduced
from popdist.gradients.shards import in_rounds
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import is_distributed, local_gradient, local_part, placed_as
from popdist.ground.tree import Node, aligned_nodes, finish

if TYPE_CHECKING:
    from popdist.exchange.host_memory.addition import Reduction
    from popdist.exchange.host_memory.segments import Reservation

FlatTensors: TypeAlias = list[Tensor]
"""One gradient of every parameter as a list of flat tensors: one tensor for each flat buffer."""

_LINE_BYTES: Final = 64

_DOUBLE: Final = frozenset({torch.float64, torch.complex128})


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are added: float64 for 64-bit floats, otherwise float32."""
    return torch.float64 if dtype in _DOUBLE else torch.float32


def check_gradient_dtype(dtype: object) -> torch.dtype | None:
    """Return ``dtype`` if it is None, torch.bfloat16 or torch.float16; raise GradientError otherwise."""
    if dtype is not None and dtype not in HALVES:
        raise GradientError(
            f"gradient_dtype={dtype!r}: gradients can be rounded to torch.bfloat16 or torch.float16, or not at "
            "all (None), when they are added in float32"
        )
    return dtype if isinstance(dtype, torch.dtype) else None


def num_real_elements(tensor: Tensor) -> int:
    """Return the number of real numbers in this instance's part of ``tensor``; a complex number counts as two."""
    return local_part(tensor).numel() * (2 if tensor.is_complex() else 1)


def flatten(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return one flat tensor of ``dtype`` with the elements of ``tensors`` (at least one, all on one device)."""
    reals = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return torch.cat([it.reshape(-1).to(dtype) for it in reals])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split the 1-D tensor ``flat`` into tensors with the shapes, dtypes and strides of the tensors ``like``."""
    parts = flat.split([num_real_elements(tensor) for tensor in like])
    return [_shaped(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def add_flat(left: FlatTensors, right: FlatTensors) -> FlatTensors:
    """Add each flat tensor of ``right`` in place to the same flat tensor of ``left``, and return ``left``."""
    for total, flat in zip(left, right, strict=True):
        total.add_(flat)
    return left


def scale_flat(tensors: FlatTensors, *, times: float = 1.0, over: float = 1.0) -> None:
    """Multiply each of ``tensors`` by ``times`` and divide it by ``over``, in place."""
    for flat in tensors:
        if times != 1:
            flat.mul_(times)
        if over != 1:
            flat.div_(over)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        flat = flat.clone() if flat.storage_offset() % 2 else flat  # torch needs an even offset
        flat = torch.view_as_complex(flat.view(-1, 2))
    shaped = flat.to(like.dtype).view(like.shape)
    if like.is_contiguous():
        return shaped
    return torch.empty_like(like, requires_grad=False).copy_(shaped)


SMALL: Final = 1 << 14
"""Number of elements below which gradients are copied all together: faster than to copy each from the cache."""

ALIGNMENT: Final = 16
"""Each parameter's part of a flat buffer, its slot, begins at a multiple of this number of elements.
So a slot begins at a cache line, and a complex slot at an even element.
"""


@dataclass(slots=True, kw_only=True)
class FlatBuffer:
    """The layout of one flat buffer, which holds the gradients of the parameters of one device and dtype."""

    device: torch.device
    dtype: torch.dtype
    # for each parameter: its position in the model, the parameter, and the start of its slot
    members: list[tuple[int, Parameter, int]] = field(default_factory=list)
    size: int = 0

    def append(self, index: int, parameter: Parameter) -> None:
        """Reserve elements at the end for the gradient of ``parameter``, the parameter ``index`` of the model."""
        self.members.append((index, parameter, self.size))
        self.size += -(-num_real_elements(parameter) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatGradient:
    """Memory for the gradients of all parameters of a model: one 1-D tensor for each device and dtype."""

    tensors: FlatTensors
    slots: list[Tensor]  # each parameter's part of ``tensors``; none in narrow buffers
    slot_of: dict[int, Tensor]  # the key is the Python id of the parameter

    def clear(self) -> None:
        """Set all gradients in this memory to zero."""
        for flat in self.tensors:
            flat.zero_()

    def copy(self, other: "FlatGradient") -> None:
        """Overwrite the gradients in this memory with the gradients in ``other``, converted to this dtype."""
        for flat, values in zip(self.tensors, other.tensors, strict=True):
            flat.copy_(values)

    def move_in(self, parameter: Tensor, *, even_small: bool = True) -> None:
        """Copy ``parameter.grad``, if possible, into this memory, and make ``parameter.grad`` a view of the copy.
        The copy is fast because the backward pass has just written the gradient, so the CPU's cache contains it.
        """
        slot = self.slot_of.get(id(parameter))
        if slot is None or (slot.numel() < SMALL and not even_small):
            return
        gradient = parameter.grad
        if type(gradient) is not Tensor and is_distributed(gradient):
            local_gradient(parameter)  # now, because all instances of the mesh call this in the same order
            return
        if gradient is None or gradient.dtype != slot.dtype or gradient.requires_grad:
            return  # ``GradientLayout.fill`` copies it later
        if gradient.layout == torch.strided and gradient.data_ptr() != slot.data_ptr():
            parameter.grad = slot.copy_(gradient).detach()


class GradientLayout:
    """The positions of all gradients of a model in flat buffers: 1-D tensors, one for each device and dtype."""

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self.names: list[str] = []
        self._orders: list[str] = []
        self._parameters: list[Parameter] = []
        buffers: dict[tuple[torch.device, torch.dtype], FlatBuffer] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                new = FlatBuffer(device=parameter.device, dtype=wide_dtype(parameter.dtype))
                buffers.setdefault((new.device, new.dtype), new).append(len(self.names), parameter)
                self.names.append(name)
                self._parameters.append(parameter)
                part = local_part(parameter)
                self._orders.append(name if part.is_contiguous() else f"{name} {part.stride()}")
        self.flat_buffers = list(buffers.values())
        self._all = (1 << len(self.names)) - 1
        self._are_distributed = any(map(is_distributed, self._parameters))
        self._are_narrow = any(wide_dtype(it.dtype) != it.dtype for it in self._parameters)

    def __str__(self) -> str:
        """Return the parameters' number, a digest of their names, and the buffer sizes: equal on all instances."""
        return self._text

    @cached_property
    def _text(self) -> str:
        flat = (
            f"{sum(num_real_elements(parameter) for _, parameter, _ in buffer.members)} "
            f"{str(buffer.dtype).removeprefix('torch.')} on {buffer.device.type}"
            for buffer in self.flat_buffers
        )
        digest = hashlib.blake2b("\n".join(self._orders).encode(), digest_size=4).hexdigest()
        return f"{len(self.names)} parameters, names {digest}: {', '.join(flat)}"

    @cached_property
    def trained(self) -> frozenset[int]:
        """The Python ids (``id()``) of all parameters that the model trains."""
        return frozenset(map(id, self._parameters))

    @cached_property
    def moved_early(self) -> frozenset[int]:
        """The Python ids of the parameters whose gradients a hook copies into flat buffers in the backward pass:
        large parameters, while the CPU's cache contains the gradient, and parameters on an accelerator.
        """
        large = (it for it in self._parameters if not it.is_cpu or local_part(it).numel() >= SMALL)
        return frozenset(map(id, large))

    def used(self) -> int:
        """Return a mask of the parameters that have a gradient now: bit i stands for ``names[i]``."""
        return sum(1 << i for i, parameter in enumerate(self._parameters) if parameter.grad is not None)

    def not_finite(self) -> int | None:
        """Return the index of the first parameter whose gradient has NaN or infinity; None if all are finite."""
        gradients = [local_gradient(parameter) for parameter in self._parameters]  # all: other instances wait
        found = [(i, gradient.isfinite().all()) for i, gradient in enumerate(gradients) if gradient is not None]
        # one wait for an accelerator is enough for all its gradients
        are_finite = torch.stack([it.to(found[0][1].device) for _, it in found]).tolist() if found else []
        return next((i for (i, _), is_finite in zip(found, are_finite, strict=True) if not is_finite), None)

    def clear(self) -> None:
        """Set the ``.grad`` of every trained parameter to None."""
        for parameter in self._parameters:
            parameter.grad = None

    def make_wide(self, tensors: FlatTensors | None = None) -> FlatGradient:
        """Return memory for all gradients in float32 or float64: the given ``tensors``, or new tensors if None."""
        buffers = self.flat_buffers
        tensors = tensors or [torch.zeros(it.size, dtype=it.dtype, device=it.device) for it in buffers]
        found = {
            index: _slot(flat, start, parameter)
            for buffer, flat in zip(buffers, tensors, strict=True)
            for index, parameter, start in buffer.members
        }
        slots = [found[index] for index in range(len(found))]
        slot_of = {id(parameter): slot for parameter, slot in zip(self._parameters, slots, strict=True)}
        return FlatGradient(tensors=tensors, slots=slots, slot_of=slot_of)

    def make_narrow(self, dtype: torch.dtype, tensors: FlatTensors | None = None) -> FlatGradient:
        """Return memory for all gradients in a 16-bit ``dtype``: the given ``tensors``, or new tensors if None."""
        buffers = self.flat_buffers
        tensors = tensors or [torch.zeros(it.size, dtype=dtype, device=it.device) for it in buffers]
        return FlatGradient(tensors=tensors, slots=[], slot_of={})

    @torch.no_grad()
    def fill(self, into: FlatGradient, times: float = 1.0, *, clears: bool = False) -> int:
        """Copy each parameter's ``.grad``, multiplied by ``times``, into the memory ``into``; copy zeros if the
        ``.grad`` is None. Return a bit mask of the parameters that have a gradient.
        """
        used, slots, gradients = 0, list[Tensor](), list[Tensor]()
        for position, (parameter, slot) in enumerate(zip(self._parameters, into.slots, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                slot.zero_()
                continue
            if self._are_distributed:
                gradient = cast("Tensor", local_gradient(parameter))
            used |= 1 << position
            if gradient.layout != torch.strided:
                raise CollectiveError(
                    f"the gradient of {self.names[position]} is sparse, and replicas add dense ones: make it "
                    "with sparse=False"
                )
            if gradient.data_ptr() != slot.data_ptr():
                slots.append(slot)
                gradients.append(gradient)
            if clears:
                parameter.grad = None
        if slots:
            torch._foreach_copy_(slots, gradients)
        scale_flat(into.tensors, times=times)
        return used

    def set_gradients(self, source: FlatGradient, used: int) -> None:
        """Set ``.grad`` of each parameter in bit mask ``used`` to its gradient in ``source``, others to None."""
        for position, (parameter, slot) in enumerate(zip(self._parameters, source.slots, strict=True)):
            if not used >> position & 1:
                parameter.grad = None
                continue
            gradient = slot.detach()  # the slot's memory stays shared with ``source``
            if self._are_narrow:
                gradient = gradient.to(parameter.dtype)
            if self._are_distributed:
                gradient = placed_as(parameter, gradient)
            mark_reduced(gradient)
            parameter.grad = gradient


def _slot(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
    """Return the slot of ``parameter``: a view of the tensor ``flat`` from ``start``, in the parameter's shape."""
    part = flat[start : start + num_real_elements(parameter)]
    if parameter.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    dense = torch.empty_like(local_part(parameter), device="meta", requires_grad=False)
    return part.as_strided(dense.shape, dense.stride())


def nodes_of(layout: ReplicaLayout, instance: int) -> list[Node]:
    """Return the nodes (partial sums) of the addition tree that ``instance`` computes from its own replicas."""
    replicas = layout.replicas_of(instance)
    return aligned_nodes(replicas.start, replicas.stop, layout.num_replicas)


def nodes_of_hosts(layout: ReplicaLayout, num_local: int) -> list[list[Node]] | None:
    """Return each host's node (partial sum) in the addition tree over all replicas; None if the number of replicas
    on a host is no power of two, so that one node cannot have exactly these replicas.
    """
    block = layout.num_local_replicas * num_local
    if block & (block - 1):
        return None
    hosts = range(0, layout.num_replicas, block)
    return [aligned_nodes(first, first + block, layout.num_replicas) for first in hosts]


def sum_over_hosts(group: Group, layout: ReplicaLayout, device: torch.device) -> TwoLevelReduction:
    """Return the operation that adds tensors on ``device`` over all replicas, first in each host if possible."""
    backend = group.backend
    local_collectives = None if device.type != "cpu" else backend.local_collectives
    nodes = None if local_collectives is None else nodes_of_hosts(layout, local_collectives.size)
    if local_collectives is None or nodes is None:  # then each instance counts as one host
        nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        return TwoLevelReduction(WaitingPeers(backend), nodes, layout.num_replicas)
    peers = backend.subgroup(backend.instances[local_collectives.group.rank :: local_collectives.size])
    return TwoLevelReduction(WaitingPeers(peers), nodes, layout.num_replicas, local_collectives)


def add_instances(group: Group, layout: ReplicaLayout, own: list[Tensor]) -> None:
    """Overwrite ``own[0]`` with the sum over all instances; ``own`` has the partial sums of this instance."""
    sum_over_hosts(group, layout, own[0].device).all_reduce(own, sum_of(own[0].dtype))


NEAR: Final = 16
"""Ranges with a gap of fewer elements are joined; the elements between two slots belong to no parameter."""


def joined(runs: Sequence[range]) -> list[range]:
    """Return the ranges of elements ``runs``, sorted, and joined if the gap is less than ``NEAR`` elements."""
    found: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if found and run.start - found[-1].stop < NEAR:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def scatter_sum(
    group: Group, layout: ReplicaLayout, own: Sequence[Tensor], wanted: Sequence[Sequence[range]]
) -> None:
    """Add the partial sums ``own`` of all instances, as reduce-scatter does: afterwards ``own[0]`` has the sum,
    but only in those ranges of elements that ``wanted`` lists for this instance.
    """
    reduction, op = sum_over_hosts(group, layout, own[0].device), sum_of(own[0].dtype)
    rounds = [in_rounds(runs, max(1, CHUNK_SIZE // len(wanted))) for runs in wanted]
    for number in range(max(map(len, rounds))):
        runs = [parts[number] if number < len(parts) else [] for parts in rounds]
        shares = reduction.empty_shares(own[0], max(sum(map(len, ranges)) for ranges in runs), op)
        for instance, ranges in enumerate(runs):
            for flat, share in zip(own, reduction.share_of(shares, instance), strict=False):
                if ranges:
                    parts = [flat[run.start : run.stop] for run in ranges]
                    torch.cat(parts, out=share[: sum(map(len, ranges))])
        total = reduction.reduce_scatter(shares, op)
        mine = runs[group.backend.instance_index]
        lengths = [len(run) for run in mine]
        for run, part in zip(mine, total[: sum(lengths)].split(lengths), strict=True):
            own[0][run.start : run.stop] = part


class SharedSum:
    """The sum of 1-D tensors over all instances of a job on one host, computed in shared memory."""

    def __init__(self, host: HostGroup, layout: ReplicaLayout, forms: Sequence[tuple[int, torch.dtype]]) -> None:
        self._host = host
        self._num_replicas = layout.num_replicas
        self._nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        self._forms = forms
        self._stretches = [-(-size * dtype.itemsize // _LINE_BYTES) * _LINE_BYTES for size, dtype in forms]
        self._num_bytes = max(map(len, self._nodes)) * sum(self._stretches)
        self._reserved: Reservation | None = None
        self._reductions: list[Reduction] = []
        self.mine: list[FlatTensors] = []  # one for each node of this instance; empty while the host has no room
        with suppress(BackendError):
            self._reserved = host.reserve(self._num_bytes)
            self._place_mine(self._reserved.row)

    def add(self, own: Sequence[FlatTensors], over: float = 1.0) -> bool:
        """Add the partial sums of all instances in shared memory; return False if the host lacks memory."""
        # only now do the instances know that all of them have the same forms
        if not self._reductions and not self._connect():
            return False
        for mine, partial_sum in zip(self.mine, own, strict=True):
            for room, flat in () if mine is partial_sum else zip(mine, partial_sum, strict=True):
                room.copy_(flat)
        for reduction in self._reductions:
            reduction.run(over=over)
        return True

    def _connect(self) -> bool:
        """Map the shared memory of all instances, and prepare the sums; return False if the host lacks memory."""
        try:
            block = self._host.allocate(self._num_bytes, self._reserved)
        except BackendError:
            return False
        if not self.mine:
            self._place_mine(block.mine)
        parts = [
            [self._tensors_in(block.rows[instance], position) for position, _ in enumerate(owned)]
            for instance, owned in enumerate(self._nodes)
        ]
        pairs = node_additions([node for owned in self._nodes for node in owned], self._num_replicas)
        self._reductions = [
            self._host.reduction(
                [part[number] for owned in parts for part in owned],
                sum_of(dtype),
                outputs=[owned[0][number] for owned in parts],
                pairs=pairs,
            )
            for number, (_, dtype) in enumerate(self._forms)
        ]
        return True

    def _place_mine(self, memory: Tensor) -> None:
        self.mine = [self._tensors_in(memory, position) for position, _ in enumerate(self._nodes[self._host.rank])]

    def _tensors_in(self, memory: Tensor, position: int) -> FlatTensors:
        """Return the 1-D tensors of an instance's partial sum ``position`` (a number), as views of ``memory``."""
        start, tensors = position * sum(self._stretches), []
        for (size, dtype), num_bytes in zip(self._forms, self._stretches, strict=True):
            tensors.append(memory[start : start + size * dtype.itemsize].view(dtype))
            start += num_bytes
        return tensors


class RepeatedSum:
    """The sum of flat tensors over all replicas, which each step computes again in the same memory."""

    def __init__(self) -> None:
        self._forms: list[tuple[int, torch.dtype]] = []
        self._shared: SharedSum | None = None

    def finish(self, group: Group, layout: ReplicaLayout, own: Mapping[Node, FlatTensors]) -> FlatTensors:
        """Return the sum over all replicas; ``own`` has this instance's partial sums. All instances call this."""
        if layout.num_instances == 1:
            return finish(own, layout.num_replicas, add_flat)
        rows, host = list(own.values()), group.backend.host_group
        forms = [(len(flat), flat.dtype) for flat in rows[0]]
        if forms != self._forms:
            self._forms, self._shared = forms, None
        elif self._shared is None and host is not None and all(flat.is_cpu for flat in rows[0]):
            self._shared = SharedSum(host, layout, forms)
        if self._shared is not None and self._shared.add(rows):
            return self._shared.mine[0]
        for nodes in zip(*rows, strict=True):
            add_instances(group, layout, list(nodes))
        return rows[0]
