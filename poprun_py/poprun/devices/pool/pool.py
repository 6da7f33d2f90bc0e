"""The pool of a machine, which records leases on virtual IPUs. Each method is one transaction."""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from poprun.devices.pool.clusters import check_names
from poprun.devices.pool.contents import (
    LOCK,
    PARTITION,
    Contents,
    Stored,
    clear,
    end_lease,
    read_contents,
    write,
)
from poprun.devices.pool.folder import BUSY_SECONDS, PoolFolder, opened_folder
from poprun.devices.pool.records import Holder, Lease, Partition, PoolState
from poprun.devices.pool.requests import PartitionRequest, PoolRequest
from poprun.errors import IpusTakenError, PartitionError, PlanError, PoolError
from poprun.launch.process.process_tree import user_name
from poprun.plan.inventory import CPU, Cluster, VirtualIpu, size_of_partition
from poprun.plan.request import check_count

_NO_IPUS: Final = Cluster(name="none", kind=CPU, ipus=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A lease of this process's job or of a server's client, or its place in the queue."""

    id: int
    key: str  # the key in the names of the lease's files in the pool
    ipus: tuple[str, ...] = ()  # names of the lease's IPUs, in slot order; empty while the job waits
    descriptor: int | None = None  # the lease's file, locked while a process has it open; None for a client


class Pool:
    """A machine's record of leases, in the folder ``path``. Methods raise PoolError if the folder is unusable."""

    def __init__(
        self, path: str, busy_seconds: float = BUSY_SECONDS, cluster: Callable[[], Cluster] = lambda: _NO_IPUS
    ) -> None:
        self.path = path
        self.busy_seconds = busy_seconds
        self.cluster = cluster  # finds the virtual IPUs that partitions are made of

    def state(self) -> PoolState:
        """Return all leases of running jobs and all partitions in the pool; none if its folder does not exist."""
        try:
            with opened_folder(self.path, makes=False) as folder:
                return read_contents(folder).state
        except FileNotFoundError:
            return PoolState()

    def enqueue(self, holder: Holder, request: PoolRequest) -> Ticket:
        """Put a job into the queue for IPUs; grant ``request`` now if no job is before it and IPUs are free."""
        key = holder.client_key or secrets.token_hex(16)
        with self._writing() as (folder, contents):
            lease = Lease(
                id=contents.next_number,
                holder=holder,
                since_epoch_seconds=time.time(),
                num_ipus=request.num_ipus,
                queue=request.queue,
            )
            stored = Stored(key=key, uid=os.geteuid(), row=lease)
            descriptor = None if holder.client_key else folder.make_lock(LOCK, key)
            try:
                ipus = _grant(folder, contents, stored, request)
                if not ipus:
                    write(folder, stored)
            except BaseException:
                _close(descriptor)
                end_lease(folder, key)
                raise
        return Ticket(id=lease.id, key=key, ipus=ipus, descriptor=descriptor)

    def retry(self, ticket: Ticket, request: PoolRequest) -> Ticket:
        """Grant ``request`` if its job is first in the queue and IPUs are free; return the job's new ticket."""
        with self._writing() as (folder, contents):
            own_lease = next((stored for stored in contents.leases if stored.key == ticket.key), None)
            if own_lease is None or own_lease.uid != os.geteuid():
                raise PoolError(
                    "this job's place in the queue of the pool has gone: somebody has removed its file"
                )
            return replace(ticket, ipus=_grant(folder, contents, own_lease, request))

    def release(self, ticket: Ticket) -> None:
        """Release a lease or a place in the queue, and remove a partition that was made only for this lease."""
        # This needs no lock, because it removes only this user's own files.
        try:
            with suppress(FileNotFoundError), opened_folder(self.path, makes=False) as folder:
                end_lease(folder, ticket.key)
        finally:
            _close(ticket.descriptor)

    def create_partition(
        self,
        name: str,
        size: int,
        *,
        allocation: str | None = None,
        cluster: str | None = None,
        user: str | None = None,
    ) -> Partition:
        """Make a partition (a named set) of ``size`` free IPUs for ``user``; None: this process's user.

        Raises PartitionError or PlanError if the request is wrong, IpusTakenError if too few IPUs are free.
        """
        ours = self.cluster()
        check_names(ours, allocation, cluster)
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
            chosen = ours.pick(size, allocation)(state.taken)
            if not chosen:
                raise IpusTakenError(
                    f"no IPU-Link domain has {size} free IPUs that belong together: vipu list ipus shows who has "
                    "them"
                )
            stored = _new_partition(name, ours.name, allocation or "", user=user)
            return _give_ipus(folder, stored, chosen)

    def remove_partition(self, name: str) -> None:
        """Remove the partition (set of IPUs) ``name``. Raises an error if a job uses it or another user has it."""
        with self._writing() as (folder, contents):
            folder.remove(PARTITION, _unused(contents, name).key)

    def reset_partition(self, name: str) -> Partition:
        """Choose new IPUs for an unused partition (set of IPUs). Raises IpusTakenError if too few are free."""
        ours = self.cluster()
        with self._writing() as (folder, contents):
            stored = _unused(contents, name)
            old, allocation = stored.row, stored.row.allocation or None
            check_names(ours, allocation)
            chosen = ours.pick(old.size, allocation)(contents.state.taken - set(old.ipus))
            if not chosen:
                raise IpusTakenError(
                    f"partition {name} keeps its IPUs: there are not as many free ones that belong together"
                )
            return _give_ipus(folder, stored, chosen)

    @contextmanager
    def _writing(self) -> Iterator[tuple[PoolFolder, Contents]]:
        """A context with the locked folder of the pool and its contents, in which the pool can be changed."""
        with opened_folder(self.path, makes=True) as folder, folder.alone(self.busy_seconds):
            contents = read_contents(folder)
            clear(folder, contents)
            yield folder, contents


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _grant(folder: PoolFolder, contents: Contents, stored: Stored[Lease], request: PoolRequest) -> tuple[str, ...]:
    """Grant ``request`` if its lease is first in the queue; return the names of its IPUs, () if it must wait."""
    state, partition = contents.state, request.partition
    if any(other.id < stored.row.id for other in state.waiting(request.queue)):
        return ()
    names, chosen = request.choose_from(state)
    held = state.taken if partition is None else {name for other in state.leases for name in other.ipus}
    if not held.isdisjoint(names):
        raise PoolError(f"pool {folder.path}: {', '.join(names)} cannot be held by two jobs")
    if chosen and partition is not None:
        _give_ipus(folder, _partition_for(contents, stored, request, partition), chosen)
    if names:
        listed = _in_order(chosen) if partition is None else names
        write(folder, replace(stored, row=replace(stored.row, ipus=listed)))
    return names


def _partition_for(
    contents: Contents, lease: Stored[Lease], request: PoolRequest, wanted: PartitionRequest
) -> Stored[Partition]:
    """Return the partition that a job requests, or a new one. Raises PartitionError if it is another user's."""
    if (known := contents.partition(wanted.name)) is not None:
        return _changeable(known)
    new = _new_partition(wanted.name, request.cluster, request.allocation, user=lease.row.holder.user)
    return replace(new, key=lease.key, row=replace(new.row, is_temporary=True)) if wanted.is_temporary else new


def _new_partition(name: str, cluster: str, allocation: str, *, user: str | None) -> Stored[Partition]:
    """Return a new partition of ``user`` (None: this user), to which the caller must still give IPUs."""
    partition = Partition(
        name=name,
        ipus=(),
        cluster=cluster,
        allocation=allocation,
        num_domains=0,
        user=user or user_name(os.geteuid()),
        created_at_epoch_seconds=time.time(),
    )
    return Stored(key=secrets.token_hex(16), uid=os.geteuid(), row=partition)


def _give_ipus(folder: PoolFolder, stored: Stored[Partition], ipus: Sequence[VirtualIpu]) -> Partition:
    """Replace the IPUs of the partition ``stored`` by ``ipus``, write its file, and return the partition."""
    num_domains = len({ipu.domain for ipu in ipus})
    partition = replace(stored.row, ipus=_in_order(ipus), num_domains=num_domains)
    write(folder, replace(stored, row=partition))
    return partition


def _in_order(ipus: Sequence[VirtualIpu]) -> tuple[str, ...]:
    """Return the names of the virtual IPUs ``ipus``, sorted by their indices."""
    return tuple(ipu.name for ipu in sorted(ipus, key=lambda ipu: (ipu.index, ipu.name)))


def _changeable(stored: Stored[Partition]) -> Stored[Partition]:
    """Return the partition ``stored``. Raises PartitionError unless this user owns it or is root."""
    if os.geteuid() not in (0, stored.uid):
        owner, name = stored.row.user, stored.row.name
        raise PartitionError(
            f"partition {name} belongs to {owner}, who can change or remove it, as root can: ask {owner}, or make "
            "one of another name"
        )
    return stored


def _unused(contents: Contents, name: str) -> Stored[Partition]:
    """Return partition ``name``. Raise IpusTakenError if a job uses it, PartitionError if it is another user's."""
    stored = contents.partition(name)
    if stored is None:
        known = ", ".join(other.row.name for other in contents.partitions)
        raise PartitionError(
            f"there is no partition {name}: {f'there is {known}' if known else 'there is none at all'}"
        )
    lease = next((lease.row for lease in contents.leases if lease.row.queue == name and lease.row.ipus), None)
    if lease is not None:
        raise IpusTakenError(f"partition {name} is in use: {lease} holds it")
    return _changeable(stored)


_POLL_SECONDS: Final = 0.02
"""The time between two reads of the pool by the first job in the queue. Jobs further behind read less often."""
_RAREST_SECONDS: Final = 1.0
_PATIENT_SECONDS: Final = 60.0  # after this time a waiting job reads the pool ten times less often


def wait_for_turn(pool: Pool, ticket: Ticket, request: PoolRequest, timeout_seconds: float) -> None:
    """Wait until the job of ``ticket`` is first in the queue and IPUs are free, or ``timeout_seconds`` pass."""
    # The pool is read again and again, because a job that was killed sends no message when its lease ends.
    began = time.monotonic()
    with opened_folder(pool.path, makes=True) as folder:
        while (waited := time.monotonic() - began) < timeout_seconds:
            state = read_contents(folder).state
            before = sum(lease.id < ticket.id for lease in state.waiting(request.queue))
            if not before and request.choose_from(state)[0]:
                return
            time.sleep(min(_pause(before, waited), timeout_seconds - waited))


def _pause(num_before: int, waited_seconds: float) -> float:
    seconds = _POLL_SECONDS * (1 + num_before) * (10 if waited_seconds > _PATIENT_SECONDS else 1)
    return min(seconds, _RAREST_SECONDS)
