"""Waiting for what others hold, without keeping them from their work: a look at a counter, and at one lock."""

import sqlite3
import time
from typing import Final

from poprun.pool.database import opened, predecessors, read_lease, read_state
from poprun.pool.pool import Pool, Ticket
from poprun.pool.requests import Wish

_LOOK_SECONDS: Final = 0.02
"""How often the first in the queue looks; others more rarely the further behind they are."""
_RAREST_SECONDS: Final = 1.0
_PATIENT_SECONDS: Final = 60.0
"""Whoever has waited for so long looks ten times more rarely."""


def wait_for_turn(pool: Pool, ticket: Ticket, wish: Wish, timeout_seconds: float) -> None:
    """Return when it is worth while to try again, or after ``timeout_seconds``.

    That is when nobody who asked before waits for the same any more, and what is wished for is free, also because
    a job has ended that could not give it back.

    Args:
        pool: The pool.
        ticket: This process's place in the queue.
        wish: What it waits for.
        timeout_seconds: How long to wait at most.
    """
    began = time.monotonic()
    with opened(pool.file, pool.busy_seconds) as connection:
        while (waited := time.monotonic() - began) < timeout_seconds:
            before = _living_predecessors(pool, connection, ticket, wish.queue)
            if not before:
                state = read_state(connection)
                ended = [lease.id for lease in state.leases if not pool.lives(lease)]
                if wish.can_be_met(state.without(ended)):
                    return
            time.sleep(min(_pause(before, waited), timeout_seconds - waited))


def _living_predecessors(pool: Pool, connection: sqlite3.Connection, ticket: Ticket, queue: str) -> int:
    """How many leases stand before that of this process, up to the nearest one whose process lives."""
    numbers = predecessors(connection, ticket.id, queue)
    while numbers:
        lease = read_lease(connection, numbers[-1])
        if lease is not None and pool.lives(lease):
            break
        numbers.pop()
    return len(numbers)


def _pause(num_before: int, waited_seconds: float) -> float:
    seconds = _LOOK_SECONDS * (1 + num_before) * (10 if waited_seconds > _PATIENT_SECONDS else 1)
    return min(seconds, _RAREST_SECONDS)
