"""Operators of torch that do what poptorch's functions do: ``torch.ops.poptorch.nop`` is ``poptorch.nop``."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from poptorch.blocks.annotations import Block
from poptorch.enums import OverlapMode
from poptorch.losses import LOSSES, identity_loss
from poptorch.ops import hints
from poptorch.ops.program_functions import nop, recomputationCheckpoint


def _with_overlap(tensor: Tensor, mode: str) -> Tensor:
    return hints.set_overlap_for_input(tensor, OverlapMode(mode))


def _nothing(*_args: object) -> None:
    """Scopes of names and ends of blocks have no effect: there is no graph that would show them."""


_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "push_name_scope(str name) -> ()": _nothing,
    "pop_name_scope() -> ()": _nothing,
    "begin_ipu_block(int stage, int phase, int ipu) -> ()": lambda stage, _phase, ipu: Block.start(stage, ipu),
    "end_ipu_block() -> ()": _nothing,
    "identity_loss(Tensor x, int reduction) -> Tensor": identity_loss,
    "nop(Tensor(a) x) -> Tensor(a)": nop,
    "recomputation_checkpoint(Tensor(a) x) -> Tensor(a)": recomputationCheckpoint,
    "set_available_memory(Tensor(a) x, float proportion) -> Tensor(a)": hints.set_available_memory,
    "set_overlap_for_input(Tensor(a) x, str mode) -> Tensor(a)": _with_overlap,
    "set_overlap_for_output(Tensor(a) x, str mode) -> Tensor(a)": _with_overlap,
    'ipu_print_tensor(Tensor(a) x, str title="") -> Tensor(a)': hints.ipu_print_tensor,
}

LIBRARY: Final = torch.library.Library("poptorch", "DEF")  # torch has the operators for as long as this lives

for _schema, _function in _OPERATORS.items():
    # "implicit": torch differentiates the operations within
    LIBRARY.impl(LIBRARY.define(_schema), _function, "CompositeImplicitAutograd")

LOSSES.add(torch.ops.poptorch.identity_loss)
