"""What a server of virtual IPUs and its clients say to each other, as values and as JSON. Pure.

Reading is strict: a text that is too long, a number out of its range, or a field that nobody knows is an error
that names it, and nothing of the rest is believed.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from poprun.devices.pool.pool_rows import (
    MAX_PID,
    MAX_TEXT,
    number_of,
    optional_text_of,
    read_lease,
    read_partition,
    text_of,
)
from poprun.devices.pool.records import REMOTE, Holder, PoolState, short_words
from poprun.devices.pool.requests import IpuRequest, PartitionRequest
from poprun.errors import PlanError
from poprun.plan.inventory import Cluster, VirtualIpu
from poprun.plan.topology import Occupant
from poprun.text.fields import FieldReader

MAX_IPUS: Final = 4096
"""IPUs of a cluster that a server hands out: all of them are in one answer."""

_MAX_HOSTS: Final = 1024
_KEY: Final = re.compile("[0-9a-f]{32}")
_MAX_NUMBER: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """What a client says when it wants IPUs.

    Attributes:
        key: What it names its lease by: 32 hexadecimal digits that it made up. The same key is the same lease.
        pid: Its process id.
        start_ticks: When it started, in clock ticks since boot: two processes that have had the same id differ.
        user: Whose it is.
        host: Where it runs.
        words: What it runs.
        wanted: What it wants.
    """

    key: str
    pid: int
    start_ticks: int
    user: str
    host: str
    words: str
    wanted: IpuRequest

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
    """What the server says to a :class:`LeaseRequest`.

    Attributes:
        id: Number of the lease.
        ipus: Names of the IPUs that it holds, in slot order; none while it waits.
        pause_seconds: When to ask again, while it waits.
    """

    id: int
    ipus: tuple[str, ...]
    pause_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """All that a server tells of its pool.

    Attributes:
        boot_id: The run of the kernel that the server lives in: a client knows whether that is its own machine.
        lease_seconds: How long a lease lasts after it was renewed.
        cluster: What the pool hands out.
        state: What stands in it.
    """

    boot_id: str
    lease_seconds: float
    cluster: Cluster
    state: PoolState


def reader(values: object, source: str) -> FieldReader:
    """What reads the fields of one message."""
    return FieldReader(source=source, values=values, noun="this message")


def key_of_lease(read: FieldReader) -> str:
    """The key that a client names its lease by."""
    key = read.text("key")
    if not _KEY.fullmatch(key):
        raise PlanError(f"{read.source}: {read.path}key must be 32 hexadecimal digits")
    return key


def read_request(values: object, source: str) -> LeaseRequest:
    """The request that a client sent; inverse of ``asdict``. What is no such request is a PlanError."""
    read = reader(values, source)
    read.expect_keys(("key", "pid", "start_ticks", "user", "host", "words", "wanted"))
    words = read.text("words")
    if len(words) > MAX_TEXT:
        raise PlanError(f"{source}: words must be {MAX_TEXT} characters at most")
    return LeaseRequest(
        key=key_of_lease(read),
        pid=number_of(read, "pid", MAX_PID),
        start_ticks=number_of(read, "start_ticks", _MAX_NUMBER),
        user=text_of(read, "user"),
        host=text_of(read, "host"),
        words="".join(letter if letter.isprintable() else "?" for letter in words),
        wanted=_read_ipu_request(read.nested("wanted")),
    )


def _read_ipu_request(read: FieldReader) -> IpuRequest:
    read.expect_keys(("num_ipus", "num_domains", "hosts", "allocation", "shares_devices", "partition"))
    hosts = read.texts("hosts")
    if len(hosts) > _MAX_HOSTS or not all(0 < len(host) <= MAX_TEXT and host.isprintable() for host in hosts):
        raise PlanError(f"{read.source}: {read.path}hosts must be {_MAX_HOSTS} names at most")
    num_ipus = number_of(read, "num_ipus", MAX_IPUS)
    return IpuRequest(
        num_ipus=num_ipus,
        num_domains=number_of(read, "num_domains", MAX_IPUS),
        hosts=hosts,
        allocation=optional_text_of(read, "allocation"),
        shares_devices=read.flag("shares_devices"),
        partition=None
        if read.is_null("partition")
        else _read_partition_request(read.nested("partition"), num_ipus),
    )


def _read_partition_request(read: FieldReader, num_ipus: int) -> PartitionRequest:
    wanted = read.settings(PartitionRequest)
    text_of(read, "name")
    if number_of(read, "size", MAX_IPUS) < num_ipus:
        raise PlanError(f"{read.source}: {read.path}size must be num_ipus at least")
    return wanted


def read_answer(values: object, source: str) -> LeaseAnswer:
    """What a server says to a request; inverse of ``asdict``."""
    return reader(values, source).settings(LeaseAnswer)


def pool_to_dict(pool: ServedPool) -> dict[str, object]:
    """``pool`` as values that JSON knows."""
    parts = {name: [part.start, part.stop] for name, part in pool.cluster.allocations.items()}
    return {
        "boot_id": pool.boot_id,
        "lease_seconds": pool.lease_seconds,
        "cluster": {**asdict(pool.cluster), "allocations": parts},
        "state": asdict(pool.state),
    }


def read_pool(values: object, source: str) -> ServedPool:
    """The pool that a server told of; inverse of :func:`pool_to_dict`."""
    read = reader(values, source)
    state = read.nested("state")
    return ServedPool(
        boot_id=read.text("boot_id"),
        lease_seconds=read.number("lease_seconds"),
        cluster=_read_cluster(read.nested("cluster")),
        state=PoolState(
            partitions=tuple(map(read_partition, state.items("partitions"))),
            leases=tuple(map(read_lease, state.items("leases"))),
        ),
    )


def _read_cluster(read: FieldReader) -> Cluster:
    parts = read.nested("allocations")
    return Cluster(
        name=read.text("name"),
        kind=read.text("kind"),
        is_open=read.flag("is_open"),
        memory_bytes=read.optional("memory_bytes", read.count),
        hosts=read.texts("hosts"),
        allocations={name: _read_range(parts, name) for name in parts.names()},
        ipus=tuple(map(_read_ipu, read.items("ipus"))),
    )


def _read_range(read: FieldReader, key: str) -> range:
    ends = read.values[key] if isinstance(read.values, Mapping) else None
    if not (isinstance(ends, list) and [type(end) for end in ends] == [int, int]):
        raise PlanError(f"{read.source}: {read.path}{key} must be two numbers")
    return range(*ends)


def _read_ipu(read: FieldReader) -> VirtualIpu:
    return VirtualIpu(
        index=read.count("index"),
        name=read.text("name"),
        domain=read.count("domain"),
        device=read.text("device"),
        occupants=tuple(user.settings(Occupant) for user in read.items("occupants")),
    )
