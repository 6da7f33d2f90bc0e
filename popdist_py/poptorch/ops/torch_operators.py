"""`torch.ops.poptorch`: operators of torch by which programs reach PopTorch's operations."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from poptorch.blocks import Block
from poptorch.enums import OverlapMode
from poptorch.losses import LOSSES, identity_loss
from poptorch.ops.hints import (
    ipu_print_tensor,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.ops.program_functions import nop, recomputationCheckpoint

LIBRARY: Final = torch.library.Library("poptorch", "FRAGMENT")
"""The operators exist as long as this does."""


def _nothing(*_unused: object) -> None:
    """Do nothing: there is no graph."""


def _begin_block(stage_id: int, phase_id: int, ipu_id: int) -> None:
    del phase_id
    Block.start(None if stage_id < 0 else str(stage_id), ipu_id if ipu_id >= 0 else None)


def _print(tensor: Tensor, title: str) -> Tensor:
    return ipu_print_tensor(tensor, title)


def _loss(x: Tensor, reduction: int) -> Tensor:
    return identity_loss(x, reduction)  # type: ignore[arg-type] # which it checks


_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "push_name_scope(str name) -> ()": _nothing,
    "pop_name_scope() -> ()": _nothing,
    "begin_ipu_block(int stage_id, int phase_id, int ipu_id) -> ()": _begin_block,
    "end_ipu_block() -> ()": _nothing,
    "nop(Tensor(a) tensor) -> Tensor(a)": nop,
    "recomputation_checkpoint(Tensor(a) tensor) -> Tensor(a)": recomputationCheckpoint,
    "identity_loss(Tensor x, int reduction) -> Tensor": _loss,
    "ipu_print_tensor(Tensor(a) tensor, str title='') -> Tensor(a)": _print,
    "set_available_memory(Tensor(a) tensor, float proportion) -> Tensor(a)": set_available_memory,
    "set_overlap_for_input(Tensor(a) tensor, str mode) -> Tensor(a)": lambda tensor, mode: set_overlap_for_input(
        tensor, OverlapMode(mode)
    ),
    "set_overlap_for_output(Tensor(a) tensor, str mode) -> Tensor(a)": lambda tensor, mode: set_overlap_for_output(
        tensor, OverlapMode(mode)
    ),
}
"""The schema of each operator, and what it does; torch differentiates that."""

for _schema, _function in _OPERATORS.items():
    LIBRARY.impl(LIBRARY.define(_schema), _function, "CompositeImplicitAutograd")
LOSSES.update({torch.ops.poptorch.identity_loss, torch.ops.poptorch.identity_loss.default})
