"""Checks of optimizer steps: which optimizer may update a parameter, and whether gradients are reduced.

If popdist has not reduced the gradients of a step, the instances compare these gradients. They do so in the first
three such steps of an optimizer, and in every 100th such step.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popdist.errors import BackendError, GradientError, MicroBatchError, OptimizerError
from popdist.exchange.process_group.registration import remember_wrappers
from popdist.gradients.optimizer_steps import closure_of, is_reduced, parameters_of, training_loop, with_closure
from popdist.ground import torch_private_groups
from popdist.ground.local_tensors import is_distributed
from popdist.job import context
from popdist.step.checks.step_checks import CheckedSteps, is_checked
from popdist.step.checks.tensor_changes import find_difference, sum_tensors
from popdist.step.training.outside_step import LOOP
from popdist.step.training.step import joint_modules, lost_steps, modules_in, reduced_modules, running_steps


@cache
def install() -> None:
    """Make every optimizer of torch check its parameters and gradients before each step, from now on."""
    register_optimizer_step_pre_hook(_check_optimizer_step)
    remember_wrappers()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedParameter:
    """A parameter in memory that a host's instances share; only its owner, an optimizer, may update it."""

    parameter: weakref.ref[Parameter]
    address: int  # at another address the parameter is no longer shared
    owner: weakref.ref[object]  # when the owner is deleted, no optimizer may update the parameter


_shared: Final[dict[int, _SharedParameter]] = {}
"""The shared parameters; the key is the ``id()`` of the parameter."""


def reserve(parameters: Iterable[Parameter], owner: object) -> None:
    """Let only the optimizer ``owner`` update ``parameters`` from now on, until their memory address changes."""
    for parameter in parameters:
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _, key=key: _shared.pop(key, None))  # type: ignore[misc] # mypy takes no defaults here
        _shared[key] = _SharedParameter(
            parameter=reference, address=parameter.data_ptr(), owner=weakref.ref(owner)
        )


def _check_optimizer_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Raise an error if an optimizer may not step now; check a closure's gradients after each of its calls."""
    makes_gradients = closure_of(args, kwargs) is not None
    if _shared:
        _refuse_shared(optimizer)
    if running_steps or lost_steps:
        _refuse_incomplete(optimizer, makes_gradients=makes_gradients)
    if context.num_replicas() > 1:
        if reduced_modules:
            _check_all_are_wrapped(optimizer)
        if not makes_gradients:
            _check_gradients(optimizer)

    def check_after_closure() -> None:
        if running_steps:
            _refuse_running(optimizer)
        _check_gradients(optimizer)

    return with_closure(optimizer, args, kwargs, check_after_closure)


def _check_gradients(optimizer: Optimizer) -> None:
    """Raise an error if the optimizer's gradients differ between instances, or come from this instance alone."""
    _compare_gradients(optimizer)
    _refuse_lone_gradients(optimizer)


@dataclass(slots=True)
class LoneSteps:
    """The number of optimizer steps with gradients of this instance alone, which a program may do on purpose."""

    number: int = 0


lone_steps: Final = LoneSteps()
"""The count of steps on this instance's gradients alone; poprun reports it: `popdist.startup.lone_training`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The amount of data that this process had sent to other replicas when an optimizer began a step."""

    num_bytes: int  # bytes that popdist has sent
    num_calls: int  # calls of torch's collectives, because torch has no public name for their bytes
    num_steps: int

    @classmethod
    def until_now(cls, num_steps: int) -> Self:
        """Return the amount of data that this process has sent to other replicas until now."""
        num_bytes = context.current_job().group.num_bytes if context.is_initialized() else 0
        num_calls = torch_private_groups.num_collectives(apart_from=context.instances_of_replica())
        return cls(num_bytes=num_bytes, num_calls=num_calls, num_steps=num_steps)


_sent: Final[weakref.WeakKeyDictionary[Optimizer, _Sent]] = weakref.WeakKeyDictionary()


def _refuse_lone_gradients(optimizer: Optimizer) -> None:
    """Raise OptimizerError if a step uses only this instance's gradients although instances train together."""
    if context.num_replicas() == 1:
        return
    before = _sent.get(optimizer, _Sent(num_bytes=0, num_calls=0, num_steps=0))
    now = _sent[optimizer] = _Sent.until_now(before.num_steps + 1)
    alone = [it.grad for it in parameters_of(optimizer) if it.grad is not None and not is_reduced(it.grad)]
    is_limited = context.is_initialized() and context.current_job().group.is_limited
    if reduced_modules or is_limited or not alone:
        return
    if now.num_bytes - before.num_bytes >= sum(it.nbytes for it in alone):
        return  # the program itself adds the gradients over the instances
    is_torch_called, found = now.num_calls > before.num_calls, "nothing has added up their gradients"
    if is_torch_called and context.num_local_replicas() > 1 and _are_reduced_by_torch(optimizer, alone):
        raise OptimizerError(
            f"DistributedDataParallel or FSDP takes the mean over {context.num_instances()} instances, and the "
            f"job has {context.num_replicas()} replicas. Use popdist.ReplicatedModel in its place, and write\n"
            f"{LOOP}\n\n"
            "or start one instance for each replica"
        )
    if not training_loop.num_loader_passes and not any(map(is_distributed, alone)):
        # perhaps all instances train the same model, or each instance trains its own model
        lone_steps.number += not is_torch_called
        return
    if is_torch_called:
        if (
            _are_reduced_by_torch(optimizer, alone)
            or not is_checked(now.num_steps)
            or _are_equal(optimizer, alone)
        ):
            return
        found = "after the collectives that this step has called, the gradients of the instances still differ"
    raise OptimizerError(
        f"{type(optimizer).__name__}.step() would move the weights by the gradients of this instance alone: the "
        f"job has {context.num_replicas()} replicas, and {found}. Wrap the model, "
        f"and write\n{LOOP}\n\nor call popdist.all_reduce_gradients(model) before the step. Where an instance "
        "trains a model for itself, or adds up gradients in a way that popdist does not see, say so: "
        "popdist.execute_on_instances({popdist.instance_index()}, optimizer.step)"
    )


