"""One step of a model on this instance, and its state for optimizers: running, complete or lost.

A step is begun, each micro batch is added to the gradient of its replica, and then the step is finished or
abandoned.
"""

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from popdist.errors import BatchError, GradientError, name_instances
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.flat_buffers import GradientLayout
from popdist.gradients.memory import ModelGradients, OldGradients, is_finite
from popdist.gradients.optimizer_steps import mark_used, parameters_of
from popdist.gradients.reduction import NO_SAMPLES, GradientKeeper, NotFinite, StepAgreement, not_finite_error
from popdist.gradients.step_headers import BatchPosition, MeanOrSum, StepChecks
from popdist.ground.progress import progress_page
from popdist.ground.torch_private import divides_gradients
from popdist.ground.tree import TreeSum
from popdist.job import context
from popdist.job.collectives import gather_bytes


class Step:
    """One step of a model: it gets the gradient of each micro batch, and is then finished or abandoned."""

    def __init__(
        self,
        keeper: GradientKeeper,
        agreement: StepAgreement,
        buffers: ReplicaBuffers,
        checks: StepChecks,
        *,
        accumulation: int,
        checks_finite: bool,
    ) -> None:
        self.keeper, self.agreement = keeper, agreement
        self.accumulation = accumulation  # micro batches of each local replica
        self.checks = checks
        self._buffers = buffers
        self._checks_finite = checks_finite
        self._layout = agreement.layout
        self._first = self._layout.replicas_of(agreement.group.backend.instance_index).start
        self._position = 0  # the micro batch that is next
        self._scale: float | None = None  # the divisor of the weights; None until all instances have begun
        self._weights: TreeSum[float] = TreeSum(self._layout.num_replicas, operator.add, start=self._first)
        self._open: dict[int, _ReplicaWeight] = {}
        if self._layout.num_replicas > 1:
            buffers.begin_step(is_checked=checks.is_on)

    def begin(self, heaviest: float, reduction: MeanOrSum, position: BatchPosition, *, add: bool) -> None:
        """Tell all instances that a step on a whole batch begins here: see :meth:`StepAgreement.begin`."""
        self.agreement.begin(self.accumulation, heaviest, reduction, position, add=add)

    def wait_for_others(self) -> None:
        """Wait until all instances have begun their steps."""
        self.agreement.weight_scale()

    def begin_micro_batch(self, index: int, weight: float) -> int:
        """Begin micro batch ``index``, counting skipped ones as empty; return its replica's index in the job."""
        num_local_replicas = self._layout.num_local_replicas
        if not self._position <= index < num_local_replicas * self.accumulation:
            raise _out_of_order(index, self._position, num_local_replicas, self.accumulation)
        self._skip_to(index)
        self.keeper.begin_micro_batch(index, weight)
        return self._first + self._position // self.accumulation

    def add_gradient(self, parameter: Tensor) -> None:
        """Give the gradient just accumulated in ``parameter.grad`` to the step's sum, if the sum waits for it."""
        if id(parameter) in self.keeper.awaited:
            self.keeper.add_gradient(parameter)

    def add(self, weight: float) -> None:
        """Add the gradients that the backward passes of the next micro batch left in ``.grad`` to the step."""
        if self._scale is None:
            self._scale = self.agreement.weight_scale()
        self.keeper.add(self._position, weight, self._scale)
        self._add_to_replica(weight, has_run=True)

    def add_in_turn(self, index: int, weight: float | None) -> None:
        """Add the gradients of micro batch ``index``, where replicas run in turns; ``weight`` is None if it has no
        samples.
        """
        self._position = index
        if weight is None:
            self._skip_to(index + 1)
        else:
            self.add(weight)

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """Set the ``.grad`` of each parameter, and each buffer, to the value over all replicas of the job."""
        self._skip_to(self._layout.num_local_replicas * self.accumulation)
        if self._checks_finite:
            self.agreement.weight_scale()
            raise_not_finite_of_parts(self.keeper.not_finite, self.keeper.gradients)
        fault = self._buffers.fault or self.checks.fault()
        self.agreement.finish(reduction, self._weights.values, fault, add=add)
        self._buffers.end_step()

    def abandon(self) -> None:
        """Discard the step's gradients, and inform the instances that wait for this step. Never raises."""
        self.keeper.clear()
        self._buffers.undo()
        self._buffers.end_step()
        self.agreement.abandon()

    def _skip_to(self, index: int) -> None:
        while self._position < index:
            self.keeper.skip(self._position)
            self._add_to_replica(0.0, has_run=False)

    def _add_to_replica(self, weight: float, *, has_run: bool) -> None:
        """Add a micro batch's weight to its replica's; after the last, add the replica's weight to the job's."""
        replica = self._position // self.accumulation
        self._position += 1
        if self.accumulation > 1:
            own = self._open.setdefault(replica, _ReplicaWeight(TreeSum(self.accumulation, operator.add)))
            own.weights.push(weight)
            own.has_run |= has_run
            if own.weights.position < self.accumulation:
                return
            del self._open[replica]
            weight, has_run = own.weights.total, own.has_run
        self._weights.push(weight)
        self._buffers.end_replica(has_run=has_run)


