"""Stand-ins for ``.grad`` where gradients do not stay in memory, as in a model that runs phase by phase.

A stand-in for a used gradient raises an error when it is read. A gradient in a store is read when it is needed;
an operator that scales or clips it is recorded and run later, because several instances may share the store.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.errors import OptimizerError
from popdist.gradients.partial_gradients import GradientElsewhere, is_number, with_wholes
from popdist.ground import torch_private
from popdist.ground.local_tensors import local_part

_CHANGES: Final = (
    *("add_", "sub_", "mul_", "div_", "neg_", "zero_"),
    *("clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"),
)
"""Operators that change a tensor in place by numbers, and give each element the same bits now and later."""

_ON_LISTS: Final = "_foreach_"
"""The prefix of the names of torch's operators on lists of tensors."""


class _Source:
    """The source of a stored gradient: a function that reads the gradient, and changes to apply after a read."""

    def __init__(self, title: str, read: Callable[[], Tensor] | None, *, may_change: bool = True) -> None:
        self.title = title
        self.read = read
        self.may_change = may_change
        self.changes: list[Callable[[Tensor], object]] = []

    def apply_changes(self, elements: Tensor) -> Tensor:
        """Apply the recorded changes to ``elements`` in place, and return ``elements``."""
        for change in self.changes:
            change(elements)
        return elements


class StoredGradient(GradientElsewhere):
    """A gradient without memory of its own, whose elements are read from a file or from other memory."""

    source: _Source

    def __new__(cls, like: Tensor, *_: object) -> Self:
        """Make a tensor with the shape, dtype and device of ``like`` that has no memory of its own."""
        return torch_private.wrapper_tensor(cls, like)

    def __init__(self, like: Tensor, source: _Source) -> None:
        del like
        self.source = source

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes more
        """Return the name, shape and dtype; the elements are not in memory."""
        return f"StoredGradient({self.source.title}, {tuple(self.shape)}, {self.dtype})"

    @property
    def whole(self) -> Tensor:
        """The gradient as an ordinary tensor; a change to this tensor is not stored."""
        source = self.source
        if source.read is None:
            raise OptimizerError(
                f"the gradient of {source.title} was read, and PhasedOptimizer has used it in the backward pass "
                "already, so that it needs no memory: give PhasedOptimizer step_in_backward=False for what needs "
                "gradients before the step, such as clipping or a GradScaler"
            )
        elements = source.read()
        return source.apply_changes(elements.clone()) if source.changes else elements

    def apply_changes(self, elements: Tensor) -> Tensor:
        """Apply the recorded changes of this gradient to its ``elements``, and return ``elements``."""
        return self.source.apply_changes(elements)

    @property
    def data(self) -> Self:  # type: ignore[override] # nothing else can take its place
        """The gradient itself, because a stored gradient has no autograd graph."""
        return self

    @classmethod
    def unscale(
        cls, unscaler: Callable[..., None], gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
    ) -> None:
        """Set ``found_inf`` if one of ``gradients`` has NaN or infinity; divide by the scale at each reading."""
        factor = inv_scale.clone()
        for gradient in gradients:
            if not isinstance(gradient, StoredGradient):
                unscaler([gradient], found_inf, inv_scale)
                continue
            unscaler([gradient.whole.clone()], found_inf, inv_scale)
            gradient.source.changes.append(lambda elements: unscaler([elements], torch.zeros_like(factor), factor))

    @classmethod
    def compute(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record the operator ``func`` if it only changes a gradient by numbers; else run it on loaded data."""
        name = func.overloadpacket.__name__
        if isinstance(args[0], StoredGradient):
            gradient = args[0]
            if name in ("detach", "detach_") or (name == "view" and tuple(args[1]) == gradient.shape):
                return cls(gradient, gradient.source)
            if name in _CHANGES and all(map(is_number, (*args[1:], *kwargs.values()))):
                return _record(gradient, func, args[1:], kwargs)
        if name.startswith(_ON_LISTS) and not kwargs and all(map(is_number, args[1:])):
            return _do_one_by_one(func, args[0], args[1:])
        if written := _gradients_in((*(args[:1] if name.endswith("_") else ()), kwargs.get("out"))):
            _refuse(name, written[0])
        wholes = list[Tensor]()
        result = func(*with_wholes(args, wholes), **with_wholes(kwargs, wholes))
        return _without_changes(result, wholes, name)


def _gradients_in(values: Iterable[Any]) -> list[StoredGradient]:
    """Return the stored gradients among an operator's arguments, in order."""
    found = list[StoredGradient]()
    for value in values:
        if isinstance(value, list | tuple):
            found += _gradients_in(value)
        elif isinstance(value, StoredGradient):
            found.append(value)
    return found


def _record(gradient: StoredGradient, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StoredGradient:
    """Record an operator such as ``mul_(2)`` that changes ``gradient``, to be run when the gradient is read."""
    source, name = gradient.source, func.overloadpacket.__name__
    if source.read is None and name != "zero_":
        return gradient.whole  # type: ignore[return-value] # it raises
    if not source.may_change:
        _refuse(name, gradient)
    numbers = [local_part(value).clone() if isinstance(value, Tensor) else value for value in args]
    source.changes.append(lambda elements: func(elements, *numbers, **kwargs))
    return gradient


def _do_one_by_one(func: Any, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Any] | None:
    """Run an operator on lists for each tensor alone, so that only one gradient at a time is in memory."""
    name = func.overloadpacket.__name__
    if not name.endswith("_"):
        return [func([it.whole if isinstance(it, StoredGradient) else it], *numbers)[0] for it in tensors]
    for tensor in tensors:
        getattr(tensor, name.removeprefix(_ON_LISTS))(*numbers)
    return None


def _refuse(name: str, gradient: StoredGradient) -> None:
    source = gradient.source
    if source.read is None:
        _ = gradient.whole  # it raises
    raise OptimizerError(
        f"{name} would change {'' if source.may_change else 'a view of '}the gradient of {source.title} in place, "
        "and it lies in a store that is not written here: the gradient as a whole can be changed by numbers "
        f"({', '.join(_CHANGES)}), or replaced, parameter.grad = tensor"
    )


def _without_changes(result: Any, wholes: Sequence[Tensor], name: str) -> Any:
    """Return ``result`` with read-only views in place of views of gradients, because a change of such a view would
    not reach the stored gradient.
    """
    if isinstance(result, list | tuple):
        return type(result)(_without_changes(it, wholes, name) for it in result)
    places = {local_part(whole).untyped_storage().data_ptr() for whole in wholes if whole.numel()}
    if not isinstance(result, Tensor) or local_part(result).untyped_storage().data_ptr() not in places:
        return result
    return StoredGradient(result, _Source(f"a parameter ({name})", lambda: result, may_change=False))


def updated_gradient(title: str, parameter: Parameter) -> Tensor | None:
    """Return a stand-in for a gradient with which ``parameter`` was updated in the backward pass; reading the
    stand-in raises an error. Return None if this torch lacks wrapper tensors.
    """
    return StoredGradient(parameter, _Source(title, None)) if torch_private.has_wrapper_tensors else None


def stored_gradient(title: str, like: Tensor, read: Callable[[], Tensor]) -> StoredGradient:
    """Return a gradient with the shape and device of ``like``, whose elements ``read`` reads at each use."""
    return StoredGradient(like, _Source(title, read))
