"""Who holds what a job wants, in words. Pure."""

from collections.abc import Iterator
from typing import Final

from poprun.plan.inventory import CORE, Cluster
from poprun.pool.held_lease import fold_names
from poprun.pool.records import PoolState
from poprun.pool.requests import Wish

_MOST_LINES: Final = 12


def refusal(  # noqa: PLR0913 - all that the words tell of
    wish: Wish,
    cluster: Cluster,
    state: PoolState,
    *,
    own: int,
    shares: bool,
    advises: bool = True,
    place: str = "on this machine",
) -> str:
    """Why a job does not get what it wants now.

    Args:
        wish: What it wants.
        cluster: The IPUs of the machine, with the processes that use them.
        state: What stands in the pool.
        own: Number of the job's own place in the queue.
        shares: Whether processes outside the pool do not matter.
        advises: Whether to say what can be done about it.
        place: Where the cluster is.
    """
    if wish.partition is not None and (found := state.partition(wish.partition.name)) is not None:
        reason = f"partition {found.name} is in use"
        lease = state.lease(found.lease)
        lines = [f"{found.name}: {lease}"] if lease is not None else []
    else:
        free = [ipu for ipu in cluster.ipus if ipu.name not in state.taken and (shares or not ipu.occupants)]
        there = f"of {len(cluster.ipus)} {place}"
        noun = "core" if cluster.kind == CORE else "virtual IPU"
        reason = f"the job needs {_count(wish.num_ipus, noun)}, and {_is(len(free))} free {there}"
        lines = list(_holders(cluster, state, shares=shares))
    before = [lease for lease in state.waiting(wish.queue) if lease.id < own]
    lines += [f"waiting before it for {lease.num_ipus}: {lease}" for lease in before]
    shown = lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]
    cure = "queue with --wait-for-devices"
    if not shares and any(ipu.occupants for ipu in cluster.ipus):
        cure += ", or use GPUs together with others with --share-devices"
    return "\n  ".join([f"{reason}; {cure}" if advises else reason, *shown])


def _holders(cluster: Cluster, state: PoolState, *, shares: bool) -> Iterator[str]:
    by_name = {ipu.name: ipu for ipu in cluster.ipus}
    for lease in state.leases:
        held = [str(by_name[name]) for name in lease.ipus if name in by_name]
        if held:
            yield f"{fold_names(held)}: {lease}"
    for partition in state.partitions:
        held = [str(by_name[name]) for name in partition.ipus if name in by_name]
        if partition.lease is None and held:
            yield f"{fold_names(held)}: partition {partition.name} of {partition.user}"
    if not shares:
        for ipu in cluster.ipus:
            if ipu.occupants:
                yield f"{ipu}: memory is held outside the pool by {', '.join(map(str, ipu.occupants))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'}"
