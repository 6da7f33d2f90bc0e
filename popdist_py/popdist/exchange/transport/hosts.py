"""The collectives over several hosts, and the choice between these collectives and the memory of one host.

Ranks that seem to be on one machine share its memory if mapping it proves this. If every host has the same number
of consecutive ranks, a power of two, the ranks of a host are one node of the tree over the ranks: they first
combine in the host's memory (`popdist.exchange.transport.two_level`). Otherwise each rank counts as a separate
host.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.errors import BackendError, Names, PopdistError
from popdist.exchange.host_memory.addition import Op
from popdist.exchange.host_memory.host_collectives import HostCollectives, as_bytes
from popdist.exchange.host_memory.in_place import MayMove
from popdist.exchange.host_memory.segments import values_of_all
from popdist.exchange.transport.two_level import Arrival, TwoLevelReduction
from popdist.ground.tree import Node

_FAILURE: Final = "failure"
_SHORTEST_SECONDS: Final = 0.001


class HostMessages:
    """The messages between a rank and all other ranks of its group, over gloo; for one thread at a time."""

    def __init__(
        self,
        gloo: Any,
        store: Store,
        rank: int,
        names: Names,
        timeout_seconds: float,
    ) -> None:
        self._gloo = gloo
        self._store = store
        self._rank = rank
        self._names = names
        self.timeout_seconds = timeout_seconds
        self._failure: str | None = None

    def swap(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send each rank its tensor in ``sent``, receive each rank's tensor into ``received``, and wait."""
        self.start(sent, received)()

    def start(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Callable[[], None]:
        """Start to send each rank its tensor in ``sent`` and to fill ``received``; return a function to wait."""
        works = []
        for tensors, begin in ((received, self._receive), (sent, self._send)):
            works += [
                (rank, begin(rank, tensor))
                for rank, tensor in tensors.items()
                if tensor.numel() and rank != self._rank
            ]
        return partial(self._wait, works)

    def _wait(self, works: Sequence[tuple[int, Any]]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        for rank, work in works:
            with self._naming(rank):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_SECONDS)))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A context for a collective. An error inside ends the group for all ranks, with the same reason."""
        if self._failure is not None:
            raise BackendError(self._failure)
        try:
            yield
        except PopdistError as error:
            self._failure = self._agree_on(str(error))
            self._gloo = None
            raise BackendError(self._failure) from error

    def close(self) -> None:
        """Close the connections of this rank; all later collectives of this rank fail."""
        self._gloo = None
        self._failure = self._failure or f"this {self._names.noun} has left the group"

    def _receive(self, rank: int, tensor: Tensor) -> Any:
        with self._naming(rank):
            return self._gloo.recv([as_bytes(tensor)], rank, 0)

    def _send(self, rank: int, tensor: Tensor) -> Any:
        with self._naming(rank):
            return self._gloo.send([as_bytes(tensor)], rank, 0)

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            name = self._names.of([rank])
            late = f"{name} did not come within the timeout of {self.timeout_seconds:g} seconds"
            lost = f"the connection to {name} was closed: it ended or was lost"
            raise BackendError(late if "timed out" in str(error).lower() else lost) from error

    def _agree_on(self, reason: str) -> str:
        """Return the first failed rank's reason from the key-value store; store ``reason`` if there is none."""
        # gloo reports a lost peer as a closed connection, and a rank that gives up closes all its connections
        with suppress(RuntimeError):
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE), "utf-8")
            self._store.set(_FAILURE, reason)
        return reason


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")