def _are_reduced_by_torch(optimizer: Optimizer, gradients: Sequence[Any]) -> bool:
    """Whether DistributedDataParallel or FSDP reduces gradients of parameters that ``optimizer`` updates."""
    own = context.instances_of_replica()
    for gradient in filter(is_distributed, gradients):
        if any(rank not in own for rank in gradient.device_mesh.mesh.flatten().tolist()):
            return True
    wrapped = {id(parameter) for wrapper in tuple(remember_wrappers()) for parameter in wrapper.parameters()}
    return any(id(parameter) in wrapped for parameter in parameters_of(optimizer))


def _are_equal(optimizer: Optimizer, gradients: Sequence[Tensor]) -> bool:
    """Whether ``gradients`` are equal on all instances. Every instance must call the function."""
    word = sum_tensors(("", it) for it in gradients).word
    if context.is_initialized():
        if not context.current_job().is_checked:
            return True
        text = f"{type(optimizer).__name__}.step() on gradients that popdist has not reduced"
        return len({it for (it,) in context.data_parallel_group().start(text, [word]).wait()}) == 1
    if not dist.is_initialized():
        return False
    own = torch.tensor([word], dtype=torch.int64, device=gradients[0].device)
    words = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(words, own)
    return all(bool(it == own) for it in words)


def _refuse_shared(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        if _belongs_to_another(parameter, optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() on a parameter of shape {tuple(parameter.shape)} that all "
                "instances of this host share, because a ShardedOptimizer was made for it: step with that one, or "
                "give each instance a copy of its own first (parameter.data = parameter.data.clone())"
            )


def _belongs_to_another(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether only another optimizer may update ``parameter``, because the host's instances share its memory."""
    known = _shared.get(id(parameter))
    return (
        known is not None
        and known.parameter() is parameter
        and known.address == parameter.data_ptr()
        and known.owner() is not optimizer
    )


def _refuse_incomplete(optimizer: Optimizer, *, makes_gradients: bool) -> None:
    """Raise MicroBatchError if a model that the optimizer updates is in the middle of a step, which a closure may
    end, or has no gradient because its last step failed.
    """
    if not makes_gradients:
        _refuse_running(optimizer)
    updated = set(map(id, parameters_of(optimizer)))
    for state in tuple(lost_steps):
        module = state.module
        if module is not None and not makes_gradients and _has_nothing_for(updated, module):
            raise MicroBatchError(
                "optimizer.step() without a gradient: the last step of this model was lost on all instances, "
                "because a loop over its micro batches was left before its end (by break, return or an exception, "
                "or beside another one in zip() without strict=True), or raised an error, here or on another "
                "instance. Begin the next step, which works on all instances; where an exception is caught, go on "
                "with the next batch in place of this call"
            )


def _refuse_running(optimizer: Optimizer) -> None:
    updated = set(map(id, parameters_of(optimizer)))
    modules = [module for state in tuple(running_steps) if (module := state.module) is not None]
    if any(id(parameter) in updated for module in modules for parameter in module.parameters()):
        raise MicroBatchError(
            "optimizer.step() before the gradients of all replicas are there: call it after the "
            "micro_batches loop, or after model.reduce_gradients()"
        )


def _has_nothing_for(updated: set[int], module: nn.Module) -> bool:
    """Whether an optimizer updates parameters of ``module``, but none of these parameters has a gradient."""
    trained = [it for it in module.parameters() if it.requires_grad and id(it) in updated]
    return bool(trained) and all(it.grad is None for it in trained)


@dataclass(slots=True)
class _Comparison:
    """A comparison of an optimizer's parameters with the parameters of all wrapped models.

    It has the numbers of parameters and of models at its time, and of the optimizer's steps since then.
    """

    sizes: tuple[int, int] = (0, 0)
    num_steps: int = 0


_compared: Final[weakref.WeakKeyDictionary[Optimizer, _Comparison]] = weakref.WeakKeyDictionary()


def _check_all_are_wrapped(optimizer: Optimizer) -> None:
    """Raise OptimizerError if an optimizer of wrapped models also updates a parameter outside of these models."""
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
"""The counter of each optimizer's steps on gradients that popdist has not reduced."""


def _unreduced(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Return names and gradients of parameters common to all instances, if popdist has not reduced them."""
    found = [it for it in parameters_of(optimizer) if it.grad is not None and not is_reduced(it.grad)]
    if not found:
        return []
    modules = modules_in(joint_modules)
    names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
    return [(names[id(it)], it.grad) for it in found if id(it) in names and it.grad is not None]


def _compare_gradients(optimizer: Optimizer) -> None:
    """Raise GradientError in a checked step if gradients not reduced by popdist differ between instances."""
    if not context.is_initialized() or (number := context.environment().contract.layout.num_instances) == 1:
        return
    group = context.data_parallel_group()
    if len(group.instances) < number or not (gradients := _unreduced(optimizer)):
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
        return  # an instance has left or was lost; the next call that needs this instance raises an error
    if difference is not None:
        raise GradientError(
            f"{text}, and they are not equal on all instances: {difference}. They were set by hand, or come from "
            "backward() under no_sync(). Compute them in a loop over model.micro_batches(batch), or add them over "
            "the instances first, as popdist.all_reduce_gradients(model) does"
        )
