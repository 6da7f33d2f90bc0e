"""Gradients for a loop that does its own backward pass: one replica in each instance, no micro batches."""

import weakref
from typing import Final, Literal

from torch import nn

from popdist import context
from popdist.errors import BatchError
from popdist.gradients.model_gradients import ModelGradients
from popdist.gradients.step_end import ReplicaSum
from popdist.training.outside_backward import LOOP

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
    replicas = ReplicaSum(group, layout, memory)
    replicas.push(memory.take_all(), 1.0, memory.gradients.used())
    replicas.finish(op)
