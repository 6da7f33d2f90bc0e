"""Waiting for what others hold, without keeping them from their work: a look at a counter, and at one lock."""

import time
from typing import Final

from poprun.pool.pool import Pool, Ticket
from poprun.pool.records import PoolState
from poprun.pool.rows import read_state
from poprun.pool.schema import opened
from poprun.pool.wishes import Wish

_LOOK_SECONDS: Final = 0.02
_NUM_NEXT: Final = 8
"""How many of those in front look often."""
_BEHIND_SECONDS: Final = 0.1
_PATIENT_SECONDS: Final = 60.0
"""After so long, a look every second is soon enough."""
_PATIENT_LOOK_SECONDS: Final = 1.0


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
        version, state = None, PoolState()
        while (waited := time.monotonic() - began) < timeout_seconds:
            (now,) = connection.execute("PRAGMA data_version").fetchone()
            if now != version:
                version, state = now, read_state(connection)
            before = [lease for lease in state.waiting(wish.queue) if lease.id < ticket.id]
            if not any(map(pool.lives, reversed(before))):
                ended = [lease.id for lease in state.leases if not pool.lives(lease)]
                if wish.can_be_met(state.without(ended)):
                    return
            time.sleep(min(_pause(len(before), waited), timeout_seconds - waited))


def _pause(num_before: int, waited_seconds: float) -> float:
    if waited_seconds > _PATIENT_SECONDS:
        return _PATIENT_LOOK_SECONDS
    return _LOOK_SECONDS if num_before < _NUM_NEXT else _BEHIND_SECONDS
