"""Steps of a program's optimizers, as torch's hooks see each of them.

A step raises an error while the gradients of all replicas are not there yet; on weights that all instances of a
host share, if the optimizer is another than the sharded one that they belong to; and on gradients that popdist has
not reduced, if they differ between instances. Afterwards its gradients are used: the next loop may drop them.
"""

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from popdist import context
from popdist.errors import BackendError, GradientError, MicroBatchError, OptimizerError
from popdist.gradients.gradient_flags import is_reduced, mark_step, parameters_of
from popdist.training.checks import CheckedSteps, is_checked
from popdist.training_loop import training_loop
from popdist.weights import find_difference, sum_tensors


class StepMark:
    """Stands for the steps of one model, and says how far the last one has come, as long as there is their owner.

    Args:
        owner: What makes the steps.
        module: The model.
    """

    __slots__ = ("_module", "_owner", "reason")

    def __init__(self, owner: object, module: nn.Module) -> None:
        self.reason = ""
        self._owner = weakref.ref(owner)
        self._module = weakref.ref(module)

    def begin(self) -> None:
        """From now on the gradients of the module are incomplete."""
        if _lost:
            _lost.discard(self)
        _in_step.add(self)

    def end(self) -> None:
        """They are complete, or gone."""
        _in_step.discard(self)

    def lose(self, reason: str) -> None:
        """The step has left no gradient on any instance, so until the next one there is nothing to step on."""
        self.end()
        self.reason = reason
        _lost.add(self)

    @property
    def module(self) -> nn.Module | None:
        """The model, if it and the owner are still there."""
        return None if self._owner() is None else self._module()


_in_step: Final[set[StepMark]] = set()
"""Of the modules in the middle of a step: their gradients are incomplete."""


_lost: Final[set[StepMark]] = set()
"""Of the modules whose last step was lost: they have no gradients."""


def is_in_step() -> bool:
    """Whether a model is in the middle of a step."""
    return any(mark.module is not None for mark in tuple(_in_step))


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


def _count_step(optimizer: Optimizer, *_: object) -> None:
    training_loop.num_optimizer_steps += 1
    mark_step(optimizer)


def _check_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check a step that begins; one with a closure, which makes the gradients, whenever that has been called."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if _shared or _in_step or _lost:
        _refuse_step(optimizer, makes_gradients=callable(closure))
    if context.num_replicas() > 1:
        if _wrapped:
            _check_all_are_wrapped(optimizer)
        if not callable(closure):
            _compare_gradients(optimizer)
    if not callable(closure):
        return None

    @wraps(closure)
    def call(*closure_args: Any, **closure_kwargs: Any) -> Any:  # noqa: ANN401 - whatever the closure takes and gives
        loss = closure(*closure_args, **closure_kwargs)
        _compare_gradients(optimizer)
        mark_step(optimizer)
        return loss

    if "closure" in kwargs:
        return args, kwargs | {"closure": call}
    return (args[0], call, *args[2:]), kwargs


def _refuse_step(optimizer: Optimizer, *, makes_gradients: bool) -> None:
    parameters = parameters_of(optimizer)
    for parameter in parameters:
        if _belongs_to_another(parameter, optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() on a parameter of shape {tuple(parameter.shape)} that all "
                "instances of this host share, because a ShardedOptimizer was made for it: step with that one, or "
                "give each instance a copy of its own first (parameter.data = parameter.data.clone())"
            )
    updated = set(map(id, parameters))
    modules = [module for mark in tuple(_in_step) if (module := mark.module) is not None]
    if any(id(parameter) in updated for module in modules for parameter in module.parameters()):
        raise MicroBatchError(
            "optimizer.step() before the gradients of all replicas are there: call it after the "
            "micro_batches loop, or after model.reduce_gradients()"
        )
    for mark in tuple(_lost):
        module = mark.module
        if module is not None and not makes_gradients and _has_nothing_for(updated, module):
            raise MicroBatchError(
                f"optimizer.step() without a gradient: {mark.reason}. Begin the next step, which works on all "
                "instances; where an exception is caught, go on with the next batch in place of this call"
            )


