"""A model's buffers, such as the running statistics of BatchNorm, while its replicas take turns on them.

Every replica starts a step from the same values. Afterwards a buffer of floats becomes the mean of what the
replicas made of it, added in the tree over all replicas, and any other buffer what replica 0 made of it; so they
are equal on all instances and have the same bits for any split. Only buffers that some replica has changed are
added and exchanged: a table of constants costs one copy, and a model without buffers nothing.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from popdist.gradients.exchange import ReplicaTree
from popdist.gradients.rows import cut, join, wide_dtype
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.weights import broadcast_tensors

LARGE: Final = 1 << 16
"""Numbers above which a buffer is not compared with its copy, unless torch has counted a write to it."""


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """One buffer: where it is, and what it was when the step began.

    Attributes:
        owner: The module that has the buffer.
        key: The buffer's name there.
        tensor: The buffer.
        version: How often the buffer had been written to when it last held ``start``.
        start: A copy of the buffer, from the beginning of the step.
    """

    owner: nn.Module
    key: str
    tensor: Tensor
    version: int
    start: Tensor

    @property
    def is_average(self) -> bool:
        """Whether the buffer becomes the mean over the replicas."""
        return self.start.is_floating_point() or self.start.is_complex()

    @property
    def is_unwritten(self) -> bool:
        """Whether torch's count of writes tells that a large buffer still holds ``start``.

        Some operations of torch, the one of BatchNorm among them, write without being counted. They write to small
        buffers, and those are compared.
        """
        return self.start.numel() > LARGE and self.tensor._version == self.version  # noqa: SLF001 - torch's only name for it

    def now(self) -> Tensor | None:
        """The tensor that is in the buffer's place; None for another shape or dtype: a cache and no statistic."""
        now = self.owner._buffers.get(self.key)  # noqa: SLF001 - torch has no public way to set a buffer
        if now is None or now.shape != self.start.shape or now.dtype != self.start.dtype:
            return None
        return now

    def set(self, value: Tensor) -> None:
        """Write ``value`` into the buffer, and put the buffer back if something else is in its place."""
        self.tensor.copy_(value)
        self.owner._buffers[self.key] = self.tensor  # noqa: SLF001 - as above
        self.version = self.tensor._version  # noqa: SLF001 - as above


class ReplicaBuffers:
    """The buffers of one model.

    Args:
        module: The model; buffers that it gets later are found when the next step begins.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: dict[str, _Buffer] = {}
        self._made: list[dict[str, Tensor] | None] = []

    def __str__(self) -> str:
        """What must be the same on all instances, in words."""
        if not self._buffers:
            return "no buffers"
        digest = hashlib.blake2b("\n".join(self._buffers).encode(), digest_size=4).hexdigest()
        return f"{len(self._buffers)} buffers, names {digest}"

    def __len__(self) -> int:
        return len(self._buffers)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Remember what every replica starts from."""
        self._made = []
        known = {id(buffer.tensor): buffer for buffer in self._buffers.values()}
        found: dict[int, _Buffer] = {}
        self._buffers = {}
        for prefix, owner in self._module.named_modules():
            for key, tensor in owner._buffers.items():  # noqa: SLF001 - with their owners, which named_buffers() leaves out
                if tensor is None or id(tensor) in found or tensor.layout != torch.strided:
                    continue
                buffer = known.get(id(tensor))
                version = tensor._version  # noqa: SLF001 - as above
                if buffer is None or not buffer.is_unwritten:
                    buffer = _Buffer(owner=owner, key=key, tensor=tensor, version=version, start=tensor.clone())
                self._buffers[f"{prefix}.{key}"] = found[id(tensor)] = buffer

    @torch.no_grad()
    def end_replica(self, *, has_run: bool) -> None:
        """Keep what the next local replica made of the buffers, and put them back for the one after it."""
        if not has_run:
            self._made.append(None)
            return
        changed = self._find_changed()
        self._made.append({name: made.clone() for name, made in changed.items()})
        for name in changed:
            self._buffers[name].set(self._buffers[name].start)

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what the step began with."""
        for name in self._find_changed():
            self._buffers[name].set(self._buffers[name].start)
        self._made = []

    def _find_changed(self) -> dict[str, Tensor]:
        """The buffers that are no longer what the step began with, with their values now."""
        found = {
            name: now
            for name, buffer in self._buffers.items()
            if (now := buffer.now()) is not None and not (now is buffer.tensor and buffer.is_unwritten)
        }
        differs = [(now != self._buffers[name].start).any() for name, now in found.items()]
        flags = torch.stack([flag.to(differs[0].device) for flag in differs]).tolist() if differs else []
        return {name: now for (name, now), is_changed in zip(found.items(), flags, strict=True) if is_changed}

    def changed(self) -> int:
        """Which buffers the local replicas have changed: bit i stands for the i-th name."""
        names = set().union(*(made for made in self._made if made))
        return sum(1 << i for i, name in enumerate(self._buffers) if name in names)

    @torch.no_grad()
    def combine(self, group: Group, layout: ReplicaLayout, changed: int) -> None:
        """Give the buffers in ``changed``, the same on all instances, what all replicas made of them."""
        names = [name for i, name in enumerate(self._buffers) if changed >> i & 1]
        averages = [name for name in names if self._buffers[name].is_average]
        if averages:
            self._average(group, layout, averages)
        if others := sorted(set(names) - set(averages)):
            self._take_from_replica_0(group, layout, others)
        for name in names:
            del self._buffers[name]

    def _average(self, group: Group, layout: ReplicaLayout, names: list[str]) -> None:
        """The mean over the replicas that had a micro batch: each brings its values, and a 1 to be counted."""
        starts = [self._buffers[name].start for name in names]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, start in enumerate(starts):
            groups.setdefault((start.device, wide_dtype(start.dtype)), []).append(i)
        tree = ReplicaTree(group, layout)
        for made in self._made:
            values = [(made or {}).get(name, start) for name, start in zip(names, starts, strict=True)]
            one = torch.ones(1)
            rows = [
                join([values[i] for i in members] + [one.to(device)], dtype)
                for (device, dtype), members in groups.items()
            ]
            tree.push([torch.zeros_like(row) for row in rows] if made is None else rows)
        for row, members in zip(tree.finish(), groups.values(), strict=True):
            means = cut(row[:-1] / row[-1], [starts[i] for i in members])
            for i, mean in zip(members, means, strict=True):
                self._buffers[names[i]].set(mean)

    def _take_from_replica_0(self, group: Group, layout: ReplicaLayout, names: list[str]) -> None:
        if 0 in layout.replicas_of(group.backend.instance_index):
            made = self._made[0] or {}
            for name in names:
                self._buffers[name].set(made.get(name, self._buffers[name].start))
        if layout.num_instances > 1:
            broadcast_tensors(group, 0, [self._buffers[name].tensor for name in names])
