"""What stands in an open pool folder: the leases of jobs that live, and partitions, each in a file of its user's.

Users write their own files only. So nobody can change or end another user's lease: what stands in the pool is what
each user says of his own jobs, and who claims too much keeps others waiting. Whose a file is, its owner says and
not what stands in it. A file is JSON, read strictly, because anybody may have written it.
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

LOCK: Final = "lock"  # the kind of the file that the job with a lease keeps locked: it has the lease's key
_VERSION: Final = 1
_KINDS: Final = {Lease: "lease", Partition: "partition"}

Row = TypeVar("Row", Lease, Partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Generic[Row]):
    """A lease or a partition with its owner, and the key of its file; a temporary partition has its lease's."""

    key: str
    uid: int
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that stands in the pool at one moment."""

    leases: tuple[Stored[Lease], ...]  # those whose jobs live; those who asked first come first
    partitions: tuple[Stored[Partition], ...]  # of those of one name this user's come first

    @property
    def state(self) -> PoolState:
        """The leases and partitions, without their files."""
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
        """The number of a lease that is asked for now."""
        return min(MAX_NUMBER, 1 + max((stored.row.id for stored in self.leases), default=0))

    def partition(self, name: str) -> Stored[Partition] | None:
        """The partition of that name, or None."""
        return next((stored for stored in self.partitions if stored.row.name == name), None)


def read_contents(folder: PoolFolder) -> Contents:
    """All that stands in the pool now; a file that cannot be read is a PoolError."""
    leases: list[Stored[Lease]] = []
    partitions: list[Stored[Partition]] = []
    for kind, key in folder.keys(*_KINDS.values()):
        file = folder.read(kind, key)
        if file is None or not file.data.strip(b"\0"):
            continue  # removed meanwhile, or lost when the machine crashed
        try:
            if kind == _KINDS[Partition]:
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
    """The lease or partition in a file of the user ``uid``; a ValueError or a PlanError if there is none."""
    row = read_record(kind, parse_json(data.decode()), "row", noun="a row", version=_VERSION)
    if isinstance(row, Partition):
        return replace(row, user=row.user if "@" in row.user else user_name(uid), lease=None)
    return (
        row if row.holder.client_key is not None else replace(row, holder=replace(row.holder, user=user_name(uid)))
    )


def row_data(row: Lease | Partition) -> bytes:
    """The text of the file of a lease or partition; inverse of :func:`read_row`."""
    return json.dumps(write_record(row, version=_VERSION)).encode()


def write(folder: PoolFolder, stored: Stored[Lease] | Stored[Partition]) -> None:
    """Write a lease or a partition; a PlanError if others could not read it, as because a name is too long."""
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
    """Give back what a lease of this user's holds, and a temporary partition with it."""
    for kind in (*_KINDS.values(), LOCK):
        folder.remove(kind, key)


def remove_partition(folder: PoolFolder, stored: Stored[Partition]) -> None:
    """Remove a partition of this user's."""
    folder.remove(_KINDS[Partition], stored.key)


def clear(folder: PoolFolder, contents: Contents) -> None:
    """Remove what ended jobs of this user have left; nobody else writes meanwhile."""
    leases = [stored.key for stored in contents.leases]
    partitions = [stored.key for stored in contents.partitions]
    folder.remove_own({_KINDS[Lease]: leases, LOCK: leases, _KINDS[Partition]: partitions})
