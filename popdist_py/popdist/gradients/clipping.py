"""The norm of all gradients of a model, wherever their parts are, and the scaling of gradients to a maximum norm.

A gradient that several instances have counts once, and each part of a gradient counts on its own instance. Norms
are added in the order of parameters, then in the order of instances: so the bits do not depend on the placement.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from popdist.errors import GradientError, as_float
from popdist.exchange.groups import Group, as_floats, as_words
from popdist.gradients.partial_gradients import PartialGradient, gather_parts
from popdist.gradients.shards import deal_elements
from popdist.ground.local_tensors import is_distributed, local_gradient, local_part
from popdist.job import context


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of the whole model to a norm of at most ``max_norm``. All instances must call this.

    Like ``torch.nn.utils.clip_grad_norm_`` in one process. Each instance passes the parameters that it has: if
    instances share a replica, the parameters of all stages and shards count. Each part of a DTensor counts once; a
    plain parameter counts as equal on all instances of its stage. If each instance has whole replicas, it computes
    only the norms of some of the parameters, and on the CPU the norm is bitwise equal to torch's.

    Args:
        parameters: Parameters whose ``.grad`` is the gradient over all replicas: after the loop over micro
            batches, or from ``fully_shard``.
        max_norm: The maximum norm of all gradients together.
        norm_type: The exponent of the norm; ``inf`` for the largest absolute value. Must be greater than 0 if
            instances share a replica or parameters.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinity, and leave the gradients unchanged.

    Returns:
        The norm before scaling, equal on all instances.

    Raises:
        GradientError: If ``max_norm`` or ``norm_type`` is invalid.
        RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is True.
        CollectiveError, BackendError: If the instances make other calls, or an instance was lost.
        NotInitializedError: Before ``popdist.init()``.
    """
    all_parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if math.isnan(as_float(value)):
            raise GradientError(f"clip_grad_norm_({name}={value!r}): expected a number")
    context.ensure_init()
    return _clip(all_parameters, float(max_norm), float(norm_type), must_be_finite=error_if_nonfinite)


