"""The messages between a server of virtual IPUs and its clients, as dataclasses. Pure.

Messages are sent as JSON. Reading is strict: if a text is too long, a number is out of range, or a field is
unknown, the error names the field.
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
"""The random key that a client chooses for its lease. Messages with the same key are about the same lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A message without fields, for commands that need no arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A client's request to the server for virtual IPUs, with the client's process, user and host."""

    key: Key
    pid: Pid
    start_ticks: Ticks
    user: Name
    host: Name
    words: Words  # the client's command line
    wanted: Annotated[IpuRequest, _check_size]

    @property
    def holder(self) -> Holder:
        """The client that asks for the lease, in the form in which the pool stores the holder of a lease."""
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
    """The server's answer to a :class:`LeaseRequest`: the granted IPUs, or how long to wait."""

    id: LeaseNumber
    ipus: Names  # names of the lease's IPUs, in slot order; empty while the request waits
    pause_seconds: float  # the time until the client sends the request again, while the request waits


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKey:
    """A message with the key (random name) of the lease that the server shall renew or end, as a command asks."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionName:
    """A message with the name of a partition (set of IPUs), which the server shall reset or remove."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPartition:
    """A client's request to make a partition, which is a named set of virtual IPUs."""

    name: Name
    size: IpuCount
    allocation: Name | None
    cluster: Name | None
    user: Name  # the client, as user@host


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """The server's description of itself: virtual IPUs, partitions, leases, and the duration of leases."""

    boot_id: str  # boot id of the server's kernel: equal to the client's if both run on the same machine
    lease_seconds: float  # how long a lease lasts after a renewal
    cluster: Cluster  # the virtual IPUs of the pool
    state: PoolState  # the partitions and leases in the pool
