"""Leases and partitions as they stand in files of the pool, in JSON, and in messages. Pure.

Reading is strict, because anybody may have written them: every field must be there, of its type, and within its
range, and a name must be one that can be printed. Whose a row is, its file tells and not the row.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Final

from poprun.devices.pool.records import Holder, Lease, Partition
from poprun.errors import PlanError
from poprun.process.process_tree import user_name
from poprun.text.fields import FieldReader
from poprun.text.input_files import parse_json
from poprun.text.screen import visible

VERSION: Final = 1
MAX_TEXT: Final = 255
MAX_PID: Final = 2**31 - 1

_MAX_USER: Final = 2 * MAX_TEXT + 1
"""Of a client of a server its host stands behind its name."""
MAX_NUMBER: Final = 2**53
_MAX_IPUS: Final = 2**24
_LATEST_SECONDS: Final = 253_402_300_799
"""The end of the year 9999."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLease:
    """A lease with its file.

    Attributes:
        key: What the file and that of its lock are called.
        uid: Whose it is.
        lease: What stands in it.
    """

    key: str
    uid: int
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPartition:
    """A partition with its file.

    Attributes:
        key: What the file is called; of a temporary one as that of the lease with which it ends.
        uid: Whose it is.
        partition: What stands in it; which lease holds it, leases tell.
    """

    key: str
    uid: int
    partition: Partition


def lease_row(lease: Lease) -> bytes:
    """The text of a lease. Inverse of :func:`read_lease_row`."""
    return _row({"lease": asdict(lease)})


def partition_row(partition: Partition) -> bytes:
    """The text of a partition. Inverse of :func:`read_partition_row`."""
    return _row({"partition": asdict(replace(partition, lease=None))})


def _row(values: dict[str, object]) -> bytes:
    return json.dumps({"version": VERSION, **values}).encode()


def read_lease_row(data: bytes, *, key: str, uid: int) -> StoredLease:
    """The lease that a file of the user ``uid`` holds.

    Raises:
        ValueError, PlanError: If it holds none, or a field is not what it may be.
    """
    read = _reader(data, "lease")
    lease = read_lease(read.nested("lease"))
    if lease.holder.key is None:
        lease = replace(lease, holder=replace(lease.holder, user=user_name(uid)))
    return StoredLease(key=key, uid=uid, lease=lease)


def read_partition_row(data: bytes, *, key: str, uid: int) -> StoredPartition:
    """The partition that a file of the user ``uid`` holds.

    Raises:
        ValueError, PlanError: If it holds none, or a field is not what it may be.
    """
    partition = read_partition(_reader(data, "partition").nested("partition"))
    user = partition.user if "@" in partition.user else user_name(uid)
    return StoredPartition(key=key, uid=uid, partition=replace(partition, user=user, lease=None))


def _reader(data: bytes, *keys: str) -> FieldReader:
    read = FieldReader(source="row", values=parse_json(data.decode()), noun="a row")
    version = read.count("version")
    if version != VERSION:
        raise ValueError(f"version {version}, and this poprun knows {VERSION}")
    read.expect_keys(("version", *keys))
    return read


def read_lease(read: FieldReader) -> Lease:
    """The lease in a mapping; inverse of ``asdict``. What is no lease is a PlanError."""
    read.expect_keys(("id", "holder", "since_epoch_seconds", "num_ipus", "queue", "ipus"))
    return Lease(
        id=number_of(read, "id", MAX_NUMBER),
        holder=_read_holder(read.nested("holder")),
        since_epoch_seconds=_moment_of(read, "since_epoch_seconds"),
        num_ipus=number_of(read, "num_ipus", _MAX_IPUS),
        queue=text_of(read, "queue", least=0),
        ipus=_names_of(read, "ipus"),
    )


def _read_holder(read: FieldReader) -> Holder:
    read.expect_keys(("pid", "start_ticks", "boot_id", "pid_namespace", "user", "words"))
    return Holder(
        pid=number_of(read, "pid", MAX_PID),
        start_ticks=number_of(read, "start_ticks", MAX_NUMBER, least=0),
        boot_id=text_of(read, "boot_id", least=0),
        pid_namespace=text_of(read, "pid_namespace", least=0),
        user=text_of(read, "user", most=_MAX_USER),
        words=visible(read.text("words")[:MAX_TEXT]),
    )


def read_partition(read: FieldReader) -> Partition:
    """The partition in a mapping; inverse of ``asdict``. What is no partition is a PlanError."""
    read.expect_keys(tuple(Partition.__dataclass_fields__))
    return Partition(
        name=text_of(read, "name"),
        ipus=_names_of(read, "ipus"),
        cluster=text_of(read, "cluster", least=0),
        allocation=text_of(read, "allocation", least=0),
        num_domains=number_of(read, "num_domains", _MAX_IPUS, least=0),
        user=text_of(read, "user", most=_MAX_USER),
        created_at_epoch_seconds=_moment_of(read, "created_at_epoch_seconds"),
        lease=None if read.is_null("lease") else number_of(read, "lease", MAX_NUMBER),
        is_temporary=read.flag("is_temporary"),
    )


def text_of(read: FieldReader, key: str, *, least: int = 1, most: int = MAX_TEXT) -> str:
    """The text under ``key``, which has ``least`` to ``most`` characters, all of which can be shown."""
    text = read.text(key)
    if not (least <= len(text) <= most and text.isprintable()):
        raise PlanError(
            f"{read.source}: {read.path}{key} must be {least} to {most} characters that can be printed"
        )
    return text


def optional_text_of(read: FieldReader, key: str) -> str | None:
    """The text under ``key``, which is short and can be shown, or None for null."""
    return None if read.is_null(key) else text_of(read, key)


def number_of(read: FieldReader, key: str, most: int, *, least: int = 1) -> int:
    """The whole number under ``key``, from ``least`` to ``most``."""
    number = read.count(key)
    if not least <= number <= most:
        raise PlanError(
            f"{read.source}: {read.path}{key} must be a whole number from {least} to {most}, not {number!s:.20}"
        )
    return number


def _moment_of(read: FieldReader, key: str) -> float:
    """The point in time under ``key``, in seconds since 1970."""
    seconds = read.number(key)
    if not 0 <= seconds <= _LATEST_SECONDS:
        raise PlanError(f"{read.source}: {read.path}{key} must be a time in seconds since 1970, not {seconds:g}")
    return seconds


def _names_of(read: FieldReader, key: str) -> tuple[str, ...]:
    """The names of virtual IPUs under ``key``."""
    names = read.texts(key)
    if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_TEXT and name.isprintable() for name in names):
        raise PlanError(
            f"{read.source}: {read.path}{key} must be names of 1 to {MAX_TEXT} characters, each of them once"
        )
    return names
