"""The copies that a job has of a sharded optimizer's parameters, and how an update reaches all of them.

Instances that share the memory of a host have one copy together, others have one each. An instance sends its
updated pieces to those that have its place on the other hosts, and these write them into the copies there: every
host gets each element once. Without shared memory everybody sends to everybody.
"""

from collections.abc import Sequence

from popdist.comm.backend import Backend
from popdist.gradients.shards import ShardExchange, group_by_kind
from popdist.groups import Group
from popdist.host_memory.host_group import HostGroup
from popdist.sharded.parameters import Named, ShardedParameter
from popdist.training.shared_weights import share_weights


class WeightCopies:
    """Those of one optimizer's parameters."""

    def __init__(self) -> None:
        self._shared: set[int] = set()
        self._pieces: list[ShardExchange] | None = None

    def share(self, group: Group, named: Sequence[Named], owner: object) -> None:
        """Make parameters one copy on each host, where its instances share memory.

        Args:
            group: All instances of the job, which all call this.
            named: The same on all.
            owner: The optimizer, which alone may step on them from now on.

        Raises:
            BackendError, CollectiveError: If an instance was lost, or does something else.
        """
        host = _host_of(group.backend)
        if host is not None:
            self._shared |= share_weights(group, host, named, owner)
        self._pieces = None

    def publish(self, group: Group, sharded: Sequence[ShardedParameter]) -> None:
        """Write what each instance has updated into all copies; does not wait for what others of the host write.

        Args:
            group: All instances of the job, which all call this.
            sharded: All parameters that were given to :meth:`share`.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        if self._pieces is None:
            inside = [it for it in sharded if id(it.whole) in self._shared]
            apart = [it for it in sharded if id(it.whole) not in self._shared]
            self._pieces = [*_pieces(apart, group.backend), *_pieces(inside, _peers(group.backend))]
        for pieces in self._pieces:
            pieces.exchange()


def _pieces(sharded: Sequence[ShardedParameter], backend: Backend) -> list[ShardExchange]:
    if len(backend.instances) == 1:
        return []
    return [ShardExchange(it, backend) for it in group_by_kind(sharded)]


def _host_of(backend: Backend) -> HostGroup | None:
    """The instances that share this one's memory: all of the job, or those of this one of its hosts."""
    return backend.host_group or (backend.neighbours.group if backend.neighbours is not None else None)


def _peers(backend: Backend) -> Backend:
    """One instance of each host: those that have this one's place there."""
    host = _host_of(backend)
    if host is None:
        return backend
    return backend.subgroup(backend.instances[host.rank :: host.size])
