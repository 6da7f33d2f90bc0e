"""What stands in a pool: partitions, and leases with who holds them. Pure values."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from poprun.text.ranges import fold_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """Virtual IPUs, or cores, of one host that a job has to itself.

    Attributes:
        host: What the plan calls the host.
        names: What is held, as people read it: ``GPU 0``, ``cpu/3``, ``core/3``.
        pool: Folder of the pool on that host.
        partition: The partition that they are, or None.
        descriptor: The locked file that is the lease; None where another process keeps it.
    """

    host: str
    names: tuple[str, ...]
    pool: str
    partition: str | None = None
    descriptor: int | None = None

    def __str__(self) -> str:
        where = f"on {self.host}, from the pool {self.pool}"
        return f"{fold_names(self.names)}{f' (partition {self.partition})' if self.partition else ''} {where}"


def fold_names(names: Sequence[str]) -> str:
    """Names such as ``GPU 0`` and ``cpu/0`` with neighbours folded, ``GPU 0-3``; others one by one."""
    stems = {name.rstrip("0123456789") for name in names}
    numbers = [name[len(stem) :] for name in names for stem in stems]
    if len(stems) != 1 or not min(stems).endswith((" ", "/")) or not all(numbers):
        return ", ".join(names)
    return f"{stems.pop()}{fold_numbers(sorted(map(int, numbers)))}"


_LONGEST_WORDS: Final = 60

REMOTE: Final = "remote"
"""In the place of a boot's id: the process runs wherever it runs, and a server keeps its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds a lease, with what tells it from every other process.

    Attributes:
        pid: Its id, in its own pid namespace.
        start_ticks: When it started, in clock ticks since boot.
        boot_id: The run of the kernel in which it lives.
        pid_namespace: The pid namespace that its id belongs to; of a client of a server the key of its lease.
        user: Whose it is; of a client of a server ``user@host``.
        words: What it runs, for people.
    """

    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    user: str
    words: str

    @property
    def key(self) -> str | None:
        """The key by which a client of a server names its lease; None for a process of this machine."""
        return self.pid_namespace if self.boot_id == REMOTE else None

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user}" + (f" ({self.words})" if self.words else "")


def short_words(words: str) -> str:
    """The beginning of the words that a process runs."""
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one job to its virtual IPUs, or its place in the queue for them.

    Attributes:
        id: Its number; those who asked earlier have a smaller one.
        holder: Who has it.
        since_epoch_seconds: When it was asked for.
        num_ipus: How many are asked for.
        queue: The partition that is asked for; empty for IPUs that are in none.
        ipus: Names of those that it holds, in slot order; empty while it waits.
    """

    id: int
    holder: Holder
    since_epoch_seconds: float
    num_ipus: int
    queue: str
    ipus: tuple[str, ...] = ()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_epoch_seconds))
        return f"{self.holder}, since {since}"

    @property
    def is_waiting(self) -> bool:
        """Whether it holds nothing yet."""
        return not self.ipus


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A named set of virtual IPUs.

    Attributes:
        name: Its name, one of its kind in the pool.
        ipus: Names of its IPUs, in slot order; their number is a power of two.
        cluster: The cluster that they belong to.
        allocation: The part of the cluster that they were taken from; empty for all of it.
        num_domains: IPU-Link domains that they lie in.
        user: Who made it.
        created_at_epoch_seconds: When.
        lease: Number of the lease that holds it, or None.
        is_temporary: Whether it ends with the lease for which it was made.
    """

    name: str
    ipus: tuple[str, ...]
    cluster: str
    allocation: str
    num_domains: int
    user: str
    created_at_epoch_seconds: float
    lease: int | None = None
    is_temporary: bool = False

    @property
    def size(self) -> int:
        """How many IPUs it has."""
        return len(self.ipus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """All that stands in a pool at one moment."""

    partitions: tuple[Partition, ...] = ()
    leases: tuple[Lease, ...] = ()

    @property
    def taken(self) -> frozenset[str]:
        """Names of IPUs in a partition or under a lease."""
        in_partitions = (name for partition in self.partitions for name in partition.ipus)
        return frozenset(in_partitions).union(*(lease.ipus for lease in self.leases))

    def partition(self, name: str) -> Partition | None:
        """The partition of that name, or None."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def lease(self, number: int | None) -> Lease | None:
        """The lease of that number, or None."""
        return next((lease for lease in self.leases if lease.id == number), None)

    def waiting(self, queue: str) -> tuple[Lease, ...]:
        """Who waits for that partition, or for IPUs that are in none, first come first."""
        return tuple(lease for lease in self.leases if lease.is_waiting and lease.queue == queue)

    def without(self, ended: Collection[int]) -> "PoolState":
        """The state without the leases of these numbers, and without the partitions that end with them."""
        return PoolState(
            partitions=tuple(
                replace(partition, lease=None) if partition.lease in ended else partition
                for partition in self.partitions
                if not (partition.is_temporary and partition.lease in ended)
            ),
            leases=tuple(lease for lease in self.leases if lease.id not in ended),
        )
