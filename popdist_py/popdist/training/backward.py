"""Backward passes outside the loop: their gradients are reduced when they end, or refused, never left unreduced.

Every trained parameter tells when its gradient has been accumulated. Inside a micro batch that is as it should be.
Outside, an instance with one replica reduces as soon as the backward pass has ended; one with several cannot know
which of them has computed, and shows the loop to write.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import Parameter

from popdist import context
from popdist.errors import BatchError, MicroBatchError
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.memory import ModelGradients
from popdist.gradients.reduction import GradientSum, NotFinite, not_finite_error
from popdist.layout import ReplicaLayout

LOOP: Final = """
    model = popdist.ReplicatedModel(module)
    for batch in loader:
        for x, y in model.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()"""


class Taking(Protocol):
    """A step that is being made."""

    def take(self, parameter: torch.Tensor) -> None:
        """A gradient of its micro batch has been accumulated."""


class AutomaticReduction:
    """What happens to the gradients of a backward pass outside the micro batches of one model.

    Args:
        module: The model.
        gradients: Of its parameters.
        buffers: Of the model; they are made equal with the gradients.
        layout: Of the job.
        checks_finite: Whether to look for NaN and infinity.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: ModelGradients,
        buffers: ReplicaBuffers,
        layout: ReplicaLayout,
        *,
        checks_finite: bool,
    ) -> None:
        self.is_computing = False
        """Whether the process is in a micro batch, where gradients are expected."""
        self.step: Taking | None = None
        """The step that the process is in, in a micro batch or between two."""
        self._module = module
        self._gradients = gradients
        self._buffers = buffers
        self._layout = layout
        self._checks_finite = checks_finite
        self._num_suspensions = 0
        self._watch = BackwardWatch(self)
        self._is_watching = layout.num_replicas > 1 or checks_finite
        _all.add(self)

    def watch(self) -> None:
        """Notice backward passes outside the micro batches from now on, of parameters that are new, too."""
        if self._is_watching and not self.is_computing:
            self._watch.cover(self._module.parameters())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block, backward passes outside the micro batches are left alone."""
        self._num_suspensions += 1
        try:
            yield
        finally:
            self._num_suspensions -= 1

    def expects(self, parameter: torch.Tensor) -> bool:
        """Whether the process is in a micro batch of this model, to which ``parameter`` belongs."""
        return self.is_computing and self._watch.covers(parameter)

    def notice_gradient(self, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated, perhaps by a backward pass that nobody expected.

        In a micro batch the step takes it. Elsewhere it is reduced after the pass, or refused. Another model of
        the same parameter may expect it: a module that was wrapped again, or a part of two.
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
        self._watch.call_after_backward(self._reduce)

    def _reduce(self) -> None:
        """The mean over the instances, each of which has one replica and counts alike."""
        gradients, group = self._gradients.find(), context.current_group()
        parameter = gradients.not_finite() if self._checks_finite else None
        found = None if parameter is None else NotFinite(group.backend.instance_index, parameter)
        if self._layout.num_replicas > 1:
            memory = self._gradients.memory(group, self._layout)
            total = GradientSum(group, self._layout, memory, self._buffers)
            self._buffers.end_replica(has_run=True)
            total.push(memory.take_all(), 1.0, gradients.used())
            total.finish("mean", not_finite=found)
            self._buffers.begin_step()
        elif found is not None:
            raise not_finite_error(found, gradients)


class BackwardWatch:
    """Tells ``owner`` of each parameter whose gradient was accumulated unexpectedly.

    Args:
        owner: Is not kept alive by this.
    """

    def __init__(self, owner: AutomaticReduction) -> None:
        self._owner = weakref.ref(owner)
        self._watched: dict[int, weakref.ref[Parameter]] = {}
        self._task: int | None = None

    def cover(self, parameters: Iterable[Parameter]) -> None:
        """Watch ``parameters``, those that are frozen now too; again is no harm."""
        for parameter in parameters:
            known = self._watched.get(id(parameter))
            if known is None or known() is not parameter:
                self._watched[id(parameter)] = weakref.ref(parameter)
                self._hook(parameter)

    def covers(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is watched."""
        known = self._watched.get(id(parameter))
        return known is not None and known() is parameter

    def call_after_backward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the backward pass that is running has ended; once for each pass."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - DDP and FSDP rely on this pair; there is no public one
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - as above

    def _hook(self, parameter: Parameter) -> None:
        owner_of = self._owner

        def tell(parameter: torch.Tensor) -> None:
            owner = owner_of()
            if owner is not None:
                owner.notice_gradient(parameter)

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(tell)
        elif parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)  # noqa: FBT003 - torch names it positionally
            parameter.register_post_accumulate_grad_hook(tell)
            parameter.requires_grad_(False)  # noqa: FBT003 - as above


_all: Final[weakref.WeakSet[AutomaticReduction]] = weakref.WeakSet()
"""Those of all models of this process."""


_known: Final[weakref.WeakKeyDictionary[nn.Module, ModelGradients]] = weakref.WeakKeyDictionary()
"""Of each module, so that the memory is used again."""


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
    known = _known.setdefault(module, ModelGradients(module))
    memory = known.memory(group, layout)
    replicas = GradientSum(group, layout, memory)
    replicas.push(memory.take_all(), 1.0, memory.gradients.used())
    replicas.finish(op)
