"""From a place in the pool's queue to what it waits for: at once, later, or an error that says who has it."""

import os
from collections.abc import Callable
from typing import Protocol

from poprun.errors import IpusTakenError
from poprun.plan.inventory import Cluster
from poprun.plan.plan import LaunchPlan
from poprun.pool.holders import is_served
from poprun.pool.place import DEFAULT_POOL
from poprun.pool.pool import Pool, Ticket
from poprun.pool.records import PoolState
from poprun.pool.requests import Wish, refusal
from poprun.pool.turn import wait_for_turn
from poprun.text import screen

_ATTEMPT_SECONDS = 1.0
_OCCUPANTS_SECONDS = 5.0
"""How often to ask the driver whether a process outside the pool still holds memory."""


class Asker(Protocol):
    """What a job wishes for, and of what."""

    plan: LaunchPlan
    cluster: Cluster

    @property
    def waits_for_others(self) -> bool:
        """Whether processes outside the pool may have to end first."""

    def wish(self, *, looks_again: bool = False) -> Wish:
        """The wish, as the machine is at the moment."""


def pool_of(plan: LaunchPlan) -> Pool:
    """The pool that a job asks."""
    return Pool(pool_file(plan.vipu.pool), plan.vipu.server_timeout_seconds)


def pool_file(pool: str | None) -> str:
    """Absolute path of the pool; None is that of the machine."""
    return os.path.abspath(pool or DEFAULT_POOL)


def wait_for(pool: Pool, ticket: Ticket, asker: Asker, tell: Callable[[str], None] = screen.tell) -> Ticket:
    """See a ticket to what its asker wishes for; ``tell`` is called when that means waiting.

    Raises:
        IpusTakenError: If the job does not wait, or not that often.
    """
    vipu = asker.plan.vipu
    attempts_left = vipu.partition_attempts - 1 if vipu.partition else 0
    is_told = False
    while not ticket.ipus:
        wish = asker.wish()
        gives_up = not vipu.waits_for_devices and not attempts_left
        if gives_up or not is_told:
            state = pool.state()
            shares = vipu.shares_devices
            words = refusal(wish, asker.cluster, state, own=ticket.id, shares=shares, advises=gives_up)
            words += _of_missing_server(pool, state)
            if gives_up:
                raise IpusTakenError(words)
            tell(f"waiting: {words}")
        is_told = True
        if vipu.waits_for_devices:
            wait_for_turn(pool, ticket, wish, _OCCUPANTS_SECONDS if asker.waits_for_others else float("inf"))
        else:
            attempts_left -= 1
            wait_for_turn(pool, ticket, wish, _ATTEMPT_SECONDS)
        ticket = pool.try_again(ticket, asker.wish(looks_again=True))
    return ticket


def _of_missing_server(pool: Pool, state: PoolState) -> str:
    """A line for who waits for jobs of other hosts, of which nobody knows whether they still run."""
    if all(lease.holder.key is None for lease in state.leases) or is_served(pool.file):
        return ""
    return (
        "\n  no server hands out this pool now, and without one the leases of other hosts (user@host) last: "
        "vipu serve ends those of jobs that have ended"
    )
