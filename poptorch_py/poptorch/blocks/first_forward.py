"""The record of a model's first forward: the blocks it enters, what runs in each, and what backward keeps."""

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredBlock:
    """A block that a forward entered."""

    user_id: str | None  # what the program calls it; None for a block without a name
    ipu_id: int | None  # the virtual IPU that the program gave it; None for none
    module: nn.Module | None = None  # the module that begins it; None for a block of statements


class FirstForward:
    """What one forward of a model did, in the order of its blocks. Block 0 is what runs before the first one."""

    def __init__(self, module: nn.Module) -> None:
        self.blocks: list[EnteredBlock] = []  # those that were entered; block ``k`` is ``blocks[k - 1]``
        self.block_of: dict[nn.Module, int] = {}  # for each module that ran, the block in which it ran first
        self.saved_bytes: dict[int, int] = {}  # for each block, bytes that backward needs, without parameters
        self.ipus: tuple[int, ...] = (0,)  # for each block, its virtual IPU, once the blocks have been dealt
        self.current = 0
        self.num_automatic: int | None = None
        self._kept = {_place_of(parameter): parameter.detach() for parameter in module.parameters()}

    def enter(self, block: EnteredBlock) -> None:
        """Record that what runs from here on belongs to ``block``."""
        if block.user_id is None and self.num_automatic is not None:
            block = EnteredBlock(user_id=str(self.num_automatic), ipu_id=block.ipu_id, module=block.module)
            self.num_automatic += 1
        self.blocks.append(block)
        self.current = len(self.blocks)
        if block.module is not None:
            self.block_of.setdefault(block.module, self.current)

    def record_module(self, module: nn.Module, _arguments: object) -> None:
        """Record that ``module`` runs in the current block; a hook of modules."""
        if recorded_forward.get() is self:
            self.block_of.setdefault(module, self.current)

    def record_saved(self, tensor: Tensor) -> Tensor:
        """Count ``tensor``, which backward needs, for the current block; a hook of torch's autograd."""
        place = _place_of(tensor)
        if place not in self._kept:
            self._kept[place] = tensor.detach()  # so that no other tensor comes to lie there meanwhile
            self.saved_bytes[self.current] = self.saved_bytes.get(self.current, 0) + _num_bytes(tensor)
        return tensor

    def end(self) -> None:
        """Let go of the tensors that the forward has kept."""
        self._kept.clear()


recorded_forward: Final[ContextVar[FirstForward | None]] = ContextVar("recorded_forward", default=None)
"""The forward that is recorded in this thread; None otherwise."""


def record_forward(module: nn.Module, call: Callable[[], T]) -> tuple[T, FirstForward]:
    """Have ``call`` run the forward of ``module``, and record it; what torch.jit compiled is one piece."""
    try:
        return _record(module, call, counts_saved=True)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # which torch.func refuses
            raise
    return _record(module, call, counts_saved=False)


def _record(module: nn.Module, call: Callable[[], T], *, counts_saved: bool) -> tuple[T, FirstForward]:
    seen = FirstForward(module)
    with ExitStack() as recording:
        recording.callback(seen.end)
        for part in module.modules():
            if not isinstance(part, torch.jit.ScriptModule):
                recording.enter_context(part.register_forward_pre_hook(seen.record_module))
        recording.callback(recorded_forward.reset, recorded_forward.set(seen))
        if counts_saved:
            recording.enter_context(saved_tensors_hooks(seen.record_saved, _unchanged))
        return call(), seen


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _place_of(tensor: Tensor) -> int:
    """Where a tensor's numbers lie; sparse tensors have no one place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _num_bytes(tensor: Tensor) -> int:
    """The size of all the memory that a tensor keeps; of a sparse one, that of its values."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values().nbytes
