"""What a job wants of the pool. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from poprun.errors import PartitionError
from poprun.plan.inventory import VirtualIpu
from poprun.pool.records import Partition, PoolState


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionWish:
    """The partition that a job wants to run in.

    Attributes:
        name: Its name.
        fitting: The sizes that fit the job, the one that a new partition gets first.
        cluster: The cluster that a new one is made in.
        allocation: The part of the cluster that its IPUs are taken from; empty for all of it.
        is_temporary: Whether one that is made ends with the job.
        may_change: Whether one of another size may be changed.
        resets: Whether its IPUs are chosen anew: True always, None when some are not there any more, False never.
        is_known: Whether there is an IPU of that name.
    """

    name: str
    fitting: range
    cluster: str
    allocation: str = ""
    is_temporary: bool = True
    may_change: bool = False
    resets: bool | None = None
    is_known: Callable[[str], bool] = bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """IPUs that a job wants: so many that are in no partition, or a partition.

    Attributes:
        num_ipus: How many it uses; a partition may have more.
        choose: Picks them, given the names of those that are taken; nothing when they do not suffice. For a
            partition it picks those of a new one.
        partition: The partition that it wants, or None.
        queue_name: Tells what is in no partition and waited for on its own from other things.
    """

    num_ipus: int
    choose: Callable[[Collection[str]], Sequence[VirtualIpu]]
    partition: PartitionWish | None = None
    queue_name: str = ""

    @property
    def queue(self) -> str:
        """Who waits for the same thing waits in the same queue: the name of the partition, or that of the rest."""
        return self.queue_name if self.partition is None else self.partition.name

    def can_be_met(self, state: PoolState) -> bool:
        """Whether what is wanted is free, for somebody at the head of the queue."""
        found = None if self.partition is None else state.partition(self.partition.name)
        if found is not None:
            return found.lease is None
        return bool(self.choose(state.taken))


def must_change(wish: PartitionWish, found: Partition) -> bool:
    """Whether the partition that is there gets other IPUs before the job runs in it.

    Raises:
        PartitionError: If it does not fit, and the job may not change it.
    """
    if not wish.fitting[0] <= found.size <= wish.fitting[-1]:
        if wish.may_change:
            return True
        least, most = wish.fitting[0], wish.fitting[-1]
        fitting = str(least) if least == most else f"{least} to {most}"
        raise PartitionError(
            f"partition {found.name} has {found.size} IPUs, and the job fits one of {fitting}: change the job, "
            "change the partition with --update-partition=yes, or make another with vipu create partition NAME "
            f"--size {least}"
        )
    lost = [name for name in found.ipus if not wish.is_known(name)]
    if lost and wish.resets is False:
        raise PartitionError(
            f"partition {found.name} has lost {', '.join(lost)}, which is not on this machine now: choose its "
            "IPUs anew with --reset-partition=yes"
        )
    return bool(lost) or wish.resets is True
