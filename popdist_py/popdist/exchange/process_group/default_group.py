"""The default group of torch.distributed, for programs that ask torch for their rank and call its collectives.

Without a default group, such code treats each instance as the main instance. The group made here has the backend
``popdist`` and finds the other ranks in popdist's store. A group that the program has made is not changed.
"""

from datetime import timedelta
from itertools import count
from typing import Final

from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch exports it all the same
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.exchange.process_group.registration import NAME, register

NONE: Final = (0, 0)
"""The value of :func:`place_in_default_group` if torch has no default process group."""


_numbers: Final = count()
"""The counter that numbers the default groups made here; the numbers are equal on all instances."""


def place_in_default_group() -> tuple[int, int]:
    """Return this process's (rank + 1, size) in torch's default group; ``NONE``, (0, 0), without a group."""
    if not dist.is_available() or not dist.is_initialized():
        return NONE
    return dist.get_rank() + 1, dist.get_world_size()


def disagreement(places: list[tuple[int, int]]) -> str | None:
    """Return an error message if the instances are not the ranks of one default process group; None if they are.

    Each of ``places`` is an instance's (rank + 1, size) in its default process group, or `NONE` without a group.
    """
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
    """The default process group of torch that popdist makes; with one instance it has no ``store`` of keys."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout_seconds: float) -> None:
        register()
        number = next(_numbers)  # because the store still has the keys of a group that the program has destroyed
        dist.init_process_group(
            NAME,
            store=HashStore() if store is None else PrefixStore(f"default/{number}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self._group = dist.group.WORLD

    def destroy(self) -> None:
        """Destroy torch's default group and its subgroups, unless the program has destroyed the default group."""
        if self._group is not None and dist.group.WORLD is self._group:
            dist.destroy_process_group()
        self._group = None
