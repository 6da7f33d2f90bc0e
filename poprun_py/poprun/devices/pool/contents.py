"""What stands in an open pool folder: the leases of jobs that live, and partitions, each in a file of its user's.

Users write their own files only. So nobody can change or end another user's lease: what stands in the pool is what
each user says of his own jobs, and who claims too much keeps others waiting.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from poprun.devices.pool.folder import PoolFolder
from poprun.devices.pool.holders import lives
from poprun.devices.pool.pool_rows import (
    MAX_NUMBER,
    StoredLease,
    StoredPartition,
    lease_row,
    partition_row,
    read_lease_row,
    read_partition_row,
)
from poprun.devices.pool.records import Lease, PoolState
from poprun.errors import PlanError

_LEASE: Final = "lease"
_LOCK: Final = "lock"
_PARTITION: Final = "partition"

Stored = TypeVar("Stored", StoredLease, StoredPartition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that stands in the pool at one moment.

    Attributes:
        leases: Those that last, who asked first first.
        ended: Those whose job has ended.
        partitions: Partitions, those of this user before those of others that have the same name.
    """

    leases: tuple[StoredLease, ...]
    ended: tuple[StoredLease, ...]
    partitions: tuple[StoredPartition, ...]

    @property
    def state(self) -> PoolState:
        """The same for those to whom files mean nothing."""
        leases = tuple(stored.lease for stored in self.leases)
        holder_of = {lease.queue: lease.id for lease in leases if lease.ipus}
        return PoolState(
            leases=leases,
            partitions=tuple(
                replace(stored.partition, lease=holder_of.get(stored.partition.name)) for stored in self.partitions
            ),
        )

    @property
    def next_number(self) -> int:
        """The number of a lease that is asked for now."""
        return min(MAX_NUMBER, 1 + max((stored.lease.id for stored in self.leases), default=0))

    def partition(self, name: str) -> StoredPartition | None:
        """The partition of that name, or None."""
        return next((stored for stored in self.partitions if stored.partition.name == name), None)


def read_contents(folder: PoolFolder) -> Contents:
    """All that stands in the pool now; what cannot be read is a PoolError, unless its job has ended."""
    leases: list[StoredLease] = []
    ended: list[StoredLease] = []
    partitions: list[StoredPartition] = []
    for kind, key in folder.keys(_LEASE, _PARTITION):
        if kind == _PARTITION:
            partition = _read(folder, kind, key, read_partition_row)
            partitions += [] if partition is None else [partition]
            continue
        lease = _read(folder, kind, key, read_lease_row)
        if lease is not None:
            lasts = lives(lease.lease.holder, partial(folder.is_locked, _LOCK, lease.key, lease.uid))
            (leases if lasts else ended).append(lease)
    leases.sort(key=lambda stored: (stored.lease.id, stored.key))
    keys = {stored.key for stored in leases}
    partitions.sort(key=lambda stored: (stored.partition.name, stored.uid != os.geteuid(), stored.uid, stored.key))
    return Contents(
        leases=tuple(leases),
        ended=tuple(ended),
        partitions=tuple(
            stored for stored in partitions if not stored.partition.is_temporary or stored.key in keys
        ),
    )


def _read(folder: PoolFolder, kind: str, key: str, read: Callable[..., Stored]) -> Stored | None:
    """The row in a file; None where there is none any more, or it was lost when the machine crashed."""
    file = folder.read(kind, key)
    if file is None or not file.data.strip(b"\0"):
        return None
    try:
        return read(file.data, key=key, uid=file.uid)
    except (ValueError, PlanError) as error:
        raise folder.damage(kind, key, file.uid, str(error)) from None


def write_lease(folder: PoolFolder, key: str, lease: Lease) -> None:
    """Write a lease of this user's.

    Raises:
        PlanError: If others could not read it, because a name is too long for example.
    """
    row = lease_row(lease)
    _check(row, read_lease_row)
    folder.write(_LEASE, key, row)


def write_partition(folder: PoolFolder, stored: StoredPartition) -> None:
    """Write a partition.

    Raises:
        PlanError: If others could not read it.
    """
    row, is_lasting = partition_row(stored.partition), not stored.partition.is_temporary
    _check(row, read_partition_row)
    folder.write(_PARTITION, stored.key, row, uid=stored.uid, is_lasting=is_lasting)


def _check(row: bytes, read: Callable[..., object]) -> None:
    try:
        read(row, key="", uid=os.geteuid())
    except (ValueError, PlanError) as error:
        raise PlanError(f"this cannot stand in a pool: {error}") from None


def remove_partition(folder: PoolFolder, stored: StoredPartition) -> None:
    """Remove a partition of this user's."""
    folder.remove(_PARTITION, stored.key)


def make_lock(folder: PoolFolder, key: str) -> int:
    """Make the file that the job with a new lease keeps locked; its descriptor, which is the lease."""
    return folder.make_lock(_LOCK, key)


def end_lease(folder: PoolFolder, key: str) -> None:
    """Give back what a lease of this user's holds, and a temporary partition with it."""
    for kind in (_LEASE, _PARTITION, _LOCK):
        folder.remove(kind, key)


def clear(folder: PoolFolder, contents: Contents) -> None:
    """Remove what ended jobs of this user have left; nobody else writes meanwhile."""
    leases = [stored.key for stored in contents.leases]
    partitions = [stored.key for stored in contents.partitions]
    folder.remove_own({_LEASE: leases, _LOCK: leases, _PARTITION: partitions})
