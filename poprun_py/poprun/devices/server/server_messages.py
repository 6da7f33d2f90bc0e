"""What a server of virtual IPUs and its clients send each other, as values. Pure.

They travel as JSON. Reading is strict: a text that is too long, a number out of its range, or a field that nobody
knows is an error that names it.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from poprun.devices.pool.records import (
    REMOTE,
    Holder,
    LeaseNumber,
    Name,
    Names,
    Pid,
    PoolState,
    Ticks,
    Words,
    short_words,
)
from poprun.devices.pool.requests import IpuCount, IpuRequest
from poprun.plan.inventory import Cluster

_KEY: Final = re.compile("[0-9a-f]{32}")


def _check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError("must be 32 hexadecimal digits")
    return key


def _check_size(wanted: IpuRequest) -> IpuRequest:
    if wanted.partition is not None and wanted.partition.size < wanted.num_ipus:
        raise ValueError("partition.size must be num_ipus at least")
    return wanted


Key = Annotated[str, _check_key]
"""What a client names its lease by: it made it up, and the same key is the same lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A message without fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """The request of a client for IPUs, with who it is."""

    key: Key
    pid: Pid
    start_ticks: Ticks
    user: Name
    host: Name
    words: Words  # what it runs
    wanted: Annotated[IpuRequest, _check_size]

    @property
    def holder(self) -> Holder:
        """The client as the holder of a lease, which the server keeps for it."""
        return Holder(
            pid=self.pid,
            start_ticks=self.start_ticks,
            boot_id=REMOTE,
            pid_namespace=self.key,
            user=f"{self.user}@{self.host}",
            words=short_words(self.words),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    """What the server answers to a :class:`LeaseRequest`."""

    id: LeaseNumber
    ipus: Names  # those that the lease holds, in slot order; none while it waits
    pause_seconds: float  # when to ask again, while it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKey:
    """A message about the lease of that key."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionName:
    """A message about the partition of that name."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPartition:
    """The partition that a client wants to be made."""

    name: Name
    size: IpuCount
    allocation: Name | None
    cluster: Name | None
    user: Name  # who asks, as user@host


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """A pool as its server describes it."""

    boot_id: str  # the server's run of the kernel: a client knows by it whether that is its own machine
    lease_seconds: float  # how long a lease lasts after it was renewed
    cluster: Cluster  # what the pool hands out
    state: PoolState  # what stands in it
