"""Check which optimizers may be sharded: optimizers that update each element independently.

The check steps on tensors of several shapes: on a whole tensor, and on two parts of a copy, with common, huge,
tiny and zero gradients. The results must be bitwise equal. Some optimizers behave differently only later, so the
check is repeated in training now and then, except for torch's own optimizers.
"""

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist.errors import OptimizerError
from popdist.ground.torch_private import step_without_hooks
from popdist.optim.pieces import PieceOptimizer, is_piece_optimizer

REASONS: Final = {
    "LBFGS": "takes inner products over all parameters",
    "SparseAdam": "updates the rows of sparse gradients, and replicas add dense ones",
    "Adafactor": "keeps means over the rows and columns of each matrix",
    "Muon": "makes each whole matrix orthogonal",
    "Shampoo": "multiplies each matrix by matrices made of the whole of it",
    "SOAP": "multiplies each matrix by matrices made of the whole of it",
    "LAMB": "scales each update by the norms of the whole parameter and of the whole update",
    "LARS": "scales each gradient by the norms of the whole parameter and of the whole gradient",
    "StableAdamW": "clips each update by its mean square over the whole parameter",
    "Prodigy": "estimates one step size from inner products over all parameters",
    "DAdaptAdam": "estimates one step size from inner products over all parameters",
    "DAdaptSGD": "estimates one step size from inner products over all parameters",
    "DAdaptAdaGrad": "estimates one step size from inner products over all parameters",
    "DAdaptLion": "estimates one step size from inner products over all parameters",
    "NovoGrad": "divides each gradient by the norm of the whole of it",
    "Adalomo": "scales each update by the norms of the whole parameter and of the whole update",
}
"""Why an optimizer cannot be sharded; the key is the name of the optimizer's class."""

_KNOWN: Final = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
"""Optimizers of torch that update each element independently, with any settings and any state."""

_SHAPES: Final = {(16, 16): 18, (256,): 6, (8, 4, 4, 4): 6, (128, 128): 3}
"""Shapes of the tensors in the check; the value is the number of steps."""

_SIZES: Final = (1.0, 1.0, 1e4, 1.0, 1e-6, 0.0)
"""Factors by which the gradients of successive steps are multiplied."""

_ADVICE: Final = {
    "ShardedOptimizer": (
        "ShardedOptimizer cannot shard {name}: it {reason}, and each instance has only a part of the elements. "
        "Use it without ShardedOptimizer, or take one that treats each element by itself, such as AdamW"
    ),
    "PhasedOptimizer": (
        "PhasedOptimizer cannot step with {name} on DTensors: it {reason}, and each instance has only a part of "
        "the elements. Take an optimizer that treats each element by itself, such as AdamW"
    ),
    "LowPrecision": (
        "LowPrecision cannot hold {name}: it {reason}, and LowPrecision hands it some elements at a time. Use it "
        "without LowPrecision, or take one that treats each element by itself, such as AdamW"
    ),
}
"""The error message for each class that needs an elementwise optimizer."""

_RATE: Final = 0.01
_MOST_ELEMENTS: Final = 512
_EVEN: Final = 128
"""Numbers of elements are multiples of this number, so that vector instructions treat both parts equally."""


class _NotElementwiseError(Exception):
    """The error that an optimizer does not update each element independently; the message is the reason."""


def check_elementwise(
    optimizer_class: type[Optimizer],
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
    device: torch.device,
    *,
    asked_by: str = "ShardedOptimizer",
) -> frozenset[str]:
    """Raise OptimizerError if the optimizer does not update each element independently. Return the names of its
    state tensors that have one number for each element of a parameter.
    """
    # popdist's own optimizers that may be given pieces need no check
    may_be_given_pieces = asked_by == "ShardedOptimizer" and is_piece_optimizer(optimizer_class)
    if issubclass(optimizer_class, PieceOptimizer) and may_be_given_pieces:
        return optimizer_class.names_of_elements(defaults, settings, device)
    try:
        return _prove(optimizer_class, defaults, settings, device)
    except _NotElementwiseError as error:
        message = _ADVICE[asked_by].format(name=optimizer_class.__name__, reason=error)
        raise OptimizerError(message) from error.__cause__


def _prove(
    optimizer_class: type[Optimizer],
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
    device: torch.device,
) -> frozenset[str]:
    names = [kind.__name__ for kind in optimizer_class.__mro__]
    if reason := next((REASONS[name] for name in REASONS if name.lower() in map(str.lower, names)), None):
        raise _NotElementwiseError(reason)
    make = functools.partial(_make, optimizer_class, defaults, settings)
    values, names_of_elements = torch.Generator().manual_seed(0), frozenset[str]()
    for shape, num_steps in _SHAPES.items():
        start, *gradients = torch.randn(
            1 + num_steps, *shape, dtype=torch.float32, generator=values, device="cpu"
        ).to(device)
        gradients = [gradient * _SIZES[step % len(_SIZES)] for step, gradient in enumerate(gradients)]
        whole = start.clone()
        state = _train(make, whole, gradients)
        parts = start.clone().view(-1)
        for part in _parts_of(parts):
            try:
                _train(make, parts[part], [gradient.view(-1)[part] for gradient in gradients])
            except Exception as error:
                raise _NotElementwiseError(f"does not take a row of numbers: {error}") from error
        _check_equal(whole.view(-1), parts)
        names_of_elements |= {
            name for name, value in state.items() if isinstance(value, Tensor) and value.shape == whole.shape
        }
    return names_of_elements


