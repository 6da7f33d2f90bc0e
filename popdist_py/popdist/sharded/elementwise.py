"""Which optimizers may be sharded: those that treat each element by itself.

A parameter is then updated in parts to the bits it would have as a whole. The optimizer shows that on a small
tensor: it steps on the whole of one and on the two halves of another, and the bits must be equal.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist.errors import OptimizerError

REASONS: Final = {
    "LBFGS": "takes inner products over all parameters",
    "SparseAdam": "updates the rows of sparse gradients, and replicas add dense ones",
    "Adafactor": "keeps means over the rows and columns of each matrix",
    "Muon": "makes each whole matrix orthogonal",
    "Shampoo": "multiplies each matrix by matrices made of the whole of it",
    "SOAP": "multiplies each matrix by matrices made of the whole of it",
    "LAMB": "scales each update by the norms of the whole parameter and of the whole update",
    "LARS": "scales each gradient by the norms of the whole parameter and of the whole gradient",
}
"""Why the optimizer of this name cannot be sharded."""

_ROWS, _COLUMNS, _STEPS, _RATE = 16, 16, 3, 0.01


def check_elementwise(
    optimizer_class: type[Optimizer],
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
    device: torch.device,
) -> frozenset[str]:
    """Check that the optimizer treats each element by itself; if not, raise an OptimizerError with the reason.

    Args:
        optimizer_class: Of torch or the program's own.
        defaults: Keyword arguments of the optimizer.
        settings: Of a parameter group. A learning rate of 0 is tried as 0.01.
        device: Where the parameters are.

    Returns:
        The names in the optimizer's state of what has one number for each element.
    """
    names = [kind.__name__ for kind in optimizer_class.__mro__]
    if reason := next((REASONS[name] for name in REASONS if name.lower() in map(str.lower, names)), None):
        raise OptimizerError(_refusal(optimizer_class, reason))
    make = functools.partial(_make, optimizer_class, defaults, settings)
    values = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=values).to(device)
    whole = start.clone()
    state = _train(make, whole, gradients)
    halves, half = start.clone().view(-1), start.numel() // 2
    for part in (slice(None, half), slice(half, None)):
        try:
            _train(make, halves[part], [gradient.view(-1)[part] for gradient in gradients])
        except Exception as error:
            raise OptimizerError(_refusal(optimizer_class, f"does not take a row of numbers: {error}")) from error
    if not torch.equal(whole.view(-1), halves):
        raise OptimizerError(
            _refusal(optimizer_class, "updates a half of a parameter to other bits than the whole")
        )
    return frozenset(
        name for name, value in state.items() if isinstance(value, Tensor) and value.shape == whole.shape
    )


def _make(
    optimizer_class: type[Optimizer],
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
    parameter: Parameter,
) -> Optimizer:
    """An optimizer of one parameter, with a learning rate that is not 0."""
    optimizer = optimizer_class([{**settings, "params": [parameter]}], **defaults)
    if "lr" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["lr"] = _RATE
    return optimizer


def _train(make: Callable[[Parameter], Optimizer], values: Tensor, gradients: list[Tensor]) -> dict[str, Any]:
    """Update ``values`` in place by each of ``gradients``; the optimizer's state afterwards."""
    parameter = Parameter(values)
    optimizer = make(parameter)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        quiet_step(optimizer)
    return dict(optimizer.state[parameter])


def quiet_step(optimizer: Optimizer) -> None:
    """A step that torch's hooks around steps do not see: it is a part of another one, or none of the program's."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # what torch's wrapper for hooks and profiles is known by
        step = step.__wrapped__
    functools.partial(step, optimizer)()


def _refusal(optimizer_class: type[Optimizer], reason: str) -> str:
    return (
        f"ShardedOptimizer cannot shard {optimizer_class.__name__}: it {reason}, and each instance has only "
        "a part of the elements. Use it without ShardedOptimizer, or take one that treats each element by itself, "
        "such as AdamW"
    )
