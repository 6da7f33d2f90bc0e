"""What has become of a gradient, noted on the tensor itself: whether an optimizer has used it, and who made it.

A used gradient is one that nobody waits for: a step of an optimizer has read it. The number of writes that torch
had counted is noted with it, so one to which a backward pass has added since is not used. A reduced gradient was
made by popdist, so it is the same on all instances.

What every step does, C does where there is the extension: it takes half of the time.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist import extensions

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


def _note_used(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient._popdist_used = gradient._version  # noqa: SLF001 - ours, and torch's only name for it


def _take_gradients(parameters: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
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


def _tensors_of(module: nn.Module | None, name: str) -> list[Any]:
    found: list[Any] = []
    waiting, seen = [module], set()
    for current in waiting:
        if current is not None:
            for tensor in getattr(current, name).values():
                if tensor is not None:
                    found.append(tensor)  # noqa: PERF401 - a comprehension would be one more call
            if (children := current._modules) and current not in seen:  # noqa: SLF001 - what modules() reads
                seen.add(current)
                waiting += children.values()
    return found


def _module_parameters(module: nn.Module | None) -> list[Parameter]:
    return _tensors_of(module, "_parameters")


def _module_buffers(module: nn.Module | None) -> list[Tensor]:
    return _tensors_of(module, "_buffers")


def _fill_slots(
    _kind: type[Tensor],
    parameters: Sequence[Tensor],
    slots: Sequence[Tensor],
    _are_taken: bool,  # noqa: FBT001 - as C takes it
) -> tuple[int, list[int]]:
    used, left = 0, []
    for position, (parameter, slot) in enumerate(zip(parameters, slots, strict=True)):
        if parameter.grad is None:
            slot.zero_()
        else:
            used |= 1 << position
            left.append(position)
    return used, left


def _give_slots(parameters: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    for parameter, slot in zip(parameters, slots, strict=True):
        gradient = slot.detach()
        note_reduced(gradient)
        parameter.grad = gradient


def _unreduced(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [it for it in parameters if it.grad is not None and not is_reduced(it.grad)]


def _fill_slots_in_c(extension: Any) -> Any:  # noqa: ANN401 - a function of the extension, or None
    try:
        extension.fill_slots(Tensor, [], [], False)  # noqa: FBT003 - as above
    except (AttributeError, ValueError):  # no extension, or a torch whose tensors speak another DLPack
        return None
    return extension.fill_slots


Taken: TypeAlias = tuple[dict[int, Tensor], bool]

_in_c: Final = extensions.find("popdist.gradients._notes")

note_used: Final[Callable[[Iterable[Tensor]], None]] = _in_c.note_used if _in_c else _note_used
"""Nobody waits any more for the gradients that these parameters have now."""

take_gradients: Final[Callable[[Iterable[Tensor]], Taken]] = _in_c.take_gradients if _in_c else _take_gradients
"""Sets the ``.grad`` of all these parameters to None.

It gives the gradients that somebody waits for, by the identity of their parameters, and whether there were others.
"""

module_parameters: Final[Callable[[nn.Module | None], list[Parameter]]] = (
    _in_c.module_parameters if _in_c else _module_parameters
)
"""The parameters of a module in a fixed order; a tied parameter, or one of a tied module, may come twice.

Several times faster than ``module.parameters()``, because every step asks for them.
"""

module_buffers: Final[Callable[[nn.Module | None], list[Tensor]]] = (
    _in_c.module_buffers if _in_c else _module_buffers
)
"""The buffers of a module, as :data:`module_parameters` gives its parameters."""

FillSlots: TypeAlias = Callable[[type[Tensor], list[Parameter], list[Tensor], bool], tuple[int, list[int]]]

fill_slots: Final[FillSlots] = _fill_slots_in_c(_in_c) or _fill_slots
"""Copies the gradient of each parameter into its slot, and zeros where there is none.

It takes the class Tensor, the parameters, their slots, and whether to set to None each ``.grad`` that it copied.
It gives which parameters had a gradient, bit i for the i-th, and the positions of those that it has not copied:
other kinds of tensors, other dtypes and strides than the slot's; without the extension all. torch counts none of
the writes.
"""


GiveSlots: TypeAlias = Callable[[list[Parameter], list[Tensor]], None]

give_slots: Final[GiveSlots] = _in_c.give_slots if _in_c else _give_slots
"""Makes each parameter's slot its gradient, one that popdist has made."""

unreduced: Final[Callable[[Iterable[Tensor]], list[Tensor]]] = _in_c.unreduced if _in_c else _unreduced
"""Those of the parameters that have a gradient which popdist has not made."""


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