def machine() -> str:
    """Return a text that is equal for all processes that can share memory; empty if ``/proc`` cannot be read."""
    try:  # processes of other networks, such as of another pod, cannot send descriptors
        return f"{_BOOT_ID.read_text().strip()} {_NETWORK.readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank that joins a group, with the key-value store in which the ranks find each other, and a timeout."""

    store: Store
    rank: int
    names: Names
    timeout_seconds: float

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return len(self.names.members)

    def values_of_all(self, what: str, value: object) -> list[Any]:
        """Exchange ``value`` through the key-value store; return the values of all ranks, in rank order."""
        names = [self.names.of([rank]) for rank in range(self.size)]
        return values_of_all(PrefixStore(what, self.store), self.rank, names, value, self.timeout_seconds)

    def share_memory(self, num_local: int, prefix: str) -> HostCollectives | None:
        """Return the collectives of this host's ``num_local`` ranks; None if a host shares no memory."""
        collectives = HostCollectives.connect(
            PrefixStore(prefix, self.store),
            self.rank,
            num_local,
            names=self.names,
            timeout_seconds=self.timeout_seconds,
        )
        if num_local == self.size or all(self.values_of_all(f"{prefix}/found", collectives is not None)):
            return collectives
        if collectives is not None:
            collectives.close()
        return None


def connect(member: Member, host: str, connect_gloo: Callable[[Store], Any]) -> "HostCollectives | SeveralHosts":
    """Return the collectives of a group: through memory within a host, and by messages between several hosts.

    All ranks must call this function. ``host`` is equal on all ranks of a host, and empty if the host is unknown.
    """
    machines = member.values_of_all("machine", host)
    num_local = num_in_a_row(machines)
    is_one_host = num_local == member.size
    local = member.share_memory(num_local, "hosts") if is_one_host or num_local > 1 else None
    if local is not None and is_one_host:
        return local
    store = PrefixStore("messages", member.store)
    messages = HostMessages(connect_gloo(store), store, member.rank, member.names, member.timeout_seconds)
    num_together = 1 if local is None else ranks_of_each(machines)
    place = RankPlace(rank=member.rank, num_local=num_together, members=range(member.size))
    return SeveralHosts(place, messages, local)


