"""What a program does outside the micro batches of a step: backward passes, and steps of its optimizers.

An optimizer's step raises an error while the gradients of all replicas are not there yet, and on weights that all
instances of a host share, if the optimizer is another than the sharded one that they belong to. torch's hooks see
each step.

Every trained parameter tells when its gradient has been accumulated. In a micro batch the step takes it. Outside,
an instance with one replica reduces as soon as the backward pass has ended; one with several cannot know which of
them has computed, and shows the loop to write. So no gradient is left unreduced.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from popdist import context
from popdist.errors import BatchError, MicroBatchError, OptimizerError
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.memory import GradientMemory, ModelGradients
from popdist.gradients.reduction import GradientSum, MeanOrSum, NotFinite, not_finite_error
from popdist.layout import ReplicaLayout
from popdist.training.checks import CheckedSteps, is_checked
from popdist.training.python_state import take_fault
from popdist.training_loop import training_loop
from popdist.weights import ParameterSums, sum_parameters

if TYPE_CHECKING:
    from popdist.training.step import PlainStep, Step

_in_step: Final[weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""The modules in the middle of a step, by what makes the step: their gradients are incomplete."""


_lost: Final[weakref.WeakKeyDictionary[object, tuple[weakref.ref[nn.Module], str]]] = weakref.WeakKeyDictionary()
"""The modules whose last step was lost, by what made it, and why it was: they have no gradients."""


def begin_step(owner: object, module: nn.Module) -> None:
    """From now on the gradients of ``module`` are incomplete, as long as there is the ``owner`` of the step."""
    _lost.pop(owner, None)
    _in_step[owner] = weakref.ref(module)


def end_step(owner: object) -> None:
    """The gradients of the owner's module are complete, or gone."""
    _in_step.pop(owner, None)


def lose_step(owner: object, module: nn.Module, reason: str) -> None:
    """The owner's step has left no gradient on any instance, so until its next one there is nothing to step on."""
    end_step(owner)
    _lost[owner] = (weakref.ref(module), reason)


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
    if _all and context.num_replicas() > 1:
        _check_all_are_wrapped(optimizer)
    if not _shared and not _in_step and not _lost:
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
    for reference, reason in _lost.values():
        module = reference()
        if module is not None and _has_nothing_for(updated, module):
            raise MicroBatchError(
                f"optimizer.step() without a gradient: {reason}. Begin the next step, which works on all "
                "instances; where an exception is caught, go on with the next batch in place of this call"
            )


_looked_at: Final[weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, int], int]]] = weakref.WeakKeyDictionary()
"""For each optimizer how many parameters and models there were when it was looked at, and its steps since."""


def _check_all_are_wrapped(optimizer: Optimizer) -> None:
    """Refuse a step that moves a parameter beside those of wrapped models with one instance's gradient."""
    sizes = sum(len(group["params"]) for group in optimizer.param_groups), len(_all)
    known, num_steps = _looked_at.get(optimizer, ((0, 0), 0))
    num_steps = 1 if known != sizes else num_steps + 1
    _looked_at[optimizer] = (sizes, num_steps)
    if not is_checked(num_steps):
        return
    modules = [*(model.module for model in _all), *_known.keys()]
    wrapped = {id(parameter) for module in modules for parameter in module.parameters()}
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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


LOOP: Final = """
    model = popdist.ReplicatedModel(module)
    for batch in loader:
        for x, y in model.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()"""
"""The loop that messages show."""


