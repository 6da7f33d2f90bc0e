"""The default group of torch.distributed, for code that asks torch where it is and calls collectives of torch's.

Without a default group, such code takes each instance for the main one. The group that is made here has the
backend ``popdist`` and finds the other ranks in popdist's store. One that the program has made is left as it is.
"""

from datetime import timedelta
from itertools import count
from typing import Final

from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch exports it all the same
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.exchange.process_group.registration import NAME, register

NONE: Final = (0, 0)
"""The place of an instance that has no default group."""


_numbers: Final = count()
"""Of the groups that were made here, the same on all instances."""


def place_in_default_group() -> tuple[int, int]:
    """This process in the default group: its rank, counted from 1, and how many there are; else ``NONE``."""
    if not dist.is_available() or not dist.is_initialized():
        return NONE
    return dist.get_rank() + 1, dist.get_world_size()


def disagreement(places: list[tuple[int, int]]) -> str | None:
    """Why the instances, each at its place in its default group, cannot have one together; None if they can."""
    if set(places) == {NONE}:
        return None
    for instance, (number, size) in enumerate(places):
        if (number, size) == NONE:
            return (
                f"instance {instance} has no default group, and others have one: make it on all of them or on none"
            )
        if (number, size) != (instance + 1, len(places)):
            return (
                f"instance {instance} of {len(places)} is rank {number - 1} of {size} in the default group that "
                "the program has made: make it with the instances' numbers, or leave it to popdist"
            )
    return None


class DefaultGroup:
    """The default group that popdist has made; ``store`` is None for an instance alone."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout_seconds: float) -> None:
        register()
        number = next(_numbers)  # keys of one that the program has destroyed are still in the store
        dist.init_process_group(
            NAME,
            store=HashStore() if store is None else PrefixStore(f"default/{number}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self._group = dist.group.WORLD

    def destroy(self) -> None:
        """Destroy it, and the groups that were made of it, unless the program has done so."""
        if self._group is not None and dist.group.WORLD is self._group:
            dist.destroy_process_group()
        self._group = None