_wrapped: Final[weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""The modules whose gradients popdist reduces, by what does it."""


def wrap(owner: object, module: nn.Module) -> None:
    """From now on the gradients of ``module`` are reduced, as long as there is the ``owner``."""
    _wrapped[owner] = weakref.ref(module)


def wrapped_modules() -> list[nn.Module]:
    """Those whose gradients popdist reduces."""
    return [module for reference in tuple(_wrapped.values()) if (module := reference()) is not None]


@dataclass(slots=True)
class _Look:
    """A look at an optimizer: how many parameters and models there were then, and its steps since."""

    sizes: tuple[int, int] = (0, 0)
    num_steps: int = 0


_looked_at: Final[weakref.WeakKeyDictionary[Optimizer, _Look]] = weakref.WeakKeyDictionary()


def _check_all_are_wrapped(optimizer: Optimizer) -> None:
    """Refuse a step that moves a parameter beside those of wrapped models with one instance's gradient."""
    sizes = sum(len(group["params"]) for group in optimizer.param_groups), len(_wrapped)
    look = _looked_at.get(optimizer)
    if look is None or look.sizes != sizes:
        look = _looked_at[optimizer] = _Look(sizes)
    look.num_steps += 1
    if not is_checked(look.num_steps):
        return
    wrapped = {id(parameter) for module in wrapped_modules() for parameter in module.parameters()}
    parameters = parameters_of(optimizer)
    if not any(id(parameter) in wrapped for parameter in parameters):
        return
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is not None and id(parameter) not in wrapped:
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() would move {_name_of(parameter)} by the gradient of this "
                "instance alone: the optimizer holds it beside the parameters of a ReplicatedModel, and nothing "
                "wraps it. Wrap all that is trained, together (popdist.ReplicatedModel(nn.ModuleDict({...}))) or "
                "each module by itself; give what each instance trains for itself an optimizer of its own"
            )


def _name_of(parameter: Tensor) -> str:
    """The parameter in words, with the module that has it, if there is one."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), nn.Module):
            for name, other in vars(candidate).get("_parameters", {}).items():
                if other is parameter:
                    return f"{type(candidate).__name__}.{name}"
    return f"a parameter of shape {tuple(parameter.shape)} that no module has"


_joint: Final[weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""The modules that are the same on all instances, by what makes their steps."""

_unreduced_steps: Final[weakref.WeakKeyDictionary[Optimizer, CheckedSteps]] = weakref.WeakKeyDictionary()
"""For each optimizer, its steps on gradients that popdist has not reduced."""


def join(owner: object, module: nn.Module) -> None:
    """From now on ``module`` is the same on all instances, as long as there is the ``owner`` of its steps."""
    _joint[owner] = weakref.ref(module)


def _unreduced(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The gradients that popdist has not reduced, of parameters that are the same on all instances; with names."""
    found = [it for it in parameters_of(optimizer) if it.grad is not None and not is_reduced(it.grad)]
    if not found:
        return []
    modules = [module for reference in tuple(_joint.values()) if (module := reference()) is not None]
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
    is_checked = steps.is_next_checked()
    steps.end_step()
    if not is_checked:
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


def _has_nothing_for(updated: set[int], module: nn.Module) -> bool:
    """Whether parameters of ``module`` are to be updated, and none of them has a gradient."""
    trained = [it for it in module.parameters() if it.requires_grad and id(it) in updated]
    return bool(trained) and all(it.grad is None for it in trained)


def _belongs_to_another(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether another optimizer alone may step on ``parameter``: each instance would update the one copy."""
    known = _shared.get(id(parameter))
    return (
        known is not None
        and known.parameter() is parameter
        and known.address == parameter.data_ptr()
        and known.owner() is not optimizer
    )
