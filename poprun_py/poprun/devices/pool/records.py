"""Leases on virtual IPUs, partitions, and the processes that hold leases, as values. Pure.

Any user may have written a pool's file. Therefore the types of the fields limit the length of a text and the size
of a number, and require printable names; `poprun.text.fields` checks these limits.
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
"""The type of a process's command line in listings: shortened, and only of characters that can be printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A job's lease on virtual IPUs or cores of one host, as poprun stores and prints it."""

    host: str  # the host's name in the plan
    names: tuple[str, ...]  # names for users: GPU 0, cpu/3, core/3
    pool: str  # the pool's folder on the host, or the address of the pool's server
    partition: str | None = None
    descriptor: int | None = None  # the locked file of the lease; None if another process holds it

    def __str__(self) -> str:
        where = f"on {self.host}, from the pool {self.pool}"
        return f"{fold_names(self.names)}{f' (partition {self.partition})' if self.partition else ''} {where}"


def fold_names(names: Sequence[str]) -> str:
    """Return the devices ``names`` as one text; ``GPU 0`` and ``GPU 1`` become ``GPU 0-1``."""
    stems = {name.rstrip("0123456789") for name in names}
    numbers = [name[len(stem) :] for name in names for stem in stems]
    if len(stems) != 1 or not min(stems).endswith((" ", "/")) or not all(numbers):
        return ", ".join(names)
    return f"{stems.pop()}{fold_numbers(sorted(map(int, numbers)))}"


_LONGEST_WORDS: Final = 60

REMOTE: Final = "remote"  # instead of a boot id: the process may run on any host, and a server keeps its lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds a lease on devices, with the ids that distinguish it from every other process."""

    pid: Pid  # process id in the process's own pid namespace
    start_ticks: Ticks  # start time of the process, in clock ticks since boot
    boot_id: OptionalName  # boot id of the kernel that runs the process, or `REMOTE`
    pid_namespace: OptionalName  # for a client of a server: the key of the client's lease
    user: ClientName
    words: Words

    @property
    def client_key(self) -> str | None:
        """The key of the lease if a server's client holds it; None if a process of this machine holds it."""
        return self.pid_namespace if self.boot_id == REMOTE else None

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user}" + (f" ({self.words})" if self.words else "")


def short_words(words: str) -> str:
    """Return the command line ``words``; if it is long, only its beginning, with ``…`` at the end."""
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A job's lease (its right to use virtual IPUs), or its place in the queue for virtual IPUs."""

    id: LeaseNumber  # an earlier request has a smaller number
    holder: Holder
    since_epoch_seconds: EpochSeconds  # time of the request
    num_ipus: Annotated[int, between(1, _MAX_IPUS)]  # number of IPUs that the job requested
    queue: OptionalName  # the requested partition; empty for IPUs outside of partitions
    ipus: Names = ()  # names of the leased IPUs, in slot order; empty while the job waits

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_epoch_seconds))
        return f"{self.holder}, since {since}"

    @property
    def is_waiting(self) -> bool:
        """Whether the job still waits in the queue and has no virtual IPUs."""
        return not self.ipus


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A named set of virtual IPUs that are set aside for jobs which ask for this name."""

    name: Name  # unique in the pool
    ipus: Names  # names of the IPUs, in slot order; their number is a power of two
    cluster: OptionalName  # the cluster of the IPUs
    allocation: OptionalName  # the part of the cluster from which the IPUs were chosen; empty: the whole cluster
    num_domains: Annotated[int, between(0, _MAX_IPUS)]  # number of IPU-Link domains that contain the IPUs
    user: ClientName  # the user who made the partition
    created_at_epoch_seconds: EpochSeconds
    lease: LeaseNumber | None = None  # the lease that uses the partition; None if the partition is free
    is_temporary: bool = False  # whether the partition ends with the lease for which it was made

    @property
    def size(self) -> int:
        """Number of virtual IPUs in the partition."""
        return len(self.ipus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """All leases and partitions in a machine's pool at one moment."""

    partitions: tuple[Partition, ...] = ()
    leases: tuple[Lease, ...] = ()

    @property
    def taken(self) -> frozenset[str]:
        """Names of all IPUs that are in a partition or under a lease."""
        in_partitions = (name for partition in self.partitions for name in partition.ipus)
        return frozenset(in_partitions).union(*(lease.ipus for lease in self.leases))

    def partition(self, name: str) -> Partition | None:
        """Return the partition called ``name``; None if there is no such partition."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def lease(self, number: int | None) -> Lease | None:
        """Return the lease with the number ``number``; None if there is no such lease."""
        return next((lease for lease in self.leases if lease.id == number), None)

    def waiting(self, queue: str) -> tuple[Lease, ...]:
        """Return the leases that were not yet granted and wait in the queue ``queue``, the earliest first."""
        return tuple(lease for lease in self.leases if lease.is_waiting and lease.queue == queue)
