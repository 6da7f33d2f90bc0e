"""Optimizers of the program, seen through torch's hooks: each step is counted, and one that would be wrong raises.

Wrong is a step before the gradients of all replicas are there, and a step on weights that all instances of a host
share, by another optimizer than the sharded one that they belong to.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from popdist import context
from popdist.errors import MicroBatchError, OptimizerError
from popdist.training_loop import training_loop

_in_step: Final[weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""The modules in the middle of a step, by what makes the step: their gradients are incomplete."""


def begin_step(owner: object, module: nn.Module) -> None:
    """From now on the gradients of ``module`` are incomplete, as long as there is the ``owner`` of the step."""
    _in_step[owner] = weakref.ref(module)


def end_step(owner: object) -> None:
    """The gradients of the owner's module are complete, or gone."""
    _in_step.pop(owner, None)


def is_in_step() -> bool:
    """Whether a model is in the middle of a step."""
    return bool(_in_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedParameter:
    """A parameter in memory that the instances of a host share.

    Attributes:
        parameter: A weak reference to it.
        address: Where it was put; elsewhere it is no longer shared.
        owner: A weak reference to the optimizer that may step on it: when it has gone, none may.
    """

    parameter: weakref.ref[Parameter]
    address: int
    owner: weakref.ref[object]


_shared: Final[dict[int, _SharedParameter]] = {}
"""By identity of the parameter."""


def reserve(parameters: Iterable[Parameter], owner: object) -> None:
    """From now on ``owner`` alone may step on ``parameters``, as long as they stay where they are now."""
    for parameter in parameters:
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _, key=key: _shared.pop(key, None))  # type: ignore[misc] # mypy takes no defaults here
        _shared[key] = _SharedParameter(
            parameter=reference, address=parameter.data_ptr(), owner=weakref.ref(owner)
        )


@cache
def watch() -> None:
    """Count the steps of torch's optimizers from now on, and have wrong ones raise."""
    register_optimizer_step_pre_hook(_check_step)
    register_optimizer_step_post_hook(_count_step)


def _count_step(*_: object) -> None:
    training_loop.num_optimizer_steps += 1


def _check_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if context.is_initialized():
        context.current_group().raise_failure()
    if not _shared and not _in_step:
        return
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if _belongs_to_another(parameter, optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() on a parameter of shape {tuple(parameter.shape)} that all "
                "instances of this host share, because a ShardedOptimizer was made for it: step with that one, or "
                "give each instance a copy of its own first (parameter.data = parameter.data.clone())"
            )
    updated = set(map(id, parameters))
    modules = [module for reference in _in_step.values() if (module := reference()) is not None]
    if any(id(parameter) in updated for module in modules for parameter in module.parameters()):
        raise MicroBatchError(
            "optimizer.step() before the gradients of all replicas are there: call it after the "
            "micro_batches loop, or after model.reduce_gradients()"
        )


def _belongs_to_another(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether another optimizer alone may step on ``parameter``: each instance would update the one copy."""
    known = _shared.get(id(parameter))
    return (
        known is not None
        and known.parameter() is parameter
        and known.address == parameter.data_ptr()
        and known.owner() is not optimizer
    )
