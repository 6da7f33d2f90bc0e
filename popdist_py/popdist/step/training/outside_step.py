"""Reduction of gradients from backward passes outside micro batches, as in a plain loop of DDP.

A hook is called when the gradient of a trained parameter was accumulated. In a micro batch the step gets the
gradient. Outside, an instance with one replica reduces as soon as the backward pass has ended. An instance with
several replicas does not know which replica has computed, and raises an error that shows the loop to write.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BatchError, MicroBatchError
from popdist.exchange.groups import refuse_in_turn, replicas_in_turn
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.kept_gradients import KeptGradients
from popdist.gradients.memory import GradientMemory, ModelGradients
from popdist.gradients.optimizer_steps import mark_reduced, mark_used
from popdist.gradients.reduction import NotFinite, StepAgreement, not_finite_error
from popdist.gradients.step_headers import NO_CHECKS, MeanOrSum, ModelChecks, StepChecks
from popdist.ground import torch_private, torch_private_groups
from popdist.ground.layout import ReplicaLayout
from popdist.job import context
from popdist.step.training.step import LoneStep, Step, raise_not_finite_of_parts, reduced_modules

LOOP: Final = """
    model = popdist.ReplicatedModel(module)
    for batch in loader:
        for x, y in model.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()"""
"""The training loop that error messages show."""


class AutomaticReduction:
    """The automatic reduction of one model's gradients after backward passes outside micro batches, as in DDP."""

    def __init__(
        self,
        module: nn.Module,
        gradients: ModelGradients,
        buffers: ReplicaBuffers,
        layout: ReplicaLayout,
        checks: ModelChecks,
        *,
        checks_finite: bool,
    ) -> None:
        self.step: Step | LoneStep | None = None  # the running step, also between two micro batches
        self.is_computing = False  # whether a micro batch runs, so that gradients are expected
        self.module = module
        self._gradients = gradients
        self._buffers = buffers
        self._layout = layout
        self._checks = checks
        self._checks_finite = checks_finite
        # whether gradients outside of micro batches need any work
        self.is_watchful = layout.num_replicas > 1 or checks_finite or gradients.narrow is not None
        self._num_collectives = 0  # torch's collectives when the micro batch began
        self._num_suspensions = 0
        self._is_window_clean = False
        self._watched: dict[int, weakref.ref[Parameter]] = {}
        self._backward_pass: int | None = None
        _all.add(self)
        reduced_modules[self] = weakref.ref(module)

    def watch(self) -> None:
        """Register hooks that notice each new gradient of all parameters, also of new and frozen parameters."""
        if self.is_computing or not self.is_watchful:
            return
        for parameter in self.module.parameters():
            if not self._watches(parameter):
                self._watched[id(parameter)] = weakref.ref(parameter)
                _call_with_gradients(parameter, weakref.WeakMethod(self.notice_gradient))

    def begin_computing(self) -> None:
        """Record that a micro batch of this model begins."""
        self.is_computing = True
        if self._layout.num_local_replicas > 1:
            replicas_in_turn.add(self)
            self._num_collectives = torch_private_groups.num_collectives()
        for other in _suspended and _suspended - {self}:
            other._open_window()  # noqa: SLF001 - the other one has the same class

    def end_computing(self) -> None:
        """Record that a micro batch of this model has ended, if one had begun."""
        if self.is_computing:
            self.is_computing = False
            replicas_in_turn.discard(self)
            for other in _suspended and _suspended - {self}:
                other._close_window()  # noqa: SLF001 - the other one has the same class

    def refuse_collectives(self) -> None:
        """Raise an error if the program called torch.distributed in a micro batch of several replicas."""
        if self in replicas_in_turn and torch_private_groups.num_collectives() > self._num_collectives:
            refuse_in_turn(None, "a collective of torch.distributed")

    def _open_window(self) -> None:
        """Note that another model, such as a GAN's generator, uses this model until :meth:`_close_window`.

        No optimizer will use the gradients that this model gets in this time.
        """
        self._is_window_clean = not self._gradients.unused()

    def _close_window(self) -> None:
        """End the time in which another model computes: mark this model's new gradients as used, so that no
        reduction adds them. Do nothing if this model had unused gradients at :meth:`_open_window`.
        """
        if self._is_window_clean:
            mark_used(self._gradients.parameters())
        self._is_window_clean = False

    def expects(self, parameter: Tensor) -> bool:
        """Whether this model runs a micro batch now and trains ``parameter``."""
        return self.is_computing and self._watches(parameter)

    def _watches(self, parameter: Tensor) -> bool:
        known = self._watched.get(id(parameter))
        return known is not None and known() is parameter

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which gradients of backward passes outside the micro batches are not reduced."""
        self._num_suspensions += 1
        _suspended.add(self)
        is_window = self._num_suspensions == 1 and any(it.is_computing for it in tuple(_all) if it is not self)
        if is_window:
            self._open_window()
        try:
            yield
        finally:
            if is_window:
                self._close_window()
            self._num_suspensions -= 1
            if not self._num_suspensions:
                _suspended.discard(self)

    def notice_gradient(self, parameter: Tensor) -> None:
        """Add the new gradient ``parameter.grad`` to the sum of the step; outside a step, reduce it later."""
        if self.is_computing:
            if self.step is not None:
                self.step.add_gradient(parameter)
            return
        # another model may expect the gradient: a module that was wrapped again, or a part of two models
        if any(model.expects(parameter) for model in tuple(_all)):
            return
        if self._num_suspensions:
            if parameter.grad is not None:
                mark_reduced(parameter.grad, is_reduced=False)
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
        number = torch_private.backward_pass()
        if number != self._backward_pass:  # once for each backward pass
            self._backward_pass = number
            if not torch_private.call_after_backward(self._reduce):
                raise BatchError(
                    f"backward() outside micro_batches, whose end this torch does not show. Write\n{LOOP}"
                )

    def _reduce(self) -> None:
        """Reduce all gradients to their mean over the instances, after the end of the backward pass."""
        gradients, group = self._gradients.layout(), context.data_parallel_group()
        parameter = gradients.not_finite() if self._checks_finite else None
        found = None if parameter is None else NotFinite(group.backend.instance_index, parameter)
        if self._checks_finite:
            raise_not_finite_of_parts(found, gradients)
        if self._layout.num_replicas > 1:
            memory = self._gradients.memory(group, self._layout)
            checks = self._checks.begin_step()
            checks.compare_inputs(group)
            _reduce_all(memory, "mean", self._buffers, checks, found)
            self._checks.end_step()
            self._buffers.begin_pass()
        elif found is not None:
            raise not_finite_error(found, gradients)
        elif self._gradients.narrow is not None:
            _reduce_all(self._gradients.memory(group, self._layout), "mean")


_all: Final[weakref.WeakSet[AutomaticReduction]] = weakref.WeakSet()
"""The automatic reductions of all models of this process."""

_suspended: Final[set[AutomaticReduction]] = set()
"""The automatic reductions of the models that are inside ``no_sync()``."""


def is_any_suspended() -> bool:
    """Whether the program is inside ``no_sync()`` of a model."""
    return bool(_suspended)


def _call_with_gradients(parameter: Parameter, method: weakref.WeakMethod[Callable[[Tensor], None]]) -> None:
    """Register a hook that calls ``method`` for each new gradient of ``parameter``, while its owner exists."""

    def call(parameter: Tensor) -> None:
        found = method()
        if found is not None:
            found(parameter)

    if parameter.is_floating_point() or parameter.is_complex():
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # noqa: FBT003 - torch names it positionally
        parameter.register_post_accumulate_grad_hook(call)
        parameter.requires_grad_(is_trained)


def _reduce_all(
    memory: GradientMemory,
    reduction: MeanOrSum,
    buffers: ReplicaBuffers | None = None,
    checks: StepChecks = NO_CHECKS,
    not_finite: NotFinite | None = None,
) -> None:
    """Reduce all present gradients, as the gradients of the one micro batch of this instance's replica."""
    keeper = KeptGradients(memory)
    agreement = StepAgreement(memory.group, memory.layout, keeper, buffers, checks)
    if buffers is not None:
        buffers.end_pass()
    keeper.not_finite = not_finite
    keeper.add(0, 1.0, 1.0, clears=False)
    agreement.finish(reduction, [1.0], checks.fault())