@dataclass(slots=True)
class _ReplicaWeight:
    """The weights of one replica's micro batches so far, and whether one of these micro batches had samples."""

    weights: TreeSum[float]
    has_run: bool = False


def _out_of_order(index: int, position: int, num_local_replicas: int, accumulation: int) -> BatchError:
    """Return the error for micro batch ``index``, if this instance's next micro batch is number ``position``."""
    return BatchError(
        f"micro_batch({index}), where {position} is the next of this instance's "
        f"{num_local_replicas * accumulation} micro batches ({num_local_replicas} local replicas x "
        f"accumulation {accumulation}): take them in order, then call reduce_gradients()"
    )


def raise_not_finite_of_parts(found: NotFinite | None, gradients: GradientLayout) -> None:
    """Raise GradientError on all instances if one has found NaN or infinity, and instances share a replica."""
    if not context.environment().contract.parallelism.is_shared:
        return
    group, fault = context.current_group(), "" if found is None else str(not_finite_error(found, gradients))
    received = gather_bytes(group, "look for NaN and infinity in all parts of the model", fault.encode())
    if faults := {instance: it.decode() for instance, it in zip(group.instances, received, strict=True) if it}:
        raise GradientError(f"{next(iter(faults.values()))} (found on {name_instances(faults)})")


class LoneStep:
    """A step with one micro batch in the whole job, used as :class:`Step`: the gradient stays in ``.grad``."""

    accumulation = 1

    def __init__(
        self, gradients: ModelGradients, old: OldGradients, checks: StepChecks, *, checks_finite: bool
    ) -> None:
        self.checks = checks
        self._gradients = gradients
        self._old = old
        self._checks_finite = checks_finite
        self._weight: float | None = None

    def begin(self, heaviest: float, _reduction: MeanOrSum, _position: BatchPosition, *, add: bool) -> None:
        """Raise BatchError if the weight is 0; without ``add``, GradientError if old gradients are unused."""
        self._drop_old_unless_added(add=add)
        if not heaviest:
            raise BatchError(NO_SAMPLES)

    def begin_micro_batch(self, index: int, _weight: float) -> int:
        """Begin micro batch 0, the only one of the step, and return 0, the number of its replica."""
        if index or self._weight is not None:
            position = 0 if self._weight is None else 1
            raise _out_of_order(index, position, num_local_replicas=1, accumulation=1)
        return 0

    def add_gradient(self, parameter: Tensor) -> None:
        """Leave the gradient in ``parameter.grad``, because this step adds no other gradient."""

    def add(self, weight: float) -> None:
        """Record the weight of the micro batch; its gradient stays in ``.grad``."""
        self._weight = weight

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """Leave each ``.grad`` unchanged for a mean; for a sum, multiply gradients by the micro batch's weight."""
        self._drop_old_unless_added(add=add)
        if reduction == "mean" and not self._weight:
            raise BatchError("the one micro batch of this step has no weight, so this step has no gradient")
        if self._checks_finite and self._weight:
            layout = self._gradients.layout()
            parameter = layout.not_finite()
            found = None if parameter is None else NotFinite(0, parameter)
            raise_not_finite_of_parts(found, layout)
            if found is not None:
                raise not_finite_error(found, layout)
        if reduction == "sum" and self._weight != 1:
            layout = self._gradients.layout()
            used, room = layout.used(), layout.make_wide()
            layout.fill(room, times=self._weight or 0.0)
            layout.set_gradients(room, used)
        if add:
            self._old.add_to_new()
        progress_page.count_step()

    def _drop_old_unless_added(self, *, add: bool) -> None:
        if self._old.kept and (number := self._old.number(add=add)):
            self._old.drop_unless_added({0: number}, add=add)

    def abandon(self) -> None:
        """End the step without a gradient: set every ``.grad`` to None."""
        self._gradients.remove()


