"""What the buffers of one module are, and what they were when a step began."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LARGE: Final = 1 << 16
"""Numbers above which a buffer to which torch has counted no write is compared in checked steps only."""

_NEVER: Final = -1
"""No count of writes."""


@dataclass(slots=True, kw_only=True)
class ModelBuffer:
    """One buffer: where it is, and what it was when the step began.

    Attributes:
        name: In messages.
        owner: The module that has the buffer.
        key: The buffer's name there.
        tensor: The buffer.
        version: How often the buffer had been written to when it last held ``start``.
        start: A copy of the buffer, from the beginning of the step.
        is_uncounted: Whether it was found written although torch had counted no write: through ``.data``.
    """

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    version: int
    start: Tensor
    is_uncounted: bool = False

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
        if self.is_uncounted or self.start.numel() <= LARGE:
            return False
        return self.tensor._version == self.version  # noqa: SLF001 - torch's only name for it

    @property
    def is_of_same_form(self) -> bool:
        """Whether the start has the shape, dtype and device of the buffer, which ``.data`` may have changed."""
        now, start = self.tensor, self.start
        return now.shape == start.shape and now.dtype == start.dtype and now.device == start.device

    def now(self) -> Tensor | None:
        """The tensor that is in the buffer's place; None for another shape or dtype."""
        now = self.owner._buffers.get(self.key)  # noqa: SLF001 - torch has no public way to set a buffer
        if now is None or now.shape != self.start.shape or now.dtype != self.start.dtype:
            return None
        return now

    def set(self, value: Tensor) -> None:
        """Write ``value`` into the buffer, and put the buffer back if something else is in its place."""
        self.tensor.copy_(value)
        self.owner._buffers[self.key] = self.tensor  # noqa: SLF001 - as above
        self.version = self.tensor._version  # noqa: SLF001 - as above

    def become(self, value: Tensor) -> None:
        """Write ``value`` into the buffer, which no longer holds ``start`` then."""
        self.set(value)
        self.forget()

    def forget(self) -> None:
        """The buffer no longer holds ``start``."""
        self.version = _NEVER


class ModelBuffers:
    """The buffers of one module, as they were when they were last looked at.

    Args:
        module: Buffers that it gets later are found when it is looked at again.

    Attributes:
        buffers: The module's, by name; a tied one once.
        apart: Names of those that a replica has made or changed in form, and of which the instances have
            different versions, with what told whether they had changed: they are left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers: dict[str, ModelBuffer] = {}
        self.apart: dict[str, tuple[int, int] | None] = {}
        self._described: tuple[list[int], str] = ([], "no buffers")

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.buffers)

    def __str__(self) -> str:
        """What must be the same on all instances, in words."""
        key = [id(buffer.tensor) for buffer in self.buffers.values()]
        if key != self._described[0]:
            forms = [f"{name} {it.start.dtype} {tuple(it.start.shape)}" for name, it in self.buffers.items()]
            digest = hashlib.blake2b("\n".join(forms).encode(), digest_size=4).hexdigest()
            self._described = (key, f"{len(forms)} buffers, names and shapes {digest}")
        return self._described[1]

    @property
    def has_none(self) -> bool:
        """Whether there are no buffers now and were none; most models have none, and every step asks."""
        return not self.buffers and next(self.module.buffers(), None) is None

    def found(self) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
        """Name, owner, key and tensor of every buffer that is there now."""
        seen, waiting = {self.module}, [("", self.module)]
        while waiting:  # several times faster than named_modules()
            prefix, owner = waiting.pop()
            for key, tensor in owner._buffers.items():  # noqa: SLF001 - with their owners, which named_buffers() leaves out
                yield prefix + key, owner, key, tensor
            for name, child in owner._modules.items():  # noqa: SLF001 - as above
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append((f"{prefix}{name}.", child))

    def remember(self, *, is_checked: bool = False) -> list[str]:
        """Remember what each buffer is now.

        Args:
            is_checked: Whether to look for large buffers that were written without being counted.

        Returns:
            The names of these, if so.
        """
        if self.has_none:
            return []
        known = {id(buffer.tensor): buffer for buffer in self.buffers.values()}
        seen: set[int] = set()
        self.buffers, faults = {}, []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, owner, key, tensor in self.found():
            if tensor is None or id(tensor) in seen or tensor.layout != torch.strided or is_lazy(tensor):
                continue
            seen.add(id(tensor))
            if name in self.apart:
                self.apart[name] = mark_of(tensor)
                continue
            buffer = known.get(id(tensor))
            if buffer is None or not buffer.is_of_same_form:
                version = tensor._version  # noqa: SLF001 - as above
                buffer = ModelBuffer(
                    name=name, owner=owner, key=key, tensor=tensor, version=version, start=tensor.detach().clone()
                )
            elif not buffer.is_unwritten:
                buffer.name, buffer.owner, buffer.key = name, owner, key
                buffer.version = tensor._version  # noqa: SLF001 - as above
                targets.append(buffer.start)
                sources.append(tensor)
            elif is_checked and not torch.equal(buffer.start, tensor):
                faults.append(name)
            self.buffers[name] = buffer
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)  # one call: four times faster than copies one by one
        return faults


def find_changed(buffers: Mapping[str, ModelBuffer], *, all_of_them: bool = False) -> dict[str, Tensor]:
    """The buffers that are no longer what the step began with, with their values now.

    Args:
        buffers: By name.
        all_of_them: Whether to compare large ones, too, of which torch has counted no write.
    """
    found: dict[str, Tensor] = {}
    flags: dict[str, Tensor] = {}
    for name, buffer in buffers.items():
        now = buffer.now()
        if now is None:
            continue
        is_unwritten = now is buffer.tensor and buffer.is_unwritten
        if is_unwritten and not all_of_them:
            continue
        if now.is_cpu and not torch.equal(now, buffer.start):
            found[name] = now
            buffer.is_uncounted |= is_unwritten
        elif not now.is_cpu:
            flags[name] = (now != buffer.start).any()
    if flags:
        device = next(iter(flags.values())).device
        are_changed = torch.stack([flag.to(device) for flag in flags.values()]).tolist()
        for name, is_changed in zip(flags, are_changed, strict=True):
            buffer = buffers[name]
            if is_changed and (now := buffer.now()) is not None:
                found[name] = now
                buffer.is_uncounted |= now is buffer.tensor and buffer.is_unwritten
    return found


def mark_of(tensor: Tensor | None) -> tuple[int, int] | None:
    """What tells, for a buffer that is left alone, whether it has changed."""
    return None if tensor is None else (id(tensor), tensor._version)  # noqa: SLF001 - torch's only name for it
