"""The leases of a server's clients. A lease ends if its client does not renew it in time.

A pool can find out whether a process of its own machine lives. Only the server can find out whether a client
lives, so only the server ends leases of clients. Without a server these leases stay. A new one renews them once.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from poprun.devices.pool.pool import Pool, Ticket
from poprun.devices.pool.records import Lease, PoolState, fold_names
from poprun.devices.server.server_messages import LeaseAnswer, LeaseRequest
from poprun.errors import LeaseEndedError, PoprunError, ServerLostError


class Renewals:
    """The times at which the clients' leases end, unless the clients renew them."""

    def __init__(
        self, lease_seconds: float, poll_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._polled_at = clock()
        self._ends: dict[str, float] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._ends

    def renew(self, key: str) -> None:
        """Set the end of the lease ``key``, unless it is renewed again, to one lease duration from now."""
        self._ends[key] = self._clock() + self._lease_seconds

    def remove(self, key: str) -> None:
        """Remove the lease ``key``, because it has ended."""
        self._ends.pop(key, None)

    def keep_only(self, keys: Collection[str]) -> None:
        """Remove all leases that are not in ``keys``, because another process has ended them."""
        self._ends = {key: end for key, end in self._ends.items() if key in keys}

    def expired(self) -> list[str]:
        """Return the keys of leases not renewed in time; a time in which the server was paused does not count."""
        now = self._clock()
        gap = now - self._polled_at - self._poll_seconds
        self._polled_at = now
        if gap > self._poll_seconds:  # this process was stopped, so that clients could not renew their leases
            self._ends = {key: end + gap for key, end in self._ends.items()}
        return [key for key, end in self._ends.items() if end <= now]


POLL_SECONDS: Final = 1.0  # how often to look for leases that are not renewed any more
MAX_CLIENTS: Final = 1000  # leases of clients at one time, including waiting clients
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0
_LEAST_TRIES: Final = 4  # a waiting client sends at least so many requests within the duration of its lease


class ClientLeases:
    """The leases of the clients of one server. Threads may call the methods, which run one at a time."""

    def __init__(self, pool: Pool, lease_seconds: float, log: Callable[[str], None]) -> None:
        self._pool = pool
        self.lease_seconds = lease_seconds
        self._log = log
        self._renewals = Renewals(lease_seconds, POLL_SECONDS)
        self._lock = threading.Lock()

    def adopt(self) -> int:
        """Renew the leases that an earlier server granted to clients, one time each; return their number."""
        with self._lock:
            keys = _by_key(self._pool.state())
            for key in keys:
                self._renewals.renew(key)
        return len(keys)

    def request(self, request: LeaseRequest) -> LeaseAnswer:
        """Grant a client's request if no job is before it and IPUs are free, else queue it; return the answer."""
        with self._lock:
            state = self._pool.state()
            leases = _by_key(state)
            lease = leases.get(request.key)
            if lease is None or lease.is_waiting:
                answer = self._enqueue_or_retry(request, lease, state, len(leases))
            else:
                answer = LeaseAnswer(id=lease.id, ipus=lease.ipus, pause_seconds=0.0)
            self._renewals.renew(request.key)
        return answer

    def renew(self, key: str) -> None:
        """Renew the lease ``key`` for its whole duration. Raises LeaseEndedError if there is no such lease."""
        with self._lock:
            if key not in self._renewals:
                raise LeaseEndedError(
                    f"the lease of this job has ended: nothing was heard of it for {self.lease_seconds:g} s, or "
                    "it was given back"
                )
            self._renewals.renew(key)

    def end(self, key: str) -> None:
        """End the lease ``key`` and release its IPUs; do nothing if there is no such lease."""
        with self._lock:
            self._end(key, "given back")

    def end_expired(self) -> None:
        """End leases not renewed in time; no longer await renewals of leases that another process has ended."""
        with self._lock:
            self._renewals.keep_only(_by_key(self._pool.state()).keys())
            for key in self._renewals.expired():
                self._end(key, f"ended: nothing was heard of its job for {self.lease_seconds:g} s")

    def _enqueue_or_retry(
        self, request: LeaseRequest, lease: Lease | None, state: PoolState, num_clients: int
    ) -> LeaseAnswer:
        """Queue a new client, or grant a waiting client's request if possible; return the answer."""
        cluster = self._pool.cluster()
        request.wanted.check(cluster)
        pool_request = request.wanted.of(cluster)
        if lease is None:
            if num_clients >= MAX_CLIENTS:
                raise ServerLostError(f"{MAX_CLIENTS} jobs hold or wait for virtual IPUs: try again later")
            ticket = self._pool.enqueue(request.holder, pool_request)
        else:
            ticket = Ticket(id=lease.id, key=request.key, ipus=lease.ipus)
        num_before = sum(other.id < ticket.id for other in state.waiting(pool_request.queue))
        if not ticket.ipus and not num_before:
            try:
                ticket = self._pool.retry(ticket, pool_request) if pool_request.choose_from(state)[0] else ticket
            except PoprunError:
                self._pool.release(ticket)
                self._renewals.remove(request.key)
                raise
        pause_seconds = 0.0
        if ticket.ipus:
            self._log(f"lease {ticket.id}: {fold_names(ticket.ipus)} for {request.holder}")
        else:
            pause_seconds = min(
                _FIRST_PAUSE_SECONDS * (1 + num_before),
                _LONGEST_PAUSE_SECONDS,
                self.lease_seconds / _LEAST_TRIES,
            )
        return LeaseAnswer(id=ticket.id, ipus=ticket.ipus, pause_seconds=pause_seconds)

    def _end(self, key: str, how: str) -> None:
        lease = _by_key(self._pool.state()).get(key)
        if lease is not None:
            self._pool.release(Ticket(id=lease.id, key=key))
            self._log(f"lease {lease.id}: {how} ({lease.holder})")
        self._renewals.remove(key)


def _by_key(state: PoolState) -> dict[str, Lease]:
    return {lease.holder.client_key: lease for lease in state.leases if lease.holder.client_key is not None}