class StepState:
    """The state of a model's last step: running, complete or lost; valid as long as ``owner`` exists."""

    def __init__(self, owner: object, module: nn.Module) -> None:
        self.reference = weakref.ref(module)
        self._owner = weakref.ref(owner)

    def begin(self) -> None:
        """Mark the step as running: the gradients of the module are incomplete."""
        lost_steps.discard(self)
        running_steps.add(self)

    def end(self) -> None:
        """Mark the step as ended: the gradients of the module are complete, or were removed."""
        running_steps.discard(self)

    def lose(self) -> None:
        """Mark the step as lost: no instance has a gradient, and no optimizer may step before the next step."""
        self.end()
        lost_steps.add(self)

    @property
    def module(self) -> nn.Module | None:
        """The model whose step this is; None if the model or the owner no longer exists."""
        return None if self._owner() is None else self.reference()


running_steps: Final[set[StepState]] = set()
lost_steps: Final[set[StepState]] = set()
"""The states of models in the middle of a step, and the states of models whose last step was lost."""

reduced_modules: Final[weakref.WeakKeyDictionary[object, "weakref.ref[nn.Module]"]] = weakref.WeakKeyDictionary()
"""The modules whose gradients popdist reduces; the key is the object that reduces the gradients."""

joint_modules: Final[weakref.WeakKeyDictionary[object, "weakref.ref[nn.Module]"]] = weakref.WeakKeyDictionary()
"""The modules that all instances have; the key is the object that makes the steps of the module."""


def modules_in(registry: "weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]]") -> list[nn.Module]:
    """Return the modules in ``registry`` that still exist."""
    return [module for reference in tuple(registry.values()) if (module := reference()) is not None]


def is_in_step() -> bool:
    """Whether a model is in the middle of a step."""
    return any(state.module is not None for state in tuple(running_steps))


@cache
def watch_scalers() -> None:
    """Make GradScalers agree on all instances: one scale, and one decision whether to skip a step."""
    for name in ("unscale_", "step"):
        setattr(GradScaler, name, _watched(getattr(GradScaler, name)))


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    is_step = method.__name__ == "step"

    @wraps(method)
    def call(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = parameters_of(optimizer)
        # torch makes the scale with the first loss, but only the last stage with samples has a loss
        scaler.scale(torch.zeros((), dtype=torch.float32, device=parameters[0].device))
        looks = not is_step or divides_gradients(optimizer)  # otherwise torch calls unscale_()
        if looks and scaler.is_enabled() and context.environment().contract.parallelism.is_shared:
            _share_infinity(parameters)
        result = method(scaler, optimizer, *args, **kwargs)
        if is_step:
            mark_used(parameters)  # even if the scaler skips the step
        return result

    return call


def _share_infinity(parameters: Sequence[Tensor]) -> None:
    """Make the gradients NaN on every instance if one instance has NaN or infinity; all must call this."""
    joint = {id(it) for module in modules_in(joint_modules) for it in module.parameters()}
    if joint.isdisjoint(map(id, parameters)):
        return
    gradients = [it.grad for it in parameters if it.grad is not None]
    text = "GradScaler: look for NaN and infinity in all parts of the model"
    found = context.current_group().start(text, [all(map(is_finite, gradients))]).wait()
    if not all(is_here for (is_here,) in found):
        for gradient in gradients:
            gradient.mul_(math.nan)