def num_in_a_row(machines: list[str]) -> int:
    """Return how many consecutive ranks each machine has; 1 if the numbers differ or a machine is unknown."""
    if "" in machines:
        return 1
    num_local = max(1, len(machines) // len(set(machines)))
    rows = [machines[start : start + num_local] for start in range(0, len(machines), num_local)]
    return num_local if all(row == [row[0]] * num_local for row in rows) else 1


def ranks_of_each(machines: list[str]) -> int:
    """Return each machine's number of ranks; 1 if the numbers differ, or are no power of 2 on several machines."""
    num_local = num_in_a_row(machines)
    is_node = num_local == len(machines) or num_local & (num_local - 1) == 0
    return num_local if is_node else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The position of a rank among the hosts of its group; each host has ``num_local`` consecutive ranks."""

    rank: int  # index among the members; messages use the members' numbers
    num_local: int
    members: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return len(self.members)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the group."""
        return self.size // self.num_local

    @property
    def host(self) -> int:
        """Index of the host on which the rank is."""
        return self.rank // self.num_local

    @property
    def same_index(self) -> Sequence[int]:
        """The processes with the same index on their own hosts as this rank on its host, in host order."""
        return self.members[self.rank % self.num_local :: self.num_local]


class MessagePeers:
    """The ranks with the same index on their hosts, which send each other gloo messages in a two-level sum."""

    def __init__(self, place: RankPlace, messages: HostMessages) -> None:
        self._place = place
        self._messages = messages

    def all_gather(self, tensor: Tensor) -> Arrival:
        """Start sending ``tensor`` to the peers on other hosts; return a function that waits for their tensors."""
        received = tensor.new_empty(self._place.num_hosts, *tensor.shape)
        received[self._place.host] = tensor
        return self._start([tensor] * self._place.num_hosts, received)

    def all_to_all(self, rows: Tensor) -> Arrival:
        """Start sending each peer on another host its row of ``rows``; return a function to wait for rows."""
        received = torch.empty_like(rows)
        received[self._place.host] = rows[self._place.host]
        return self._start(rows, received)

    def _start(self, sent: Iterable[Tensor], received: Tensor) -> Arrival:
        peers = self._place.same_index
        wait = self._messages.start(dict(zip(peers, sent, strict=True)), dict(zip(peers, received, strict=True)))

        def arrive() -> Tensor:
            wait()
            return received

        return arrive


class SeveralHosts:
    """The collectives of a group with ranks on several hosts: memory within a host, messages between hosts."""

    def __init__(self, place: RankPlace, messages: HostMessages, local: HostCollectives | None) -> None:
        self.rank, self.size = place.rank, place.size
        self.local = local
        self._place = place
        self._messages = messages
        self._peers = MessagePeers(place, messages)
        self._local = local if place.num_local > 1 else None
        hosts = [[Node(0, host)] for host in range(place.num_hosts)]
        self._reduction = TwoLevelReduction(self._peers, hosts, place.num_hosts, self._local)

    def of_part(self, members: Sequence[int]) -> "SeveralHosts":
        """Return the collectives of only the ranks ``members``, with this rank; all data is sent by messages."""
        rank = members.index(self._place.members[self._place.rank])
        return SeveralHosts(RankPlace(rank=rank, num_local=1, members=members), self._messages, None)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", may_move: MayMove | None = None) -> None:
        """Combine the tensors of all ranks in place, bitwise equal on all ranks; ``may_move`` has no effect."""
        del may_move
        with self._call():
            flat = tensor.contiguous().view(-1)
            self._reduction.all_reduce([flat], op)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """Combine the tensors of all ranks into rank ``root``'s tensor; the other tensors stay unchanged."""
        result = tensor if self._place.rank == root else tensor.clone()
        self.all_reduce(result, op)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor of every rank with the tensor of rank ``root``."""
        peers, rank, sender = self._place.same_index, self._place.rank, self._place.members[root]
        with self._call():
            if rank == root:
                self._messages.swap(dict.fromkeys(peers, tensor), {})
            elif sender in peers:
                self._messages.swap({}, {sender: tensor})
            if self._local is not None:
                self._local.broadcast(tensor, root % self._place.num_local)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy the tensor of each rank into ``outputs[rank]``; all tensors must have the same length."""
        place = self._place
        with self._call():
            gathered = self._peers.all_gather(tensor)()
            if self._local is None:
                rows = [gathered]
            else:
                rows = [torch.empty_like(gathered) for _ in range(place.num_local)]
                self._local.all_gather([row.view(-1) for row in rows], gathered.view(-1))
            for rank, output in enumerate(outputs):
                output.copy_(rows[rank % place.num_local][rank // place.num_local])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """Combine ``tensors[i]`` of all ranks, where *i* is the number of this rank, into ``output``."""
        with self._call():
            shares = self._reduction.empty_shares(output, len(output))
            for rank, tensor in enumerate(tensors):
                self._reduction.share_of(shares, rank).copy_(tensor)
            output.copy_(self._reduction.reduce_scatter(shares, op))

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Send ``tensors[i]`` to each rank *i*, and receive its tensor into ``outputs[i]``; lengths may differ."""
        rank, members = self._place.rank, self._place.members
        with self._call():
            outputs[rank].copy_(tensors[rank])
            self._messages.swap(dict(zip(members, tensors, strict=True)), dict(zip(members, outputs, strict=True)))

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait until all ranks of all hosts are in this call."""
        with self._call():
            if self._local is not None:
                self._local.barrier(timeout_seconds)
            self._peers.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))()
            if self._local is not None:
                self._local.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set how long later collectives wait for a lost or late rank before raising an error."""
        self._messages.timeout_seconds = timeout_seconds
        if self.local is not None:
            self.local.set_timeout(timeout_seconds)

    def close(self) -> None:
        """Leave the group; the other ranks detect that this rank has left."""
        self._messages.close()
        if self.local is not None:
            self.local.close()

    def abort(self) -> None:
        """End a collective that runs in another thread of this process, with an error in that thread."""
        self._messages.close()
        if self._local is not None:
            self._local.abort()

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with self._messages.collective():
                yield
        except BackendError as error:
            if self._local is not None:
                self._local.group.barriers.fail(str(error))
            raise