def check_in_training(optimizer: Optimizer, *, asked_by: str = "ShardedOptimizer") -> None:
    """Raise OptimizerError if a step on copies shows that an element's update depends on other elements."""
    if is_known(type(optimizer)) or is_piece_optimizer(type(optimizer)):
        return
    for group in optimizer.param_groups:
        parameter = max(group["params"], key=Tensor.numel, default=None)
        if parameter is None or parameter.grad is None or parameter.numel() < _EVEN:
            continue
        size = min(parameter.numel(), _MOST_ELEMENTS) // _EVEN * _EVEN
        for factor in _SIZES[1:]:
            whole = _step_on_copy(optimizer, group, parameter, slice(size), factor)
            parts = [_step_on_copy(optimizer, group, parameter, part, factor) for part in _parts_of(whole)]
            try:
                _check_equal(whole, torch.cat(parts))
            except _NotElementwiseError as error:
                message = _ADVICE[asked_by].format(name=type(optimizer).__name__, reason=error)
                raise OptimizerError(message) from None


def _step_on_copy(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, part: slice, factor: float
) -> Tensor:
    """Make a step on a copy of the elements ``part``, with the gradient times ``factor``; return the copy."""
    aside = Parameter(parameter.detach().view(-1)[part].clone())
    aside.grad = cast("Tensor", parameter.grad).view(-1)[part] * factor
    state = {name: _own_part(value, parameter, part) for name, value in optimizer.state.get(parameter, {}).items()}
    twin = object.__new__(type(optimizer))  # because torch's own copies omit attributes that a class adds
    twin.__dict__.update({name: _copy_of(value) for name, value in vars(optimizer).items()})
    twin.param_groups = [{**{name: copy.deepcopy(value) for name, value in group.items() if name != "params"}}]
    twin.param_groups[0]["params"] = [aside]
    twin.state = defaultdict(dict, {aside: state})
    quiet_step(twin)
    return aside.detach()


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _own_part(value: Any, parameter: Tensor, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value.view(-1)[part].clone() if value.shape == parameter.shape else value.clone()
    return copy.deepcopy(value)


def _parts_of(whole: Tensor) -> tuple[slice, slice]:
    """Return two slices that cut a tensor into a smaller and a larger part; a short tensor into halves."""
    cut = max(whole.numel() // 4, min(64, whole.numel() // 2))
    return slice(0, cut), slice(cut, whole.numel())


def _check_equal(whole: Tensor, parts: Tensor) -> None:
    same = (whole == parts) | (whole.isnan() & parts.isnan())
    if not bool(same.all()):
        raise _NotElementwiseError("updates a part of a parameter to other bits than the whole")


def _make(
    optimizer_class: type[Optimizer],
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
    parameter: Parameter,
) -> Optimizer:
    """Make an optimizer that updates only ``parameter``, with learning rate 0.01 instead of the program's."""
    optimizer = optimizer_class([{**settings, "params": [parameter]}], **defaults)
    if "lr" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["lr"] = _RATE
    return optimizer


def _train(make: Callable[[Parameter], Optimizer], values: Tensor, gradients: list[Tensor]) -> dict[str, Any]:
    """Update ``values`` in place by one optimizer step for each of ``gradients``; return the optimizer's state."""
    parameter = Parameter(values)
    optimizer = make(parameter)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        quiet_step(optimizer)
    return dict(optimizer.state[parameter])


def is_known(optimizer_class: type[Optimizer]) -> bool:
    """Whether ``optimizer_class`` is a class of torch that always updates each element independently."""
    return optimizer_class in _KNOWN


def signless_names(
    optimizer_class: type[Optimizer], defaults: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[str]:
    """Return the names of the optimizer's state tensors that have no negative element, such as second moments."""
    values = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(
        1 + len(_SIZES), 2 * _EVEN, dtype=torch.float32, generator=values, device="cpu"
    )
    state = _train(functools.partial(_make, optimizer_class, defaults, settings), start, gradients)
    rows = {name: it for name, it in state.items() if isinstance(it, Tensor) and it.shape == start.shape}
    return [name for name, it in rows.items() if bool((it >= 0).all()) and bool(it.any())]


@functools.cache
def has_exact_fused_kernel(optimizer_class: type[Optimizer]) -> bool:
    """Whether torch's fused CPU kernel gives equal bits for a whole tensor and for a tensor cut into parts."""
    if optimizer_class not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    values = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + len(_SIZES), 3001, dtype=torch.float32, generator=values, device="cpu")
    make = functools.partial(_make, optimizer_class, {"fused": True, "weight_decay": 0.1}, {})
    whole, parts = start.clone(), start.clone()
    _train(make, whole, gradients)
    # a kernel may compute the last elements of a thread's part with other instructions than the first elements
    for first, last in itertools.pairwise((0, 1, 6, 19, 100, 1001, 1003, 3001)):
        _train(make, parts[first:last], [gradient[first:last] for gradient in gradients])
    return torch.equal(whole, parts)


def quiet_step(optimizer: Optimizer) -> None:
    """Make a step of ``optimizer`` without torch's step hooks, which must not count checks or parts of steps."""
    functools.partial(step_without_hooks(type(optimizer)), optimizer)()
