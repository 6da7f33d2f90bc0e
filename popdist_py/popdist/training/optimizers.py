"""Optimizers must not step on gradients that are not there: each of torch's asks here first, and is counted."""

import weakref
from functools import cache
from typing import Protocol

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from popdist import context
from popdist.errors import MicroBatchError, OptimizerError
from popdist.training.shared_weights import has_shared, is_shared_with_others
from popdist.training_loop import training_loop


class Stepping(Protocol):
    """A model in the middle of a step."""

    def trains(self, parameters: set[int]) -> bool:
        """Whether a parameter of the model is among ``parameters``, which are identities."""


_stepping: set[weakref.ref[Stepping]] = set()


def begin(model: Stepping) -> None:
    """From now on the gradients of ``model`` are incomplete."""
    _stepping.add(weakref.ref(model))


def end(model: Stepping) -> None:
    """The gradients of ``model`` are complete, or gone."""
    _stepping.discard(weakref.ref(model))


def is_stepping() -> bool:
    """Whether a model is in the middle of a step."""
    return any(reference() is not None for reference in _stepping)


@cache
def watch() -> None:
    """Make the optimizer of a step that has no gradient, or not yet, raise, and count the others; once."""
    register_optimizer_step_pre_hook(_refuse_step_without_gradient)
    register_optimizer_step_post_hook(_count_step)


def _count_step(*_: object) -> None:
    training_loop.num_optimizer_steps += 1


def _refuse_step_without_gradient(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if context.is_initialized():
        context.current_group().raise_failure()
    _refuse_shared_weights(optimizer)
    if not _stepping:
        return
    parameters: set[int] = {id(it) for group in optimizer.param_groups for it in _parameters(group)}
    models = [model for reference in _stepping if (model := reference()) is not None]
    if any(model.trains(parameters) for model in models):
        raise MicroBatchError(
            "optimizer.step() before the gradients of all replicas are there: call it after the "
            "micro_batches loop, or after model.reduce_gradients()"
        )


def _refuse_shared_weights(optimizer: Optimizer) -> None:
    """Each instance would do the same update to the one copy."""
    if not has_shared():
        return
    for it in [it for group in optimizer.param_groups for it in _parameters(group)]:
        if is_shared_with_others(it, optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() on a parameter of shape {tuple(it.shape)} that all instances "
                "of this host share, because a ShardedOptimizer was made for it: step with that one, or give each "
                "instance a copy of its own first (parameter.data = parameter.data.clone())"
            )


def _parameters(group: dict[str, list[Parameter]]) -> list[Parameter]:
    return group["params"]
