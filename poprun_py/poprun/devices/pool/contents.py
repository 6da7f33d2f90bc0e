"""The files of a pool, the record of a machine's leases: one file for each lease and partition. Strictly read.

Users write only their own files, so nobody can change or end another user's lease. A user who claims too much can
only make other users wait. The file's owner, and not the file's contents, decides whose lease it is. A file is
JSON, which is read strictly, because any user may have written the file.
"""

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from poprun.devices.pool.folder import PoolFolder
from poprun.devices.pool.holders import is_alive
from poprun.devices.pool.records import MAX_NUMBER, Lease, Partition, PoolState
from poprun.errors import PlanError
from poprun.launch.process.process_tree import user_name
from poprun.text.fields import read_record, write_record
from poprun.text.input_files import parse_json

LOCK: Final = "lock"  # the kind of the file that a job with a lease keeps locked; its key is the lease's key
PARTITION: Final = "partition"  # the kind of the file of a partition (set of IPUs)
_VERSION: Final = 1
_KINDS: Final = {Lease: "lease", Partition: PARTITION}

Row = TypeVar("Row", Lease, Partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Generic[Row]):
    """A stored lease or partition (set of IPUs), with its file's owner and the key in the name of its file."""

    key: str
    uid: int
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All leases and partitions in a machine's pool at one moment, each with the owner and key of its file."""

    leases: tuple[Stored[Lease], ...]  # leases of running jobs, the earliest request first
    partitions: tuple[Stored[Partition], ...]  # sorted by name; of equal names, this user's partition is first

    @property
    def state(self) -> PoolState:
        """All leases and partitions of the pool as values, without the owners and keys of their files."""
        leases = tuple(stored.row for stored in self.leases)
        holder_of = {lease.queue: lease.id for lease in leases if lease.ipus}
        return PoolState(
            leases=leases,
            partitions=tuple(
                replace(stored.row, lease=holder_of.get(stored.row.name)) for stored in self.partitions
            ),
        )

    @property
    def next_number(self) -> int:
        """The number that the pool's next lease gets: one more than the largest number that a lease has."""
        return min(MAX_NUMBER, 1 + max((stored.row.id for stored in self.leases), default=0))

    def partition(self, name: str) -> Stored[Partition] | None:
        """Return the partition called ``name``, with its file's key; None if there is no such partition."""
        return next((stored for stored in self.partitions if stored.row.name == name), None)


def read_contents(folder: PoolFolder) -> Contents:
    """Read the files of all leases and partitions in ``folder``. Raises PoolError if a file is damaged."""
    leases: list[Stored[Lease]] = []
    partitions: list[Stored[Partition]] = []
    for kind, key in folder.keys(*_KINDS.values()):
        file = folder.read(kind, key)
        if file is None or not file.data.strip(b"\0"):
            continue  # the file was removed meanwhile, or its data were lost when the machine crashed
        try:
            if kind == PARTITION:
                row = read_row(Partition, file.data, file.uid)
                partitions.append(Stored(key=key, uid=file.uid, row=row))
                continue
            lease = read_row(Lease, file.data, file.uid)
        except (ValueError, PlanError) as error:
            raise folder.damage(kind, key, file.uid, str(error)) from None
        if is_alive(lease.holder, partial(folder.is_locked, LOCK, key, file.uid)):
            leases.append(Stored(key=key, uid=file.uid, row=lease))
    leases.sort(key=lambda stored: (stored.row.id, stored.key))
    keys = {stored.key for stored in leases}
    partitions.sort(key=lambda stored: (stored.row.name, stored.uid != os.geteuid(), stored.uid, stored.key))
    return Contents(
        leases=tuple(leases),
        partitions=tuple(stored for stored in partitions if not stored.row.is_temporary or stored.key in keys),
    )


def read_row(kind: type[Row], data: bytes, uid: int) -> Row:
    """Return the lease or partition in ``data``, the bytes of a file. Raise ValueError or PlanError on damage."""
    row = read_record(kind, parse_json(data.decode()), "row", noun="a row", version=_VERSION)
    if isinstance(row, Partition):
        return replace(row, user=row.user if "@" in row.user else user_name(uid), lease=None)
    return (
        row if row.holder.client_key is not None else replace(row, holder=replace(row.holder, user=user_name(uid)))
    )


def row_data(row: Lease | Partition) -> bytes:
    """Return a lease or a partition as the bytes of its file, from which :func:`read_row` reads it."""
    return json.dumps(write_record(row, version=_VERSION)).encode()


def write(folder: PoolFolder, stored: Stored[Lease] | Stored[Partition]) -> None:
    """Write a lease or a partition to its file. Raise PlanError if a value, such as a long name, is forbidden."""
    row: Any = stored.row
    is_partition = isinstance(row, Partition)
    data = row_data(replace(row, lease=None) if is_partition else row)
    try:
        read_row(type(row), data, stored.uid)
    except (ValueError, PlanError) as error:
        raise PlanError(f"this cannot stand in a pool: {error}") from None
    is_lasting = is_partition and not row.is_temporary
    folder.write(_KINDS[type(row)], stored.key, data, uid=stored.uid, is_lasting=is_lasting)


def end_lease(folder: PoolFolder, key: str) -> None:
    """End this user's lease ``key``: remove its files, and the file of a partition that was made only for it."""
    for kind in (*_KINDS.values(), LOCK):
        folder.remove(kind, key)


def clear(folder: PoolFolder, contents: Contents) -> None:
    """Remove the files that this user's ended jobs left in the locked folder of the pool."""
    leases = [stored.key for stored in contents.leases]
    partitions = [stored.key for stored in contents.partitions]
    folder.remove_own({_KINDS[Lease]: leases, LOCK: leases, PARTITION: partitions})
