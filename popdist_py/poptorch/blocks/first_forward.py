"""What is seen of a model's first forward: which blocks it enters, what runs in each, and what backward keeps.

Everything else about blocks follows from it. Later forwards are not looked at, and cost nothing.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn


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

    Attributes:
        blocks: Those that were entered; block ``k`` of the others is ``blocks[k - 1]``.
        block_of: For each module that ran, the block in which it ran first.
        saved_bytes: For each block, bytes that backward needs, without parameters.
        ipus: For each block, its virtual IPU, once the blocks have been dealt.
    """

    def __init__(self) -> None:
        self.blocks: list[EnteredBlock] = []
        self.block_of: dict[nn.Module, int] = {}
        self.saved_bytes: dict[int, int] = {}
        self.ipus: tuple[int, ...] = (0,)
        self.current = 0
        self.num_automatic: int | None = None
        self.earlier_error: BaseException | None = None
        self._seen: set[int] = set()

    def enter(self, block: EnteredBlock) -> None:
        """From here on what runs belongs to ``block``."""
        if block.user_id is None and self.num_automatic is not None:
            block = EnteredBlock(user_id=str(self.num_automatic), ipu_id=block.ipu_id, module=block.module)
            self.num_automatic += 1
        self.blocks.append(block)
        self.current = len(self.blocks)

    def begin(self, module: nn.Module, earlier_error: BaseException | None) -> None:
        """``module`` is called; ``earlier_error`` is what is being handled while that is so."""
        self.earlier_error = earlier_error
        self._seen.update(one.untyped_storage().data_ptr() for one in module.parameters())

    def note_module(self, module: nn.Module, _arguments: object) -> None:
        """A hook: ``module`` runs in the current block."""
        if seen_forward.get() is self:
            self.block_of.setdefault(module, self.current)

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook: backward needs ``tensor``."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.saved_bytes[self.current] = self.saved_bytes.get(self.current, 0) + storage.nbytes()
        return tensor


seen_forward: Final[ContextVar[FirstForward | None]] = ContextVar("seen_forward", default=None)
"""The forward that is being looked at in this thread; None otherwise."""


def watch_first_forward(module: nn.Module, then: Callable[[FirstForward], None]) -> FirstForward:
    """Look at the next forward of ``module``, and call ``then`` when it has ended well.

    Returns:
        What is seen; empty until then.
    """
    seen = FirstForward()
    scope = ExitStack()
    handles = [part.register_forward_pre_hook(seen.note_module) for part in module.modules()]

    def begin(_module: nn.Module, _arguments: object) -> None:
        seen.begin(module, sys.exception())
        scope.callback(seen_forward.reset, seen_forward.set(seen))
        scope.enter_context(torch.autograd.graph.saved_tensors_hooks(seen.note_saved, lambda it: it))

    def end(_module: nn.Module, _arguments: object, _output: object) -> None:
        scope.close()
        for handle in handles:
            handle.remove()
        if sys.exception() is seen.earlier_error:
            then(seen)

    handles.append(module.register_forward_pre_hook(begin, prepend=True))
    handles.append(module.register_forward_hook(end, always_call=True))
    return seen
