"""The pool as others use it: each method is one transaction, and waiting for a turn keeps nobody from work."""

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from poprun.errors import IpusTakenError, PartitionError, PlanError
from poprun.plan.counts import check_count
from poprun.plan.inventory import Cluster, size_of_partition
from poprun.pool.database import (
    BUSY_SECONDS,
    add_lease,
    add_partition,
    checkpoint,
    delete_partition,
    end_leases,
    give_ipus,
    lease_file,
    mode_of,
    opened,
    predecessors,
    read_state,
    taken_names,
    user_of_lease,
)
from poprun.pool.holders import lives, lock_new, this_process
from poprun.pool.records import Holder, Lease, Partition, PoolState
from poprun.pool.requests import PartitionWish, Wish
from poprun.process.tree import user_name

_LOCK_BITS = 0o666
_FOLDER_BITS = 0o777


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """This process's lease, or its place in the queue for one.

    Attributes:
        id: The number of the lease.
        descriptor: The locked file that is the lease: as long as a process has it open, the lease lasts.
        ipus: Names of the IPUs that it holds, in slot order; empty while it waits.
    """

    id: int
    descriptor: int
    ipus: tuple[str, ...] = ()


class Pool:
    """The pool in ``file``, which is made when it is first written to.

    Every method raises :class:`~poprun.errors.PoolError` when the file cannot be used.

    Args:
        file: Absolute path.
        busy_seconds: How long to wait for the transactions of others, of milliseconds each.
    """

    def __init__(self, file: str, busy_seconds: float = BUSY_SECONDS) -> None:
        self.file = file
        self.busy_seconds = busy_seconds

    def state(self) -> PoolState:
        """What stands in the pool now; nothing in one that nobody has made yet."""
        if not os.path.lexists(self.file):
            return PoolState()
        with opened(self.file, self.busy_seconds) as connection:
            connection.execute("BEGIN")
            state = read_state(connection)
            connection.execute("COMMIT")
        return state.without([lease.id for lease in state.leases if not self.lives(lease)])

    def lives(self, lease: Lease) -> bool:
        """Whether the job that has ``lease`` is still there."""
        return lives(lease.holder, lease_file(self.file, lease.id))

    def ask(self, words: str, wish: Wish) -> Ticket:
        """Stand at the end of the queue, and take what is wished for if nobody stands before and it is free.

        Args:
            words: What this process runs, for others to read.
            wish: What it wants.

        Raises:
            PartitionError: If the partition that it wants does not fit.
        """
        with self._writing() as connection:
            number = add_lease(connection, this_process(words), wish.num_ipus, wish.queue)
            descriptor = self._lock(number)
            try:
                ipus = _take(connection, number, wish)
            except BaseException:
                os.close(descriptor)
                raise
        return Ticket(id=number, descriptor=descriptor, ipus=ipus)

    def try_again(self, ticket: Ticket, wish: Wish) -> Ticket:
        """Take what is wished for if nobody stands before this process by now, and it is free.

        Raises:
            PartitionError: If the partition that it wants does not fit any more.
        """
        return replace(ticket, ipus=self.take(ticket.id, wish))

    def enqueue(self, client: Holder, wish: Wish) -> int:
        """Put a client of this server at the end of the queue; the number of its lease."""
        with self._writing() as connection:
            return add_lease(connection, client, wish.num_ipus, wish.queue)

    def take(self, number: int, wish: Wish) -> tuple[str, ...]:
        """Give a lease that waits what it wishes for if nobody stands before it and it is free; names of its IPUs.

        Raises:
            PartitionError: If the partition that it wants does not fit.
        """
        with self._writing() as connection:
            return _take(connection, number, wish)

    def release(self, ticket: Ticket) -> None:
        """Give everything back, and the partition that was made for this lease with it."""
        self.end([ticket.id])
        with suppress(FileNotFoundError):
            os.unlink(lease_file(self.file, ticket.id))
        os.close(ticket.descriptor)

    def end(self, numbers: Sequence[int]) -> None:
        """Give back what leases hold, whoever has them."""
        with self._writing() as connection:
            end_leases(connection, numbers)

    def create_partition(
        self, name: str, cluster: Cluster, size: int, *, allocation: str | None = None, user: str | None = None
    ) -> Partition:
        """Make a partition of free IPUs of ``cluster``.

        Args:
            name: Its name.
            cluster: The IPUs that there are.
            size: How many of them it gets, a power of two.
            allocation: The part of the cluster to take them from, or None.
            user: Whose it is; None for the user of this process.

        Raises:
            PlanError: If that is no name, or no number.
            PartitionError: If there is one of that name, or the size is no power of two.
            IpusTakenError: If too few are free.
        """
        check_count("--size", size)
        if not (name and name.isprintable()):
            raise PlanError(f"partition {name!r} is not possible: it is a name")
        if size != (more := size_of_partition(size)):
            raise PartitionError(
                f"--size {size}: the size of a partition is a power of two; nearest: {more // 2} or {more}"
            )
        with self._writing() as connection:
            state = read_state(connection)
            if state.partition(name) is not None:
                raise PartitionError(
                    f"there is a partition {name} already: remove it first, or choose another name"
                )
            chosen = cluster.pick(size, allocation)(state.taken)
            if not chosen:
                raise IpusTakenError(
                    f"no IPU-Link domain has {size} free IPUs that belong together: vipu list ipus shows who has "
                    "them"
                )
            add_partition(
                connection,
                name=name,
                ipus=chosen,
                cluster=cluster.name,
                allocation=allocation or "",
                user=user or user_name(os.getuid()),
            )
            return _unused(read_state(connection), name)

    def remove_partition(self, name: str) -> None:
        """Remove a partition that nobody uses.

        Raises:
            PartitionError: If there is none.
            IpusTakenError: If a job holds it.
        """
        with self._writing() as connection:
            _unused(read_state(connection), name)
            delete_partition(connection, name)

    def reset_partition(self, name: str, cluster: Cluster) -> Partition:
        """Choose anew the IPUs of a partition that nobody uses, among those of ``cluster``.

        Raises:
            PartitionError: If there is none.
            IpusTakenError: If a job holds it, or too few others are free; then it keeps its own.
        """
        with self._writing() as connection:
            state = read_state(connection)
            old = _unused(state, name)
            chosen = cluster.pick(old.size, old.allocation or None)(state.taken - set(old.ipus))
            if not chosen:
                raise IpusTakenError(
                    f"partition {name} keeps its IPUs: there are not as many free ones that belong together"
                )
            give_ipus(connection, name, chosen)
            return _unused(read_state(connection), name)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that may write, begun by ending the leases of processes that have ended.

        Who has ended is found before the lock is taken: who holds it keeps everybody waiting.
        """
        with opened(self.file, self.busy_seconds) as connection:
            ended = [lease.id for lease in read_state(connection).leases if not self.lives(lease)]
            connection.execute("BEGIN IMMEDIATE")
            try:
                end_leases(connection, ended)
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            checkpoint(connection, self.file)
        for number in ended:
            with suppress(OSError):
                os.unlink(lease_file(self.file, number))

    def _lock(self, number: int) -> int:
        file = lease_file(self.file, number)
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(file))
            os.chmod(os.path.dirname(file), mode_of(self.file, _FOLDER_BITS))
        return lock_new(file, mode_of(self.file, _LOCK_BITS))


def _take(connection: sqlite3.Connection, number: int, wish: Wish) -> tuple[str, ...]:
    """Give the lease ``number`` what it wants; the names of its IPUs, none when it has to wait."""
    if predecessors(connection, number, wish.queue):
        return ()
    if wish.partition is None:
        chosen = wish.choose(taken_names(connection))
        connection.executemany(
            "INSERT INTO ipu (name, position, lease) VALUES (?, ?, ?)",
            [(ipu.name, ipu.index, number) for ipu in chosen],
        )
        return tuple(ipu.name for ipu in chosen)
    return _take_partition(connection, number, wish, wish.partition)


def _take_partition(
    connection: sqlite3.Connection, number: int, wish: Wish, wanted: PartitionWish
) -> tuple[str, ...]:
    state = read_state(connection)
    found = state.partition(wanted.name)
    if found is not None and found.lease is not None:
        return ()
    ipus = () if found is None else found.ipus
    if found is None or wanted.must_change(found, wish.is_known):
        chosen = wish.choose(state.taken - set(ipus))
        if not chosen:
            return ()
        if found is None:
            add_partition(
                connection,
                name=wanted.name,
                ipus=chosen,
                cluster=wish.cluster,
                allocation=wish.allocation,
                user=user_of_lease(connection, number),
                made_for=number if wanted.is_temporary else None,
            )
        else:
            give_ipus(connection, wanted.name, chosen)
        ipus = tuple(ipu.name for ipu in chosen)
    connection.execute("UPDATE ipu SET lease = ? WHERE partition = ?", (number, wanted.name))
    return ipus


def _unused(state: PoolState, name: str) -> Partition:
    """The partition of that name, which no job may hold."""
    partition = state.partition(name)
    if partition is None:
        known = ", ".join(partition.name for partition in state.partitions)
        raise PartitionError(
            f"there is no partition {name}: {f'there is {known}' if known else 'there is none at all'}"
        )
    lease = state.lease(partition.lease)
    if lease is not None:
        raise IpusTakenError(f"partition {name} is in use: {lease} holds it")
    return partition


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
            waiting = predecessors(connection, ticket.id, wish.queue)
            while waiting and not pool.lives(waiting[-1]):
                waiting.pop()
            before = len(waiting)
            if not before:
                state = read_state(connection)
                ended = [lease.id for lease in state.leases if not pool.lives(lease)]
                if wish.can_be_met(state.without(ended)):
                    return
            time.sleep(min(_pause(before, waited), timeout_seconds - waited))


def _pause(num_before: int, waited_seconds: float) -> float:
    seconds = _LOOK_SECONDS * (1 + num_before) * (10 if waited_seconds > _PATIENT_SECONDS else 1)
    return min(seconds, _RAREST_SECONDS)
