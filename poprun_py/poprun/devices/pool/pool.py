"""The pool as others use it: each method is one transaction, and waiting for a turn keeps nobody from work."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from poprun.devices.pool.clusters import check_names
from poprun.devices.pool.contents import (
    Contents,
    clear,
    end_lease,
    make_lock,
    read_contents,
    remove_partition,
    write_lease,
    write_partition,
)
from poprun.devices.pool.folder import BUSY_SECONDS, PoolFolder, opened_folder
from poprun.devices.pool.holders import this_process
from poprun.devices.pool.pool_rows import StoredLease, StoredPartition
from poprun.devices.pool.records import Holder, Lease, Partition, PoolState
from poprun.devices.pool.requests import PartitionWish, Wish
from poprun.errors import IpusTakenError, PartitionError, PlanError, PoolError
from poprun.plan.counts import check_count
from poprun.plan.inventory import Cluster, VirtualIpu, size_of_partition
from poprun.process.process_tree import user_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """This process's lease, or its place in the queue for one.

    Attributes:
        id: The number of the lease.
        key: What its files in the pool are called.
        descriptor: The locked file that is the lease: as long as a process has it open, the lease lasts.
        ipus: Names of the IPUs that it holds, in slot order; empty while it waits.
    """

    id: int
    key: str
    descriptor: int
    ipus: tuple[str, ...] = ()


class Pool:
    """The pool in the folder at ``path``, which is made when it is first written to.

    Every method raises :class:`~poprun.errors.PoolError` when it cannot be used.

    Args:
        path: Absolute path.
        busy_seconds: How long to wait for the transactions of others, of milliseconds each.
    """

    def __init__(self, path: str, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self.busy_seconds = busy_seconds

    def state(self) -> PoolState:
        """What stands in the pool now, without the leases of jobs that have ended; nothing where there is none."""
        try:
            with opened_folder(self.path, makes=False) as folder:
                return read_contents(folder).state
        except FileNotFoundError:
            return PoolState()

    def ask(self, words: str, wish: Wish) -> Ticket:
        """Stand at the end of the queue, and take what is wished for if nobody stands before and it is free.

        Args:
            words: What this process runs, for others to read.
            wish: What it wants.

        Raises:
            PartitionError: If the partition that it wants does not fit.
        """
        with self._writing() as (folder, contents):
            key = secrets.token_hex(16)
            lease = _lease(contents, this_process(words), wish)
            descriptor = make_lock(folder, key)
            try:
                stored = StoredLease(key=key, uid=os.geteuid(), lease=lease)
                ipus = _take(folder, contents, stored, wish)
                if not ipus:
                    write_lease(folder, key, lease)
            except BaseException:
                end_lease(folder, key)
                os.close(descriptor)
                raise
        return Ticket(id=lease.id, key=key, descriptor=descriptor, ipus=ipus)

    def try_again(self, ticket: Ticket, wish: Wish) -> Ticket:
        """Take what is wished for if nobody stands before this process by now, and it is free.

        Raises:
            PartitionError: If the partition that it wants does not fit any more.
        """
        with self._writing() as (folder, contents):
            return replace(ticket, ipus=_take(folder, contents, _own(contents, ticket.key), wish))

    def enqueue(self, client: Holder, wish: Wish) -> Lease:
        """Put a client of this server at the end of the queue; its lease, which waits."""
        with self._writing() as (folder, contents):
            lease = _lease(contents, client, wish)
            write_lease(folder, _key_of(lease), lease)
            return lease

    def take(self, lease: Lease, wish: Wish) -> tuple[str, ...]:
        """Give a client's lease that waits what it wishes for if nobody stands before it and it is free.

        Returns:
            Names of the IPUs; none while it waits.

        Raises:
            PartitionError: If the partition that it wants does not fit.
        """
        with self._writing() as (folder, contents):
            return _take(folder, contents, _own(contents, _key_of(lease)), wish)

    def release(self, ticket: Ticket) -> None:
        """Give everything back, and the partition that was made for this lease with it."""
        try:
            self._end(ticket.key)
        finally:
            os.close(ticket.descriptor)

    def end(self, lease: Lease) -> None:
        """Give back what a client of this server holds."""
        self._end(_key_of(lease))

    def create_partition(
        self, name: str, cluster: Cluster, size: int, *, allocation: str | None = None, user: str | None = None
    ) -> Partition:
        """Make a partition of free IPUs of ``cluster``.

        Args:
            name: Its name.
            cluster: The IPUs that there are.
            size: How many of them it gets, a power of two.
            allocation: The part of the cluster to take them from, or None.
            user: Whose it is, of a client of this server; None for the user of this process.

        Raises:
            PlanError: If that is no name, or no number.
            PartitionError: If there is one of that name, or the size is no power of two.
            IpusTakenError: If too few are free.
        """
        check_count("--size", size)
        if not (name and name.isprintable()):
            raise PlanError(f"partition {name!r} is not possible: a name has characters that can be printed")
        if size != (more := size_of_partition(size)):
            raise PartitionError(
                f"--size {size}: the size of a partition is a power of two; nearest: {more // 2} or {more}"
            )
        with self._writing() as (folder, contents):
            state = contents.state
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
            stored = _new_partition(name, cluster.name, allocation or "", user=user)
            return _give_ipus(folder, stored, chosen)

    def remove_partition(self, name: str) -> None:
        """Remove a partition that nobody uses.

        Raises:
            PartitionError: If there is none, or it is another user's.
            IpusTakenError: If a job holds it.
        """
        with self._writing() as (folder, contents):
            _unused(contents.state, name)
            remove_partition(folder, _changeable(contents, name))

    def reset_partition(self, name: str, cluster: Cluster) -> Partition:
        """Choose anew the IPUs of a partition that nobody uses, among those of ``cluster``.

        Raises:
            PartitionError: If there is none, it is another user's, or its allocation has gone.
            IpusTakenError: If a job holds it, or too few others are free; then it keeps its own.
        """
        with self._writing() as (folder, contents):
            state = contents.state
            old = _unused(state, name)
            check_names(cluster, old.allocation or None)
            stored = _changeable(contents, name)
            chosen = cluster.pick(old.size, old.allocation or None)(state.taken - set(old.ipus))
            if not chosen:
                raise IpusTakenError(
                    f"partition {name} keeps its IPUs: there are not as many free ones that belong together"
                )
            return _give_ipus(folder, stored, chosen)

    def _end(self, key: str) -> None:
        """Remove the files of a lease of this user's, whatever else stands in the pool."""
        with suppress(FileNotFoundError), opened_folder(self.path, makes=False) as folder:
            end_lease(folder, key)

    @contextmanager
    def _writing(self) -> Iterator[tuple[PoolFolder, Contents]]:
        """A transaction that may write: the folder, which nobody else changes meanwhile, and what stands in it."""
        with opened_folder(self.path, makes=True) as folder, folder.alone(self.busy_seconds):
            contents = read_contents(folder)
            clear(folder, contents)
            yield folder, contents


