"""Checks of each step of a program's optimizers, which torch's hooks show.

A step raises an error while the gradients of all replicas are not there yet; on weights that all instances of a
host share, if the optimizer is another than the sharded one that they belong to; and on gradients that popdist has
not reduced, if they differ between instances.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popdist import context
from popdist.checks.checked_steps import CheckedSteps, is_checked
from popdist.checks.parameter_sums import find_difference, sum_tensors
from popdist.errors import BackendError, GradientError, MicroBatchError, OptimizerError
from popdist.gradients.gradient_flags import is_reduced, parameters_of
from popdist.training.step import (
    closure_of,
    joint_modules,
    lost_steps,
    modules_in,
    reduced_modules,
    running_steps,
    with_closure,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedParameter:
    """A parameter in memory that the instances of a host share, and the optimizer that may step on it.

    Where it lies at another ``address`` it is no longer shared. When the owner has gone, no optimizer may step.
    """

    parameter: weakref.ref[Parameter]
    address: int
    owner: weakref.ref[object]


_shared: Final[dict[int, _SharedParameter]] = {}
"""The shared parameters, by identity."""


def reserve(parameters: Iterable[Parameter], owner: object) -> None:
    """From now on let ``owner`` alone step on ``parameters``, as long as they stay where they are now."""
    for parameter in parameters:
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _, key=key: _shared.pop(key, None))  # type: ignore[misc] # mypy takes no defaults here
        _shared[key] = _SharedParameter(
            parameter=reference, address=parameter.data_ptr(), owner=weakref.ref(owner)
        )


@cache
def install() -> None:
    """Have wrong steps of torch's optimizers raise an error from now on."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check a step that begins; one with a closure, which makes the gradients, whenever that has been called."""
    makes_gradients = closure_of(args, kwargs) is not None
    if _shared:
        _refuse_shared(optimizer)
    if running_steps or lost_steps:
        _refuse_incomplete(optimizer, makes_gradients=makes_gradients)
    if context.num_replicas() > 1:
        if reduced_modules:
            _check_all_are_wrapped(optimizer)
        if not makes_gradients:
            _compare_gradients(optimizer)
    return with_closure(args, kwargs, lambda: _compare_gradients(optimizer))


def _refuse_shared(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        if _belongs_to_another(parameter, optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() on a parameter of shape {tuple(parameter.shape)} that all "
                "instances of this host share, because a ShardedOptimizer was made for it: step with that one, or "
                "give each instance a copy of its own first (parameter.data = parameter.data.clone())"
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


def _refuse_incomplete(optimizer: Optimizer, *, makes_gradients: bool) -> None:
    """Refuse a step on a model that is in the middle of its step, or whose last step was lost."""
    updated = set(map(id, parameters_of(optimizer)))
    modules = [module for state in tuple(running_steps) if (module := state.module) is not None]
    if any(id(parameter) in updated for module in modules for parameter in module.parameters()):
        raise MicroBatchError(
            "optimizer.step() before the gradients of all replicas are there: call it after the "
            "micro_batches loop, or after model.reduce_gradients()"
        )
    for state in tuple(lost_steps):
        module = state.module
        if module is not None and not makes_gradients and _has_nothing_for(updated, module):
            raise MicroBatchError(
                f"optimizer.step() without a gradient: {state.reason}. Begin the next step, which works on all "
                "instances; where an exception is caught, go on with the next batch in place of this call"
            )


def _has_nothing_for(updated: set[int], module: nn.Module) -> bool:
    """Whether parameters of ``module`` are to be updated, and none of them has a gradient."""
    trained = [it for it in module.parameters() if it.requires_grad and id(it) in updated]
    return bool(trained) and all(it.grad is None for it in trained)


@dataclass(slots=True)
class _Comparison:
    """The number of parameters and models when an optimizer was compared with these, and its steps since."""

    sizes: tuple[int, int] = (0, 0)
    num_steps: int = 0


_compared: Final[weakref.WeakKeyDictionary[Optimizer, _Comparison]] = weakref.WeakKeyDictionary()


def _check_all_are_wrapped(optimizer: Optimizer) -> None:
    """Refuse a step that moves a parameter beside those of wrapped models with one instance's gradient."""
    sizes = sum(len(group["params"]) for group in optimizer.param_groups), len(reduced_modules)
    known = _compared.get(optimizer)
    if known is None or known.sizes != sizes:
        known = _compared[optimizer] = _Comparison(sizes)
    known.num_steps += 1
    if not is_checked(known.num_steps):
        return
    wrapped = {id(it) for module in modules_in(reduced_modules) for it in module.parameters()}
    if not any(id(parameter) in wrapped for parameter in parameters_of(optimizer)):
        return
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in wrapped:
                name = (group.get("param_names") or {place: f"parameter {place} of group {number}"})[place]
                raise OptimizerError(
                    f"{type(optimizer).__name__}.step() would move {name}, of shape {tuple(parameter.shape)}, by "
                    "the gradient of this instance alone: the optimizer holds it beside the parameters of a "
                    "ReplicatedModel, and nothing wraps it. Wrap all that is trained, together "
                    "(popdist.ReplicatedModel(nn.ModuleDict({...}))) or each module by itself; give what each "
                    "instance trains for itself an optimizer of its own"
                )


_unreduced_steps: Final[weakref.WeakKeyDictionary[Optimizer, CheckedSteps]] = weakref.WeakKeyDictionary()
"""For each optimizer, its steps on gradients that popdist has not reduced."""


def _unreduced(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The gradients that popdist has not reduced, of parameters that are the same on all instances; with names."""
    found = [it for it in parameters_of(optimizer) if it.grad is not None and not is_reduced(it.grad)]
    if not found:
        return []
    modules = modules_in(joint_modules)
    names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
    return [(names[id(it)], it.grad) for it in found if id(it) in names and it.grad is not None]


def _compare_gradients(optimizer: Optimizer) -> None:
    """Check that gradients which popdist has not reduced are equal on all instances, if the step is checked."""
    if not context.is_initialized() or context.num_instances() == 1:
        return
    group = context.current_group()
    if len(group.instances) < context.num_instances() or not (gradients := _unreduced(optimizer)):
        return
    steps = _unreduced_steps.setdefault(optimizer, CheckedSteps())
    is_next_checked = steps.is_next_checked()
    steps.end_step()
    if not is_next_checked:
        return
    text = f"{type(optimizer).__name__}.step() on gradients that popdist has not reduced"
    sums = sum_tensors(gradients)
    try:
        words = [word for (word,) in group.start(text, [sums.word]).wait()]
        difference = find_difference(group, "gradients", words, sums)
    except BackendError:
        return  # an instance has left, or was lost: the next call that needs it will say so
    if difference is not None:
        raise GradientError(
            f"{text}, and they are not equal on all instances: {difference}. They were set by hand, or come from "
            "backward() under no_sync(). Compute them in a loop over model.micro_batches(batch), or add them over "
            "the instances first, as popdist.all_reduce_gradients(model) does"
        )
