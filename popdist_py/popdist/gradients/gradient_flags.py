"""Two flags on a parameter's ``.grad``: an optimizer has used it, and popdist has reduced it.

A used gradient may be dropped: a step of an optimizer has read it. Torch's count of writes is kept with the
flag, so a gradient to which a backward pass has added since is not used. A reduced gradient was made by popdist,
so it is the same on all instances.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from popdist.torch_private import num_writes

_optimizers: Final[dict[int, "weakref.ref[Optimizer]"]] = {}
"""The optimizers that have ever made a step, by their identity."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def mark_used(parameters: Iterable[Tensor]) -> None:
    """Mark the gradients that these parameters have now as used."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient._popdist_used = num_writes(gradient)  # noqa: SLF001 - ours


def mark_step(optimizer: Optimizer) -> None:
    """Mark the gradients of an optimizer's parameters as used, after its step or its closure."""
    key = id(optimizer)
    if key not in _optimizers:
        _optimizers[key] = weakref.ref(optimizer, lambda _: _optimizers.pop(key, None))
    for group in optimizer.param_groups:
        mark_used(group["params"])


def is_used(gradient: Any) -> bool:  # noqa: ANN401 - a tensor with a flag
    """Whether ``gradient`` was used and not written since."""
    return getattr(gradient, "_popdist_used", None) == num_writes(gradient)


def remove_gradients(parameters: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
    """Set every ``.grad`` to None; gives the unused ones by identity of the parameter, and whether others were."""
    unused, are_some_used = dict[int, Tensor](), False
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            if is_used(gradient):
                are_some_used = True
            else:
                unused[id(parameter)] = gradient
    return unused, are_some_used


def stepped_parameters() -> set[int]:
    """Identities of the parameters of all optimizers that have ever made a step."""
    found = [optimizer for reference in tuple(_optimizers.values()) if (optimizer := reference()) is not None]
    return {id(parameter) for optimizer in found for parameter in parameters_of(optimizer)}


def mark_reduced(gradient: Any, *, is_reduced: bool = True) -> None:  # noqa: ANN401 - a tensor with a flag
    """Say whether popdist has made ``gradient``, and nothing of one instance was added to it since."""
    gradient._popdist_reduced = is_reduced  # noqa: SLF001 - ours


def is_reduced(gradient: Tensor) -> bool:
    """Whether popdist has made ``gradient``, the same on all instances."""
    return bool(getattr(gradient, "_popdist_reduced", False))
