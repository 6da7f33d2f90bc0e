"""One copy of parameters for all instances of a host, in memory that each of them maps.

Whoever updates a part of them does so for all; the instances meet before and after, so nobody reads meanwhile.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from popdist.errors import BackendError
from popdist.gradients.shards import flat_view
from popdist.groups import Group
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.segments import SharedBlock

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A parameter in shared memory.

    Attributes:
        parameter: It, not kept alive by this.
        address: Where it was put; elsewhere it is no longer shared.
        owner: The optimizer that may step on it, not kept alive by this: when it has gone, none may.
    """

    parameter: weakref.ref[Parameter]
    address: int
    owner: weakref.ref[object]


_shared: dict[int, _Shared] = {}
"""By identity of the parameter."""


@torch.no_grad()
def share_weights(
    group: Group, host: HostGroup, named: Iterable[tuple[str, Parameter]], owner: object
) -> set[int]:
    """Make parameters views of one copy on each host, with the values of its first instance.

    Args:
        group: All instances of the job, which all call this, with the same parameters.
        host: Those of this host.
        named: Parameters that are dense in memory; those that are not on the CPU stay where they are.
        owner: The one optimizer that may step on them from now on.

    Returns:
        Identities of those that are shared, the same parameters on all instances: none where a host is short of
        memory.

    Raises:
        BackendError, CollectiveError: If an instance was lost, or does something else.
    """
    flats = [(it, flat_view(it.detach(), name)) for name, it in named if it.device.type == "cpu" and it.numel()]
    if not flats:
        return set()
    sizes = [-(-flat.nbytes // _LINE_BYTES) * _LINE_BYTES for _, flat in flats]
    block = _room_on_all_hosts(group, host, sum(sizes))
    if block is None:
        return set()
    if host.rank:
        block.release()
    _retire_later(host, block)
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


def _room_on_all_hosts(group: Group, host: HostGroup, num_bytes: int) -> SharedBlock | None:
    """Memory of this host; None on all instances of the job if one host has none."""
    _release_unused(group, host)
    block = None
    try:
        block = host.allocate(num_bytes)
    except BackendError:
        host.flags.raise_failure()
    has_room = group.start(f"ShardedOptimizer, one copy of {num_bytes} bytes on each host", [block is not None])
    if all(said for (said,) in has_room.wait()):
        return block
    if block is not None:
        block.release()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """Memory of weights.

    Attributes:
        storage: Tells whether anything in this process still reads it.
        release: Gives this instance's part of it back.
    """

    storage: StorageWeakRef
    release: Callable[[], None]


_copies: weakref.WeakKeyDictionary[HostGroup, list[_Copy]] = weakref.WeakKeyDictionary()
"""Those of each group, in the same order on all its instances."""

_MOST_LOOKED_AT = 48
"""How many of them fit a number."""


def _retire_later(host: HostGroup, block: SharedBlock) -> None:
    storage = StorageWeakRef(block.of(0).untyped_storage())
    _copies.setdefault(host, []).append(_Copy(storage=storage, release=block.releaser))


def _release_unused(group: Group, host: HostGroup) -> None:
    """Give back the copies of optimizers before this one that no instance of the host reads any more."""
    copies = _copies.get(host, [])
    unused = sum(1 << i for i, it in enumerate(copies[:_MOST_LOOKED_AT]) if it.storage.expired())
    told = group.start("ShardedOptimizer, which copies before are unused", [unused]).wait()
    first = group.instances.index(group.backend.instance_index) - host.rank
    for (other,) in told[first : first + host.size]:
        unused &= other
    for i in reversed(range(min(len(copies), _MOST_LOOKED_AT))):
        if unused >> i & 1:
            copies.pop(i).release()


def _remember(parameter: Parameter, owner: object) -> None:
    key = id(parameter)
    reference = weakref.ref(parameter, lambda _: _shared.pop(key, None))
    _shared[key] = _Shared(parameter=reference, address=parameter.data_ptr(), owner=weakref.ref(owner))


def has_shared() -> bool:
    """Whether there is any."""
    return bool(_shared)


def is_shared_with_others(parameter: Tensor, owner: object) -> bool:
    """Whether ``parameter`` is one copy for all instances of the host and not one that ``owner`` may step on."""
    known = _shared.get(id(parameter))
    return (
        known is not None
        and known.parameter() is parameter
        and known.address == parameter.data_ptr()
        and known.owner() is not owner
    )
