"""What is seen of a model's first forward: which blocks it enters, what runs in each, and what backward keeps.

Everything else about blocks follows from it. Later forwards are not looked at, and cost nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node

from poptorch.custom_types import tensors_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredBlock:
    """A block that a forward entered.

    Attributes:
        user_id: What the program calls it; None for a block without a name.
        ipu_id: The virtual IPU that the program gave it; None for none.
        module: The module that begins it; None for a block of statements.
    """

    user_id: str | None
    ipu_id: int | None
    module: nn.Module | None = None


class FirstForward:
    """What one forward of a model did, in the order of its blocks. Block 0 is what runs before the first one.

    Args:
        module: The model.

    Attributes:
        blocks: Those that were entered; block ``k`` of the others is ``blocks[k - 1]``.
        block_of: For each module that ran, the block in which it ran first.
        saved_bytes: For each block, bytes that backward needs, without parameters.
        ipus: For each block, its virtual IPU, once the blocks have been dealt.
    """

    def __init__(self, module: nn.Module) -> None:
        self.blocks: list[EnteredBlock] = []
        self.block_of: dict[nn.Module, int] = {}
        self.saved_bytes: dict[int, int] = {}
        self.ipus: tuple[int, ...] = (0,)
        self.current = 0
        self.num_automatic: int | None = None
        self._changes = [(0, 0)]
        self._seen = {*map(_place_of, module.parameters())}

    def enter(self, block: EnteredBlock) -> None:
        """From here on what runs belongs to ``block``."""
        if block.user_id is None and self.num_automatic is not None:
            block = EnteredBlock(user_id=str(self.num_automatic), ipu_id=block.ipu_id, module=block.module)
            self.num_automatic += 1
        self.blocks.append(block)
        self.leave(len(self.blocks))
        if block.module is not None:
            self.block_of.setdefault(block.module, self.current)

    def leave(self, current: int) -> None:
        """From here on what runs belongs to block ``current``."""
        self.current = current
        self._changes.append((_next_number(), current))

    def note_module(self, module: nn.Module, _arguments: object) -> None:
        """A hook: ``module`` runs in the current block."""
        if seen_forward.get() is self:
            self.block_of.setdefault(module, self.current)

    def note_saved(self, output: Any) -> None:  # noqa: ANN401 - whatever a forward gives
        """What ``output`` needs for its gradients is what each block keeps. Nothing is computed to find it.

        What hooks keep in place of tensors, as those of torch.utils.checkpoint, is not counted.
        """
        for node in sorted(_nodes_of(tensors_of(output)), key=_number_of):
            block = self._changes[bisect_right(self._changes, (_number_of(node), len(self.blocks))) - 1][1]
            for tensor in _kept_by(node):
                place = _place_of(tensor)
                if place not in self._seen:
                    self._seen.add(place)
                    self.saved_bytes[block] = self.saved_bytes.get(block, 0) + _size_of(tensor)


seen_forward: Final[ContextVar[FirstForward | None]] = ContextVar("seen_forward", default=None)
"""The forward that is being looked at in this thread; None otherwise."""


def look_at_forward(module: nn.Module, call: Callable[[], T]) -> tuple[T, FirstForward]:
    """Have ``call`` run the forward of ``module``, and look at it.

    What torch.jit compiled is one piece: nothing is seen of what runs within it.

    Returns:
        What ``call`` gives, and what was seen.
    """
    seen = FirstForward(module)
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    hooks = [part.register_forward_pre_hook(seen.note_module) for part in parts]
    outer = seen_forward.set(seen)
    try:
        result = call()
    finally:
        seen_forward.reset(outer)
        for hook in hooks:
            hook.remove()
    seen.note_saved(result)
    return result, seen


def _next_number() -> int:
    """The number that torch gives to the next operation of this thread that has a gradient."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # noqa: SLF001 - torch.fx asks so


def _number_of(node: Node) -> int:
    return int(node._sequence_nr())  # noqa: SLF001 - as above


def _nodes_of(outputs: Iterable[torch.Tensor]) -> list[Node]:
    """What computes the gradients of ``outputs``."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    found = {*waiting}
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return [*found]


def _kept_by(node: Node) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            kept = getattr(node, name)
            for one in kept if isinstance(kept, list | tuple) else (kept,):
                tensor = getattr(one, "data", None)
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def _place_of(tensor: torch.Tensor) -> int:
    """Where a tensor's numbers lie; sparse tensors have no one place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _size_of(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor._nnz() * tensor.element_size()  # noqa: SLF001 - torch has no public way to ask
