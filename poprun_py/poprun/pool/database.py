"""The pool's file: an SQLite database in WAL mode, made whole, checked when opened, and its rows as values.

That an IPU is a row with one place for a lease and one for a partition is what keeps two jobs apart: the database
itself refuses a second one.
"""

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from poprun.errors import PoolError
from poprun.plan.inventory import VirtualIpu
from poprun.pool.place import POOL_VARIABLE, prepare_folder
from poprun.pool.records import Holder, Lease, Partition, PoolState

APPLICATION_ID: Final = 0x504F5052
VERSION: Final = 1
BUSY_SECONDS: Final = 120.0
"""How long to wait for others to finish their transactions, of milliseconds each."""

_LONGEST_LOG_BYTES: Final = 4 * 2**20
_FILE_BITS: Final = 0o666
_FOLDER_BITS: Final = 0o777

_TABLES: Final = (
    """CREATE TABLE lease (
        id INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL,
        boot_id TEXT NOT NULL, pid_namespace TEXT NOT NULL, user TEXT NOT NULL, words TEXT NOT NULL,
        since REAL NOT NULL, num_ipus INTEGER NOT NULL, queue TEXT NOT NULL)""",
    """CREATE TABLE partition (
        name TEXT PRIMARY KEY, cluster TEXT NOT NULL, allocation TEXT NOT NULL, num_domains INTEGER NOT NULL,
        user TEXT NOT NULL, created_at REAL NOT NULL, made_for INTEGER REFERENCES lease)""",
    """CREATE TABLE ipu (
        name TEXT PRIMARY KEY, position INTEGER NOT NULL, partition TEXT REFERENCES partition,
        lease INTEGER REFERENCES lease, CHECK (partition IS NOT NULL OR lease IS NOT NULL))""",
)


def lease_file(file: str, number: int) -> str:
    """The file that the job with the lease ``number`` keeps locked."""
    return os.path.join(f"{file}.leases", str(number))


def mode_of(file: str, bits: int) -> int:
    """The permissions of a file of the pool, within ``bits``: those of its folder."""
    return os.stat(os.path.dirname(file)).st_mode & bits


@contextmanager
def opened(file: str, busy_seconds: float = BUSY_SECONDS) -> Iterator[sqlite3.Connection]:
    """The pool in ``file``, made if there is none; every statement is a transaction unless one was begun.

    A file that is damaged, of another program or of a later version is an error, and is left as it is.
    """
    prepare_folder(file)
    try:
        if not os.path.exists(file):
            _make(file)
        with closing(_connect(file, busy_seconds)) as connection:
            _check(connection, file)
            yield connection
    except sqlite3.Error as error:
        raise PoolError(_words(error, file, busy_seconds)) from None
    except OSError as error:
        raise PoolError(f"pool {file}: {error.filename or file}: {error.strerror}") from None


def _connect(file: str, busy_seconds: float) -> sqlite3.Connection:
    path = os.path.realpath(os.path.dirname(file)).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    name = os.path.basename(file).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(
        f"file:{path}/{name}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=busy_seconds,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


def checkpoint(connection: sqlite3.Connection, file: str) -> None:
    """Write the log back into the pool once it has grown: between transactions, so that nobody waits for it."""
    with suppress(OSError):
        if os.stat(f"{file}-wal").st_size > _LONGEST_LOG_BYTES:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _check(connection: sqlite3.Connection, file: str) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise PoolError(
            f"pool {file}: this is no pool but another program's file, and was left as it is: "
            f"set {POOL_VARIABLE} to a file that poprun may make"
        )
    if version > VERSION:
        raise PoolError(f"pool {file}: made by a later poprun (version {version}): use that one, or another pool")
    tables = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    ours = {sql for (sql,) in tables if "sqlite_sequence" not in sql}
    if ours != set(_TABLES) or connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise PoolError(_damaged(file, "its tables are not as poprun makes them"))


def _make(file: str) -> None:
    """Make a whole pool under another name, then give it its own, unless somebody else has made one meanwhile."""
    folder = f"{file}.leases"
    with suppress(FileExistsError):
        os.mkdir(folder)
        os.chmod(folder, mode_of(file, _FOLDER_BITS))
    descriptor, unfinished = tempfile.mkstemp(prefix=".pool-", dir=os.path.dirname(file))
    try:
        os.fchmod(descriptor, mode_of(file, _FILE_BITS))
        os.close(descriptor)
        with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            for table in _TABLES:
                connection.execute(table)
        with suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        os.unlink(unfinished)


def _words(error: sqlite3.Error, file: str, busy_seconds: float) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"pool {file}: others have kept it locked for {busy_seconds:g} s: try again"
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return _damaged(file, str(error))
    return f"pool {file}: {error}"


def _damaged(file: str, how: str) -> str:
    return (
        f"pool {file}: damaged, or no pool ({how}); it was left as it is. When no job of this machine runs any "
        f"more, move it away (mv {file} {file}.damaged), or set {POOL_VARIABLE}: poprun makes a new one"
    )


_SELECT_LEASES: Final = (
    "SELECT id, pid, start_ticks, boot_id, pid_namespace, user, words, since, num_ipus, queue FROM lease"
)


_SELECT_HOLDING: Final = "SELECT lease FROM ipu WHERE lease IS NOT NULL"


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


def predecessors(connection: sqlite3.Connection, number: int, queue: str) -> list[Lease]:
    """The leases that wait in a queue before the lease ``number``, first come first."""
    rows = connection.execute(
        f"{_SELECT_LEASES} WHERE id < ? AND queue = ? AND id NOT IN ({_SELECT_HOLDING}) ORDER BY id",
        (number, queue),
    )
    return [_lease(row, ()) for row in rows]


def user_of_lease(connection: sqlite3.Connection, number: int) -> str:
    """The user of the lease of that number."""
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