def _lease(contents: Contents, holder: Holder, wish: Wish) -> Lease:
    """A lease that waits, behind all others."""
    return Lease(
        id=contents.next_number,
        holder=holder,
        since_epoch_seconds=time.time(),
        num_ipus=wish.num_ipus,
        queue=wish.queue,
    )


def _key_of(lease: Lease) -> str:
    """What the file of a client's lease is called: the client has made that up."""
    return lease.holder.key or ""


def _own(contents: Contents, key: str) -> StoredLease:
    found = next((stored for stored in contents.leases if stored.key == key), None)
    if found is None or found.uid != os.geteuid():
        raise PoolError("this job's place in the queue of the pool has gone: somebody has removed its file")
    return found


def _take(folder: PoolFolder, contents: Contents, stored: StoredLease, wish: Wish) -> tuple[str, ...]:
    """Give a lease what it wants; the names of its IPUs, none when it has to wait."""
    lease, state = stored.lease, contents.state
    if any(other.id < lease.id for other in state.waiting(wish.queue)):
        return ()
    if wish.partition is not None:
        ipus = listed = _take_partition(folder, contents, stored, wish, wish.partition)
    else:
        chosen = wish.choose(state.taken)
        ipus, listed = tuple(ipu.name for ipu in chosen), _in_order(chosen)
    held = {name for other in state.leases for name in other.ipus}
    if not (state.taken if wish.partition is None else held).isdisjoint(ipus):
        raise PoolError(f"pool {folder.path}: {', '.join(ipus)} cannot be held by two jobs")
    if ipus:
        write_lease(folder, stored.key, replace(lease, ipus=listed))
    return ipus


