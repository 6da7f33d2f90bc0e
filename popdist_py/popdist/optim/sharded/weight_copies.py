"""The copies of a sharded optimizer's parameters on each host, and the exchange that updates all copies.

Instances that share the memory of a host have one common copy; other instances have one copy each. An instance
sends its updated elements to the instances with the same index on the other hosts, which write the elements into
the copies there. The instances of a host wait for each other before and after, so that no instance reads a copy
during the update.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from popdist.errors import BackendError
from popdist.exchange.groups import Backend, Group, host_group_of
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.host_memory.segments import SharedBlock
from popdist.gradients.shards import ShardExchange, flat_view, group_by_kind
from popdist.optim.sharded.parameters import Named, ShardedParameter
from popdist.step.checks.optimizer_checks import reserve


class WeightCopies:
    """The copies of a sharded optimizer's parameters: one per host in shared memory, or else one per instance."""

    def __init__(self) -> None:
        self._shared: set[int] = set()
        self._exchanges: list[ShardExchange] | None = None

    def share(self, group: Group, named: Sequence[Named], owner: object) -> None:
        """Move the parameters ``named`` into memory that all instances of a host share."""
        host = host_group_of(group.backend)
        if host is not None:
            shared = share_weights(group, host, named)
            reserve(shared, owner)
            self._shared |= set(map(id, shared))
        self._exchanges = None

    def update(self, group: Group, sharded: Sequence[ShardedParameter]) -> None:
        """Exchange the updated elements between instances, so that each copy of the weights gets all of them."""
        if self._exchanges is None:
            inside = [parameter for parameter in sharded if id(parameter.whole) in self._shared]
            apart = [parameter for parameter in sharded if id(parameter.whole) not in self._shared]
            self._exchanges = [*_exchanges(apart, group.backend), *_exchanges(inside, _peers(group.backend))]
        for exchange in self._exchanges:
            exchange.run()


def _exchanges(sharded: Sequence[ShardedParameter], backend: Backend) -> list[ShardExchange]:
    if len(backend.instances) == 1:
        return []
    return [ShardExchange(tensors, backend) for tensors in group_by_kind(sharded)]


def _peers(backend: Backend) -> Backend:
    """Return the group of instances, one per host, that have the same index on their hosts as this instance."""
    host = host_group_of(backend)
    if host is None:
        return backend
    return backend.subgroup(backend.instances[host.rank :: host.size])


_LINE_BYTES: Final = 64


@torch.no_grad()
def share_weights(group: Group, host: HostGroup, named: Iterable[Named]) -> list[Parameter]:
    """Move parameters into shared memory, one copy per host, with the values of the host's first instance."""
    flats = [
        (parameter, flat_view(parameter.detach(), name))
        for name, parameter in named
        if parameter.device.type == "cpu" and parameter.numel()
    ]
    if not flats:
        return []
    sizes = [-(-flat.nbytes // _LINE_BYTES) * _LINE_BYTES for _, flat in flats]
    block = _room_on_all_hosts(group, host, sum(sizes))
    if block is None:
        return []
    if host.rank:
        block.release()
    storage = StorageWeakRef(block.rows[0].untyped_storage())
    _copies.setdefault(host, []).append(_Copy(storage=storage, release=block.release))
    places = block.rows[0].split(sizes)
    views = [place[: flat.nbytes].view(flat.dtype) for place, (_, flat) in zip(places, flats, strict=True)]
    if host.rank == 0:
        for view, (_, flat) in zip(views, flats, strict=True):
            view.copy_(flat)
    host.barrier()
    for view, (parameter, _) in zip(views, flats, strict=True):
        parameter.data = view.as_strided(parameter.shape, parameter.stride())
    return [parameter for parameter, _ in flats]


def _room_on_all_hosts(group: Group, host: HostGroup, num_bytes: int) -> SharedBlock | None:
    """Allocate shared memory for a copy on this host; return None on all instances if one host lacks memory."""
    _release_unused(group, host)
    block = None
    try:
        block = host.allocate(num_bytes)
    except BackendError:
        host.barriers.raise_failure()
    has_room = group.start(f"ShardedOptimizer, one copy of {num_bytes} bytes on each host", [block is not None])
    if all(is_allocated for (is_allocated,) in has_room.wait()):
        return block
    if block is not None:
        block.release()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """The shared memory of a copy of weights, and the function that releases this instance's part of it."""

    storage: StorageWeakRef
    release: Callable[[], None]


_copies: Final[weakref.WeakKeyDictionary[HostGroup, list[_Copy]]] = weakref.WeakKeyDictionary()
"""The copies of weights of each host group, in the same order on all instances of the group."""

_MOST_LOOKED_AT: Final = 48
"""Maximum number of copies in one exchange, because each copy is one bit of a 64-bit number."""


def _release_unused(group: Group, host: HostGroup) -> None:
    """Release the weight copies of earlier optimizers that no instance of the host reads any more."""
    copies = _copies.get(host, [])
    unused = sum(1 << i for i, weights in enumerate(copies[:_MOST_LOOKED_AT]) if weights.storage.expired())
    masks = group.start("ShardedOptimizer, which copies before are unused", [unused]).wait()
    first = group.instances.index(group.backend.instance_index) - host.rank
    for (other,) in masks[first : first + host.size]:
        unused &= other
    for i in reversed(range(min(len(copies), _MOST_LOOKED_AT))):
        if unused >> i & 1:
            copies.pop(i).release()
