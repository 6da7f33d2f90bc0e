"""What has become of a gradient, noted on the tensor itself: whether an optimizer has used it, and who made it.

A used gradient is one that nobody waits for: a step of an optimizer has read it. The number of writes that torch
had counted is noted with it, so one to which a backward pass has added since is not used. A reduced gradient was
made by popdist, so it is the same on all instances.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

_optimizers: Final[dict[int, "weakref.ref[Optimizer]"]] = {}
"""Those that have ever made a step, by their identity."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def note_step(optimizer: Optimizer) -> None:
    """A step of ``optimizer`` has used the gradients of its parameters, or its closure has handed them over."""
    key = id(optimizer)
    if key not in _optimizers:
        _optimizers[key] = weakref.ref(optimizer, lambda _: _optimizers.pop(key, None))
    for group in optimizer.param_groups:
        note_used(group["params"])


def note_used(parameters: Iterable[Tensor]) -> None:
    """Nobody waits any more for the gradients that ``parameters`` have now."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient._popdist_used = gradient._version  # noqa: SLF001 - ours, and torch's only name for it


def take_gradients(parameters: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
    """Set the ``.grad`` of all ``parameters`` to None.

    Returns:
        The gradients that somebody waits for, by the identity of their parameters, and whether there were others.
    """
    waited_for, are_some_used = dict[int, Tensor](), False
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            parameter.grad = None
            if getattr(gradient, "_popdist_used", None) == gradient._version:  # noqa: SLF001 - as is_used(), faster
                are_some_used = True
            else:
                waited_for[id(parameter)] = gradient
    return waited_for, are_some_used


def is_used(gradient: Any) -> bool:  # noqa: ANN401 - a tensor with what is noted on it
    """Whether nobody waits for ``gradient``."""
    return getattr(gradient, "_popdist_used", None) == gradient._version  # type: ignore[no-any-return] # noqa: SLF001 - as above


def held_parameters() -> set[int]:
    """Identities of the parameters of all optimizers that have ever made a step."""
    found = [optimizer for reference in tuple(_optimizers.values()) if (optimizer := reference()) is not None]
    return {id(parameter) for optimizer in found for parameter in parameters_of(optimizer)}


def note_reduced(gradient: Any, *, is_reduced: bool = True) -> None:  # noqa: ANN401 - as above
    """Whether popdist has made ``gradient``, and nothing of one instance was added to it since."""
    gradient._popdist_reduced = is_reduced  # noqa: SLF001 - ours


def is_reduced(gradient: Tensor) -> bool:
    """Whether popdist has made ``gradient``, the same on all instances."""
    return bool(getattr(gradient, "_popdist_reduced", False))