@torch.no_grad()
def _clip(all_parameters: Sequence[Tensor], max_norm: float, norm_type: float, *, must_be_finite: bool) -> Tensor:
    parameters = [parameter for parameter in all_parameters if parameter.grad is not None]
    text = f"clip_grad_norm_({max_norm}, {norm_type})"
    if context.environment().contract.parallelism.is_shared or any(map(is_distributed, parameters)):
        total = _norm_of_parts(text, parameters, norm_type)
    else:
        group = context.data_parallel_group()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = _norms(group, f"{text} of {len(gradients)} gradients", gradients, norm_type)
        if not norms:
            return torch.tensor(0.0, dtype=torch.float32, device="cpu")
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if must_be_finite and not total.isfinite():
        raise RuntimeError(f"{text}: the norm is {total.item()}, and error_if_nonfinite=True")  # as torch does
    if any(map(is_distributed, parameters)):
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in parameters:
            part = local_part(parameter.grad)
            part.mul_(coefficient.to(part.device))
    else:
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norms(group: Group, text: str, gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return each gradient's norm, in the gradient's dtype; one instance computes a norm and sends it to all."""
    cut = [gradient for gradient in gradients if isinstance(gradient, PartialGradient) and gradient.is_cut]
    with group.undivided(text):
        group.agree(text)
        if not gradients:
            return []
        gather_parts(group, cut)
        return _gathered_norms(group, gradients, norm_type)  # bitwise equal to torch's norms


def _gathered_norms(group: Group, gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    device, own = gradients[0].device, group.backend.instance_index
    sizes = [gradient.numel() for gradient in gradients]
    shares = deal_elements(sizes, len(group.instances), may_cut=[False] * len(sizes))
    owner_of = [
        gradient.holder if isinstance(gradient, PartialGradient) else _owner([share[i] for share in shares])
        for i, gradient in enumerate(gradients)
    ]
    own_places = [index for index, owner in enumerate(owner_of) if owner == own]
    wholes = [it.content if isinstance(it, PartialGradient) else it for it in (gradients[i] for i in own_places)]
    own_norms = torch.zeros(len(gradients), dtype=torch.float64, device="cpu")
    own_norms[own_places] = _norms_on_host(wholes, norm_type)
    norms_of_instances = group.backend.all_gather(own_norms)[owner_of, range(len(gradients))]
    if len({gradient.dtype for gradient in gradients}) == 1:
        return [*norms_of_instances.to(device, gradients[0].dtype.to_real())]
    moved = norms_of_instances.to(device)
    return [norm.to(gradient.dtype.to_real()) for norm, gradient in zip(moved, gradients, strict=True)]


def _norms_on_host(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each tensor in one CPU tensor; the CPU waits for an accelerator only once."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    norms = [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
    device = norms[0].device
    return torch.stack([norm.to(device, torch.float64) for norm in norms]).cpu()


def _owner(ranges: list[range]) -> int:
    return next((owner for owner, run in enumerate(ranges) if run), 0)


def _norm_of_parts(text: str, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients together, for instances that share a replica or have DTensors."""
    if norm_type <= 0:
        raise GradientError(f"{text}: norm_type must be greater than 0 where several instances share a model")
    replica = context.instances_of_replica()
    within = list[Tensor]()  # gradients of this replica, equal on the other replicas
    norms_across = list[float]()
    parameter: Any
    for parameter in parameters:
        gradient: Any = local_gradient(parameter)
        instances = _holders(text, parameter)
        if _is_counted(parameter, instances):
            if all(instance in replica for instance in instances):
                within.append(gradient)
            else:
                norms_across.append(float(torch.linalg.vector_norm(gradient, norm_type, dtype=_wide(gradient))))
    norms = _norms(context.data_parallel_group(), f"{text} of {len(within)} gradients", within, norm_type)
    own = [_joined(torch.stack(norms).tolist() if norms else [], norm_type), _joined(norms_across, norm_type)]
    group = context.current_group()
    words = group.start(f"{text} of all instances", as_words(own)).wait()
    norms_of_instances = dict(zip(group.instances, map(as_floats, words), strict=True))
    parts = [norms_of_instances[instance][0] for instance in replica]
    parts += [across for _, across in norms_of_instances.values()]
    first = parameters[0].grad if parameters else None
    dtype = torch.float32 if first is None else first.dtype.to_real()
    device = "cpu" if first is None else local_part(first).device
    return torch.tensor(_joined(parts, norm_type), dtype=dtype, device=device)


def _holders(text: str, parameter: Any) -> list[int]:
    """Return the instances that hold parts of a DTensor ``parameter``; only this instance for other tensors."""
    contract = context.environment().contract
    if is_distributed(parameter):
        ranks: list[int] = parameter.device_mesh.mesh.flatten().tolist()
        return ranks
    if not contract.parallelism.has_mesh:
        raise GradientError(
            f"{text}: a parameter of shape {tuple(parameter.shape)} is no DTensor, and under "
            "--instances-per-replica nobody knows whether the instances of a replica have copies of it, which "
            "count once: start the job with --parallelism in its place, or make it a DTensor"
        )
    return [contract.instance_index]


def _is_counted(parameter: Any, instances: Sequence[int]) -> bool:
    """Whether this instance adds its part of ``parameter`` to the norm; of equal parts only the first is added."""
    contract = context.environment().contract
    shards = {contract.parallelism.part_of(instance).shard for instance in instances}
    if len(shards) == 1 and contract.replica_part.shard:
        return False  # the first shard of the stage has the same parameter
    if not is_distributed(parameter):
        return True
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate(), strict=True)
    return all(not placement.is_replicate() or not place for placement, place in places)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _joined(norms: Iterable[float], norm_type: float) -> float:
    """Return the norm of several tensors together, computed from ``norms``, the norm of each tensor."""
    found = torch.tensor([0.0, *norms], dtype=torch.float64, device="cpu")
    return float(torch.linalg.vector_norm(found, norm_type))
