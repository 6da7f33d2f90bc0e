"""What stands in a pool: partitions, and leases with who holds them. Pure values.

Anybody may have written what stands in a pool, so the types of the fields say how long a text and how large a
number may be, and that a name is one that can be printed; `poprun.text.fields` reads them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from poprun.text.fields import between, distinct, printable
from poprun.text.ranges import fold_numbers
from poprun.text.screen import visible

MAX_TEXT: Final = 255
MAX_NUMBER: Final = 2**53
_MAX_PID: Final = 2**31 - 1
_MAX_IPUS: Final = 2**24
_LATEST_SECONDS: Final = 253_402_300_799  # the end of the year 9999
Name = Annotated[str, printable(1, MAX_TEXT)]
OptionalName = Annotated[str, printable(0, MAX_TEXT)]
ClientName = Annotated[str, printable(1, 2 * MAX_TEXT + 1)]  # a user; of a client of a server ``user@host``
Names = Annotated[tuple[Name, ...], distinct]
Pid = Annotated[int, between(1, _MAX_PID)]
Ticks = Annotated[int, between(0, MAX_NUMBER)]
LeaseNumber = Annotated[int, between(1, MAX_NUMBER)]
EpochSeconds = Annotated[float, between(0, _LATEST_SECONDS)]
Words = Annotated[str, lambda words: visible(words[:MAX_TEXT])]
"""What a process runs, for others to read: what is too long or cannot be printed is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """Virtual IPUs, or cores, of one host that a job has to itself."""

    host: str  # what the plan calls it
    names: tuple[str, ...]  # as people read them: GPU 0, cpu/3, core/3
    pool: str  # its folder on that host, or the address of its server
    partition: str | None = None
    descriptor: int | None = None  # the locked file that is the lease; None where another process holds it

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

REMOTE: Final = "remote"  # in the place of a boot's id: the process runs on any host, and a server keeps its lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds a lease, with what distinguishes it from every other process."""

    pid: Pid  # in its own pid namespace
    start_ticks: Ticks  # when it started, in clock ticks since boot
    boot_id: OptionalName  # the run of the kernel in which it lives
    pid_namespace: OptionalName  # of a client of a server the key of its lease
    user: ClientName
    words: Words

    @property
    def client_key(self) -> str | None:
        """The key by which a client of a server names its lease; None for a process of this machine."""
        return self.pid_namespace if self.boot_id == REMOTE else None

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user}" + (f" ({self.words})" if self.words else "")


def short_words(words: str) -> str:
    """The beginning of the words that a process runs."""
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one job to its virtual IPUs, or its place in the queue for them."""

    id: LeaseNumber  # those who asked earlier have a smaller one
    holder: Holder
    since_epoch_seconds: EpochSeconds  # when it was asked for
    num_ipus: Annotated[int, between(1, _MAX_IPUS)]  # how many are asked for
    queue: OptionalName  # the partition that is asked for; empty for IPUs that are in none
    ipus: Names = ()  # those that it holds, in slot order; none while it waits

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_epoch_seconds))
        return f"{self.holder}, since {since}"

    @property
    def is_waiting(self) -> bool:
        """Whether the lease holds nothing yet."""
        return not self.ipus


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A named set of virtual IPUs."""

    name: Name  # the pool has one of this name
    ipus: Names  # in slot order; their number is a power of two
    cluster: OptionalName  # the cluster that they belong to
    allocation: OptionalName  # the part of the cluster that they were taken from; empty for all of it
    num_domains: Annotated[int, between(0, _MAX_IPUS)]  # IPU-Link domains that they lie in
    user: ClientName  # who made it
    created_at_epoch_seconds: EpochSeconds
    lease: LeaseNumber | None = None  # the lease that holds it, or None
    is_temporary: bool = False  # whether it ends with the lease for which it was made

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
        """Names of all IPUs that are in a partition or under a lease."""
        in_partitions = (name for partition in self.partitions for name in partition.ipus)
        return frozenset(in_partitions).union(*(lease.ipus for lease in self.leases))

    def partition(self, name: str) -> Partition | None:
        """The partition of that name, or None."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def lease(self, number: int | None) -> Lease | None:
        """The lease of that number, or None."""
        return next((lease for lease in self.leases if lease.id == number), None)

    def waiting(self, queue: str) -> tuple[Lease, ...]:
        """The leases that wait for that partition, or for IPUs that are in none; the earliest first."""
        return tuple(lease for lease in self.leases if lease.is_waiting and lease.queue == queue)