_known: Final[weakref.WeakKeyDictionary[nn.Module, ModelGradients]] = weakref.WeakKeyDictionary()
"""The gradients of each module that :func:`all_reduce_gradients` has reduced, whose memory is used again."""


def all_reduce_gradients(module: nn.Module, op: Literal["mean", "sum"] = "mean") -> None:
    """Replace each ``.grad`` of ``module`` by the mean (or sum, see ``op``) over all instances, after backward().

    For jobs with one replica in each instance; every instance has the same weight, whatever the size of its batch.
    A parameter that some instances did not use counts as zeros there; if no instance used the parameter, ``.grad``
    stays None. Gradients are added in float32 (float64 for parameters of double precision), in the order of the
    replicas, so all instances get the same bits, and the bits of ``ReplicatedModel`` with batches of equal size.

    Args:
        module: A module whose weights are equal on all instances: see ``broadcast_weights``.
        op: ``"mean"`` or ``"sum"``.

    Raises:
        BatchError: If instances have several replicas, each of which needs its own backward pass; or if ``module``
            is no module, or ``op`` has another value.
        CollectiveError: If the instances have other parameters or do other things.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
    """
    if op not in ("mean", "sum"):
        raise BatchError(f"op={op!r} must be 'mean' or 'sum'")
    if not isinstance(module, nn.Module):
        raise BatchError(f"all_reduce_gradients({module!r}): expected a torch.nn.Module")
    group, layout = context.data_parallel_group(), context.environment().contract.layout
    if layout.num_local_replicas > 1:
        raise BatchError(
            f"all_reduce_gradients is for one replica in each instance, and this job has {layout.num_replicas} "
            f"replicas in {layout.num_instances} instances: each needs its own micro batches. Write\n{LOOP}"
        )
    gradients = _known.setdefault(module, ModelGradients(module))
    reduced_modules[gradients] = weakref.ref(module)
    _reduce_all(gradients.memory(group, layout), op)
