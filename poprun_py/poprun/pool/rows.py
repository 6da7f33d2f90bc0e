"""The rows of the pool's tables, as values and back. Every function runs inside a transaction of its caller's."""

import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from poprun.plan.inventory import VirtualIpu
from poprun.pool.records import Holder, Lease, Partition, PoolState

_SELECT_LEASES: Final = (
    "SELECT id, pid, start_ticks, boot_id, pid_namespace, user, words, since, num_ipus, queue FROM lease"
)


def read_state(connection: sqlite3.Connection) -> PoolState:
    """All that stands in the pool, with the leases of processes that have ended."""
    ipus = connection.execute("SELECT name, partition, lease FROM ipu ORDER BY position, name").fetchall()
    of_lease: dict[int, list[str]] = {}
    of_partition: dict[str, list[str]] = {}
    lease_of_partition: dict[str, int | None] = {}
    for name, partition, lease in ipus:
        if lease is not None:
            of_lease.setdefault(lease, []).append(name)
        if partition is not None:
            of_partition.setdefault(partition, []).append(name)
            lease_of_partition[partition] = lease
    leases = connection.execute(f"{_SELECT_LEASES} ORDER BY id")
    partitions = connection.execute(
        "SELECT name, cluster, allocation, num_domains, user, created_at, made_for FROM partition ORDER BY name"
    )
    return PoolState(
        leases=tuple(_lease(row, of_lease.get(row[0], ())) for row in leases),
        partitions=tuple(
            Partition(
                name=row[0],
                ipus=tuple(of_partition.get(row[0], ())),
                cluster=row[1],
                allocation=row[2],
                num_domains=row[3],
                user=row[4],
                created_at_epoch_seconds=row[5],
                lease=lease_of_partition.get(row[0]),
                is_temporary=row[6] is not None,
            )
            for row in partitions
        ),
    )


def _lease(row: Sequence[Any], ipus: Sequence[str]) -> Lease:
    number, pid, start_ticks, boot_id, pid_namespace, user, words, since, num_ipus, queue = row
    holder = Holder(
        pid=pid, start_ticks=start_ticks, boot_id=boot_id, pid_namespace=pid_namespace, user=user, words=words
    )
    return Lease(
        id=number, holder=holder, since_epoch_seconds=since, num_ipus=num_ipus, queue=queue, ipus=tuple(ipus)
    )


def taken_names(connection: sqlite3.Connection) -> frozenset[str]:
    """Names of IPUs in a partition or under a lease."""
    return frozenset(name for (name,) in connection.execute("SELECT name FROM ipu"))


def predecessors(connection: sqlite3.Connection, number: int, queue: str) -> list[int]:
    """Numbers of the leases that wait in a queue before the lease ``number``, first come first."""
    rows = connection.execute(
        "SELECT id FROM lease WHERE id < ? AND queue = ? "
        "AND NOT EXISTS (SELECT 1 FROM ipu WHERE ipu.lease = lease.id) ORDER BY id",
        (number, queue),
    )
    return [found for (found,) in rows]


def read_lease(connection: sqlite3.Connection, number: int) -> Lease | None:
    """A lease that waits, or None when there is none of that number any more."""
    row = connection.execute(f"{_SELECT_LEASES} WHERE id = ?", (number,)).fetchone()
    return None if row is None else _lease(row, ())


def user_of_lease(connection: sqlite3.Connection, number: int) -> str:
    """Whose the lease of that number is."""
    (user,) = connection.execute("SELECT user FROM lease WHERE id = ?", (number,)).fetchone()
    return str(user)


def add_lease(connection: sqlite3.Connection, holder: Holder, num_ipus: int, queue: str) -> int:
    """Put ``holder`` at the end of a queue; the number of its lease."""
    row = {**asdict(holder), "since": time.time(), "num_ipus": num_ipus, "queue": queue}
    cursor = connection.execute(
        "INSERT INTO lease (pid, start_ticks, boot_id, pid_namespace, user, words, since, num_ipus, queue) VALUES "
        "(:pid, :start_ticks, :boot_id, :pid_namespace, :user, :words, :since, :num_ipus, :queue)",
        row,
    )
    return cursor.lastrowid or 0


def add_partition(  # noqa: PLR0913 - the columns of its row
    connection: sqlite3.Connection,
    *,
    name: str,
    ipus: Sequence[VirtualIpu],
    cluster: str,
    allocation: str,
    user: str,
    made_for: int | None = None,
) -> None:
    """Put a new partition of ``user`` with its IPUs into the pool; it ends with the lease ``made_for``."""
    connection.execute(
        "INSERT INTO partition (name, cluster, allocation, num_domains, user, created_at, made_for) "
        "VALUES (?, ?, ?, 0, ?, ?, ?)",
        (name, cluster, allocation, user, time.time(), made_for),
    )
    give_ipus(connection, name, ipus)


def give_ipus(connection: sqlite3.Connection, partition: str, ipus: Sequence[VirtualIpu]) -> None:
    """Let a partition have these IPUs, and no others any more."""
    connection.execute("DELETE FROM ipu WHERE partition = ?", (partition,))
    rows = [(ipu.name, ipu.index, partition) for ipu in ipus]
    connection.executemany("INSERT INTO ipu (name, position, partition) VALUES (?, ?, ?)", rows)
    num_domains = len({ipu.domain for ipu in ipus})
    connection.execute("UPDATE partition SET num_domains = ? WHERE name = ?", (num_domains, partition))


def delete_partition(connection: sqlite3.Connection, name: str) -> None:
    """Take a partition out of the pool; nobody may hold it."""
    connection.execute("DELETE FROM ipu WHERE partition = ?", (name,))
    connection.execute("DELETE FROM partition WHERE name = ?", (name,))


def end_leases(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Give back what leases hold, and take away the partitions that were made for them."""
    for number in numbers:
        connection.execute("DELETE FROM ipu WHERE lease = ? AND partition IS NULL", (number,))
        connection.execute("UPDATE ipu SET lease = NULL WHERE lease = ?", (number,))
        for (name,) in connection.execute("SELECT name FROM partition WHERE made_for = ?", (number,)).fetchall():
            delete_partition(connection, name)
        connection.execute("DELETE FROM lease WHERE id = ?", (number,))
