"""What stands in an open pool folder: the leases of jobs that live, and partitions, each in a file of its user's.

Users write their own files only. So nobody can change or end another user's lease: what stands in the pool is what
each user says of his own jobs, and who claims too much keeps others waiting. Whose a file is, its owner says and
not what stands in it. A file is JSON, read strictly, because anybody may have written it.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from poprun.devices.pool.folder import PoolFolder
from poprun.devices.pool.holders import lives
from poprun.devices.pool.records import MAX_NUMBER, Lease, Partition, PoolState
from poprun.errors import PlanError
from poprun.process.process_tree import user_name
from poprun.text.fields import read_record, write_record
from poprun.text.input_files import parse_json

_VERSION: Final = 1
_LEASE: Final = "lease"
_LOCK: Final = "lock"
_PARTITION: Final = "partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLease:
    """A lease with its owner, and the key that names its file and its lock file."""

    key: str
    uid: int
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPartition:
    """A partition with its owner and the key that names its file; a temporary one has that of its lease."""

    key: str
    uid: int
    partition: Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that stands in the pool at one moment."""

    leases: tuple[StoredLease, ...]  # those that last; those who asked first come first
    ended: tuple[StoredLease, ...]  # those whose job has ended
    partitions: tuple[StoredPartition, ...]  # of those of one name this user's come first

    @property
    def state(self) -> PoolState:
        """The leases and partitions, without their files."""
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
    """All that stands in the pool now; a file that cannot be read is a PoolError."""
    leases: list[StoredLease] = []
    ended: list[StoredLease] = []
    partitions: list[StoredPartition] = []
    for kind, key in folder.keys(_LEASE, _PARTITION):
        file = folder.read(kind, key)
        if file is None or not file.data.strip(b"\0"):
            continue  # removed meanwhile, or lost when the machine crashed
        try:
            if kind == _PARTITION:
                partition = read_partition(file.data, file.uid)
                partitions.append(StoredPartition(key=key, uid=file.uid, partition=partition))
                continue
            lease = read_lease(file.data, file.uid)
        except (ValueError, PlanError) as error:
            raise folder.damage(kind, key, file.uid, str(error)) from None
        lasts = lives(lease.holder, partial(folder.is_locked, _LOCK, key, file.uid))
        (leases if lasts else ended).append(StoredLease(key=key, uid=file.uid, lease=lease))
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


def read_lease(data: bytes, uid: int) -> Lease:
    """The lease in a file of the user ``uid``; a ValueError or a PlanError if there is none."""
    lease = read_record(Lease, parse_json(data.decode()), "row", noun="a row", version=_VERSION)
    if lease.holder.key is not None:
        return lease
    return replace(lease, holder=replace(lease.holder, user=user_name(uid)))


def read_partition(data: bytes, uid: int) -> Partition:
    """The partition in a file of the user ``uid``; a ValueError or a PlanError if there is none."""
    partition = read_record(Partition, parse_json(data.decode()), "row", noun="a row", version=_VERSION)
    user = partition.user if "@" in partition.user else user_name(uid)
    return replace(partition, user=user, lease=None)


def file_data(row: Lease | Partition) -> bytes:
    """The text of a file; inverse of :func:`read_lease` and :func:`read_partition`."""
    return json.dumps(write_record(row, version=_VERSION)).encode()


def write_lease(folder: PoolFolder, key: str, lease: Lease) -> None:
    """Write a lease of this user's; a PlanError if others could not read it, as because a name is too long."""
    folder.write(_LEASE, key, _readable(lease, read_lease, os.geteuid()))


def write_partition(folder: PoolFolder, stored: StoredPartition) -> None:
    """Write a partition; a PlanError if others could not read it. The lease that holds it is not in its file."""
    data = _readable(replace(stored.partition, lease=None), read_partition, stored.uid)
    folder.write(_PARTITION, stored.key, data, uid=stored.uid, is_lasting=not stored.partition.is_temporary)


def _readable(row: Lease | Partition, read: Callable[[bytes, int], object], uid: int) -> bytes:
    data = file_data(row)
    try:
        read(data, uid)
    except (ValueError, PlanError) as error:
        raise PlanError(f"this cannot stand in a pool: {error}") from None
    return data


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