def _take_partition(
    folder: PoolFolder, contents: Contents, lease: StoredLease, wish: Wish, wanted: PartitionWish
) -> tuple[str, ...]:
    state = contents.state
    found = state.partition(wanted.name)
    if found is not None and found.lease is not None:
        return ()
    if found is not None and not wanted.must_change(found, wish.is_known):
        return found.ipus
    chosen = wish.choose(state.taken - set(() if found is None else found.ipus))
    if not chosen:
        return ()
    if found is None:
        stored = _new_partition(wanted.name, wish.cluster, wish.allocation, user=lease.lease.holder.user)
        if wanted.is_temporary:
            stored = replace(stored, key=lease.key, partition=replace(stored.partition, is_temporary=True))
    else:
        stored = _changeable(contents, wanted.name)
    _give_ipus(folder, stored, chosen)
    return tuple(ipu.name for ipu in chosen)


def _new_partition(name: str, cluster: str, allocation: str, *, user: str | None) -> StoredPartition:
    """A partition of this user, or of a client of this server, that has no IPUs yet."""
    partition = Partition(
        name=name,
        ipus=(),
        cluster=cluster,
        allocation=allocation,
        num_domains=0,
        user=user or user_name(os.geteuid()),
        created_at_epoch_seconds=time.time(),
    )
    return StoredPartition(key=secrets.token_hex(16), uid=os.geteuid(), partition=partition)


def _give_ipus(folder: PoolFolder, stored: StoredPartition, ipus: Sequence[VirtualIpu]) -> Partition:
    """Let a partition have these IPUs, and no others any more."""
    num_domains = len({ipu.domain for ipu in ipus})
    partition = replace(stored.partition, ipus=_in_order(ipus), num_domains=num_domains)
    write_partition(folder, replace(stored, partition=partition))
    return partition


def _in_order(ipus: Sequence[VirtualIpu]) -> tuple[str, ...]:
    """Names of IPUs, as they are listed."""
    return tuple(ipu.name for ipu in sorted(ipus, key=lambda ipu: (ipu.index, ipu.name)))


def _changeable(contents: Contents, name: str) -> StoredPartition:
    """The partition of that name, which this user may change: it is his own, or he is root."""
    stored = contents.partition(name)
    if stored is None or os.geteuid() not in (0, stored.uid):
        owner = "" if stored is None else stored.partition.user
        raise PartitionError(
            f"partition {name} belongs to {owner}, who can change or remove it, as root can: ask {owner}, or make "
            "one of another name"
        )
    return stored


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
    with opened_folder(pool.path, makes=True) as folder:
        while (waited := time.monotonic() - began) < timeout_seconds:
            state = read_contents(folder).state
            before = sum(lease.id < ticket.id for lease in state.waiting(wish.queue))
            if not before and wish.can_be_met(state):
                return
            time.sleep(min(_pause(before, waited), timeout_seconds - waited))


def _pause(num_before: int, waited_seconds: float) -> float:
    seconds = _LOOK_SECONDS * (1 + num_before) * (10 if waited_seconds > _PATIENT_SECONDS else 1)
    return min(seconds, _RAREST_SECONDS)
