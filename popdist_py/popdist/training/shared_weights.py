"""One copy of parameters for all instances of a host, in memory that each of them maps.

Whoever updates a part of them does so for all; a meeting before and after keeps the others from reading meanwhile.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.errors import BackendError
from popdist.host_memory.group import HostGroup
from popdist.training.shards import flat_view

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A parameter in shared memory.

    Attributes:
        parameter: It, not kept alive by this.
        address: Where it was put; elsewhere it is no longer shared.
        owner: Identity of the optimizer that may step on it.
    """

    parameter: weakref.ref[Parameter]
    address: int
    owner: int


_shared: dict[int, _Shared] = {}
"""By identity of the parameter."""


@torch.no_grad()
def share_weights(host: HostGroup, named: Iterable[tuple[str, Parameter]], owner: object) -> set[int]:
    """Make parameters views of one copy, with the values of rank 0; all ranks call it, with the same ones.

    Args:
        host: The instances of the host.
        named: Parameters that are dense in memory; those that are not on the CPU stay where they are.
        owner: The one optimizer that may step on them from now on.

    Returns:
        Identities of those that are shared: none where memory is short.

    Raises:
        BackendError, CollectiveError: If a rank was lost, or does something else.
    """
    flats = [(it, flat_view(it.detach(), name)) for name, it in named if it.device.type == "cpu" and it.numel()]
    if not flats:
        return set()
    sizes = [-(-flat.nbytes // _LINE_BYTES) * _LINE_BYTES for _, flat in flats]
    try:
        block = host.allocate(sum(sizes))
    except BackendError:
        return set()
    if host.rank:
        block.release()
    places = block.of(0).split(sizes)
    views = [place[: flat.nbytes].view(flat.dtype) for place, (_, flat) in zip(places, flats, strict=True)]
    if host.rank == 0:
        for view, (_, flat) in zip(views, flats, strict=True):
            view.copy_(flat)
    host.barrier()
    for view, (parameter, _) in zip(views, flats, strict=True):
        parameter.data = view.as_strided(parameter.shape, parameter.stride())
        _remember(parameter, owner)
    return {id(parameter) for parameter, _ in flats}


def _remember(parameter: Parameter, owner: object) -> None:
    key = id(parameter)
    reference = weakref.ref(parameter, lambda _: _shared.pop(key, None))
    _shared[key] = _Shared(parameter=reference, address=parameter.data_ptr(), owner=id(owner))


def has_shared() -> bool:
    """Whether there is any."""
    return bool(_shared)


def is_shared_with_others(parameter: Tensor, owner: object) -> bool:
    """Whether ``parameter`` is one copy for all instances of the host and another optimizer's than ``owner``."""
    known = _shared.get(id(parameter))
    return (
        known is not None
        and known.parameter() is parameter
        and known.address == parameter.data_ptr()
        and known.owner != id(owner)
    )