class AutomaticReduction:
    """The gradients of backward passes outside the micro batches of one model.

    Args:
        module: The model.
        gradients: Of its parameters.
        buffers: Of the model; they are made equal with the gradients.
        layout: Of the job.
        checked_steps: Of the model: a reduction is a step.
        checks_finite: Whether to look for NaN and infinity.

    Attributes:
        step: The step that the process is in, in a micro batch or between two.
        is_computing: Whether it is in a micro batch, where gradients are expected.
        module: The model.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: ModelGradients,
        buffers: ReplicaBuffers,
        layout: ReplicaLayout,
        checked_steps: CheckedSteps,
        *,
        checks_finite: bool,
    ) -> None:
        self.step: Step | PlainStep | None = None
        self.is_computing = False
        self.module = module
        self._gradients = gradients
        self._buffers = buffers
        self._layout = layout
        self._checked_steps = checked_steps
        self._checks_finite = checks_finite
        self._num_suspensions = 0
        self._watched: dict[int, weakref.ref[Parameter]] = {}
        self._task: int | None = None
        _all.add(self)

    def watch(self) -> None:
        """Notice backward passes outside the micro batches from now on; new and frozen parameters count, too."""
        if self.is_computing or (self._layout.num_replicas == 1 and not self._checks_finite):
            return
        for parameter in self.module.parameters():
            if not self._watches(parameter):
                self._watched[id(parameter)] = weakref.ref(parameter)
                _call_with_gradients(parameter, weakref.WeakMethod(self.notice_gradient))

    def expects(self, parameter: Tensor) -> bool:
        """Whether the process is in a micro batch of this model, to which ``parameter`` belongs."""
        return self.is_computing and self._watches(parameter)

    def _watches(self, parameter: Tensor) -> bool:
        known = self._watched.get(id(parameter))
        return known is not None and known() is parameter

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block, backward passes outside the micro batches are left alone."""
        self._num_suspensions += 1
        try:
            yield
        finally:
            self._num_suspensions -= 1

    def notice_gradient(self, parameter: Tensor) -> None:
        """A gradient has been accumulated, perhaps by a backward pass that nobody expected.

        Another model of the same parameter may expect it: a module that was wrapped again, or a part of two.
        """
        if self.is_computing:
            if self.step is not None:
                self.step.take(parameter)
            return
        if self._num_suspensions or any(model.expects(parameter) for model in tuple(_all)):
            return
        if self.step is not None:
            raise MicroBatchError(
                "backward() between the micro batches of a step: call it within `with model.micro_batch(i)`, or "
                "within `with model.no_sync()` where this model's gradients play no part"
            )
        if self._layout.num_local_replicas > 1:
            num_local = self._layout.num_local_replicas
            raise BatchError(
                f"backward() outside micro_batches, and this instance has {num_local} replicas, each of "
                f"which needs its own micro batches. Write\n{LOOP}\n\nor `with model.no_sync():` around a "
                "backward pass in which this model's gradients play no part"
            )
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - DDP and FSDP rely on this pair; there is no public one
        if task != self._task:  # once for each backward pass
            self._task = task
            Variable._execution_engine.queue_callback(self._reduce)  # noqa: SLF001 - as above

    def _reduce(self) -> None:
        """Take the mean over the instances, which have one replica each and count alike: the pass has ended."""
        gradients, group = self._gradients.find(), context.current_group()
        parameter = gradients.not_finite() if self._checks_finite else None
        found = None if parameter is None else NotFinite(group.backend.instance_index, parameter)
        if self._layout.num_replicas > 1:
            weights = sum_parameters(self.module) if self._checked_steps.is_next_checked() else None
            _reduce_all(self._gradients.memory(group, self._layout), "mean", self._buffers, weights, found)
            self._checked_steps.end_step()
            self._buffers.begin_pass()
        elif found is not None:
            raise not_finite_error(found, gradients)


_all: Final[weakref.WeakSet[AutomaticReduction]] = weakref.WeakSet()
"""Of all models of this process."""


def _call_with_gradients(parameter: Parameter, method: weakref.WeakMethod[Callable[[Tensor], None]]) -> None:
    """Call ``method``, as long as there is its object, whenever a gradient of ``parameter`` was accumulated."""

    def call(parameter: Tensor) -> None:
        found = method()
        if found is not None:
            found(parameter)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(call)
    elif parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_(True)  # noqa: FBT003 - torch names it positionally
        parameter.register_post_accumulate_grad_hook(call)
        parameter.requires_grad_(False)  # noqa: FBT003 - as above


def _reduce_all(
    memory: GradientMemory,
    reduction: MeanOrSum,
    buffers: ReplicaBuffers | None = None,
    weights: ParameterSums | None = None,
    not_finite: NotFinite | None = None,
) -> None:
    """Reduce all gradients that there are, as those of the one micro batch of this instance's replica."""
    total = GradientSum(memory, buffers, weights)
    if buffers is not None:
        buffers.end_pass()
    total.used = memory.gradients.used()
    total.push(memory.take_all(), 1.0)
    total.finish(reduction, not_finite, take_fault())


_known: Final[weakref.WeakKeyDictionary[nn.Module, ModelGradients]] = weakref.WeakKeyDictionary()
"""For each module that was reduced by itself, its gradients: their memory is used again."""


def all_reduce_gradients(module: nn.Module, op: Literal["mean", "sum"] = "mean") -> None:
    """Replace each ``.grad`` of ``module`` by the mean or sum over all instances, between backward and step.

    For jobs with one replica in each instance; each counts alike, whatever the size of its batch. A parameter that
    some instances did not use counts as zeros there; one that none used keeps ``.grad`` None. Gradients are added
    in float32 (float64 for parameters of double precision), in the order of the replicas, so all instances get
    the same bits; and the bits of ``ReplicatedModel`` with batches of equal size.

    Args:
        module: A module whose weights are equal on all instances: see ``broadcast_weights``.
        op: ``"mean"`` or ``"sum"``.

    Raises:
        BatchError: If instances have several replicas: each needs a backward pass of its own; or if ``module`` or
            ``op`` is neither of these.
        CollectiveError: If the instances have other parameters or do other things.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
    """
    if op not in ("mean", "sum"):
        raise BatchError(f"op={op!r} must be 'mean' or 'sum'")
    if not isinstance(module, nn.Module):
        raise BatchError(f"all_reduce_gradients({module!r}): expected a torch.nn.Module")
    group, layout = context.current_group(), context.environment().contract.layout
    if layout.num_local_replicas > 1:
        raise BatchError(
            f"all_reduce_gradients is for one replica in each instance, and this job has {layout.num_replicas} "
            f"replicas in {layout.num_instances} instances: each needs its own micro batches. Write\n{LOOP}"
        )
    gradients = _known.setdefault(module, ModelGradients(module))
    _reduce_all(gradients.memory(group, layout), op)
