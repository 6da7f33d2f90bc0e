"""Clipping gradients by their norm, with the work shared by the instances."""

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grads_with_norm_

from popdist.gradients.partial_gradients import PartialGradient, gather_parts
from popdist.gradients.shards import deal_elements
from popdist.groups import Group


@torch.no_grad()
def clip_grad_norm(
    group: Group, module: Module, max_norm: float, norm_type: float, *, must_be_finite: bool
) -> Tensor:
    """Scale gradients down to ``max_norm``: see ``ReplicatedModel.clip_grad_norm_``.

    Each instance takes the norms of some of the gradients. They are of whole parameters, so that the norm of the
    norms has the bits of torch's for any number of instances. Where gradients are in parts, an instance takes
    those of the parameters that it has most of; only what several have a part of must be sent first.
    """
    parameters = [it for it in module.parameters() if it.grad is not None]
    gradients = [it.grad for it in parameters if it.grad is not None]
    text = f"clip_grad_norm_({max_norm}, {norm_type}) of {len(gradients)} gradients"
    group.agree(text)
    if not gradients:
        return torch.tensor(0.0)
    gather_parts(group, [it for it in gradients if isinstance(it, PartialGradient) and it.is_cut])
    norms = _norms(group, gradients, norm_type)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if must_be_finite and not total.isfinite():
        raise RuntimeError(f"{text}: the norm is {total.item()}, and error_if_nonfinite=True")  # torch raises this
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norms(group: Group, gradients: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each gradient, in its dtype, on the device of the first."""
    device, own = gradients[0].device, group.backend.instance_index
    sizes = [it.numel() for it in gradients]
    shares = deal_elements(sizes, len(group.instances), may_cut=[False] * len(sizes))
    owner_of = [
        it.holder if isinstance(it, PartialGradient) else _owner([share[i] for share in shares])
        for i, it in enumerate(gradients)
    ]
    found = torch.zeros(len(gradients), dtype=torch.float64)
    for index, (gradient, owner) in enumerate(zip(gradients, owner_of, strict=True)):
        if owner == own:
            whole = gradient.content if isinstance(gradient, PartialGradient) else gradient
            found[index] = torch.linalg.vector_norm(whole, norm_type)
    everybody = group.backend.all_gather(found)
    return [
        everybody[owner, index].to(device, gradient.dtype.to_real())
        for index, (gradient, owner) in enumerate(zip(gradients, owner_of, strict=True))
    ]


def _owner(ranges: list[range]) -> int:
    return next((owner for owner, it in enumerate(ranges) if it), 0)
