"""The backend over torch.distributed: gloo for headers and CPU tensors, NCCL or similar for accelerators.

Tensors of an accelerator go through CPU memory if no backend sends between the accelerators: for a part of the
job, for a device without such a backend, and if two instances share a device, which NCCL refuses.

If the instances share a host, headers and CPU tensors go through its memory instead of gloo. Each instance sends
headers directly to every other instance: so the number of a lost or late instance is known, and a subset of the
instances needs no connections of its own.
"""

import struct
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from popdist.errors import BackendError, Names
from popdist.exchange.host_memory.addition import Op
from popdist.exchange.host_memory.host_collectives import HostCollectives, as_bytes
from popdist.exchange.host_memory.host_group import HostGroup, ShortMessages
from popdist.exchange.host_memory.segments import PAGE_BYTES, Reservation
from popdist.exchange.transport.channel import Channel, as_backend_error
from popdist.exchange.transport.connections import Connections
from popdist.exchange.transport.hosts import SeveralHosts
from popdist.exchange.transport.serial_backend import SerialBackend
from popdist.exchange.transport.two_level import TwoLevelReduction, WaitingPeers
from popdist.ground.torch_private_groups import gather_into
from popdist.ground.tree import Node

if TYPE_CHECKING:
    from threading import Thread


class GlooHeaderExchange:
    """An exchange of headers, the messages before a collective, between instances over gloo."""

    def __init__(self, connections: Connections, instances: tuple[int, ...], header: bytes) -> None:
        connections.check_open()
        self._connections = connections
        self._instances = instances
        self._header = header
        peers = connections.peers_among(instances)
        self._received = {peer: torch.empty(len(header), dtype=torch.uint8, device="cpu") for peer in peers}
        self._sent = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._works: dict[int, list[dist.Work]] = {}
        self._failures: dict[int, RuntimeError] = {}
        self._thread: Thread | None = None
        for peer, row in self._received.items():
            try:
                self._works[peer] = [
                    connections.control.recv([row], peer, 0),
                    connections.control.send([self._sent], peer, 0),
                ]
            except RuntimeError as error:
                self._failures[peer] = error

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Return all instances' headers (messages). Raises BackendError if an instance is late or lost."""
        if timeout_seconds is None and self._thread is None:
            self._receive()
        else:
            self._thread = self._thread or self._connections.in_background(self._receive)
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                raise BackendError(
                    f"{self._connections.names.of(self._works)} did not come within {timeout_seconds:g} seconds"
                )
        if self._failures:
            raise BackendError(self._blame()) from next(iter(self._failures.values()))
        return self._headers()

    def peek(self) -> list[bytes] | None:
        """Return all instances' headers (messages) if all have come; None otherwise. Never waits, never raises."""
        with suppress(BackendError):
            self._thread = self._thread or self._connections.in_background(self._receive)
        is_there = self._thread is not None and not self._thread.is_alive() and not self._failures
        return self._headers() if is_there else None

    def _headers(self) -> list[bytes]:
        received = {instance: row.numpy().tobytes() for instance, row in self._received.items()}
        return [received.get(instance, self._header) for instance in self._instances]

    def _receive(self) -> None:
        """Receive all instances' headers (messages); if an instance is lost or late, record an error and end."""
        deadline = time.monotonic() + self._connections.timeout_seconds
        while self._works and not self._failures:
            peer = next(iter(self._works))
            try:
                for work in self._works[peer]:
                    if not work.is_completed():  # a second wait, after an interrupted wait, would never end
                        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                self._failures[peer] = error
            del self._works[peer]

    def _blame(self) -> str:
        """Return an error message that names the instance that was late, or else all instances that were lost."""
        peer, error = next(iter(self._failures.items()))
        if "timed out" in str(error).lower():
            late = self._connections.names.of([peer])
            return f"{late} did not come within {self._connections.timeout_seconds:g} seconds"
        lost = {*self._failures, *(other for other in self._works if self._connections.is_lost(other))}
        return f"the connection to {self._connections.names.of(lost)} was closed: it ended or was lost"


class MemoryHeaderExchange:
    """An exchange of headers, the messages before a collective, between instances that share memory."""

    __slots__ = ("_connections", "_instances", "_numbers", "_received", "_short_messages")

    def __init__(
        self,
        connections: Connections,
        short_messages: ShortMessages,
        instances: tuple[int, ...],
        header: bytes,
    ) -> None:
        self._connections = connections
        self._short_messages = short_messages
        self._instances = instances
        own = connections.instance_index
        self._received: dict[int, bytes] = {own: header}
        peers = [instance for instance in instances if instance != own]
        self._numbers = dict(zip(peers, short_messages.send(peers, header), strict=True))

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Return all instances' headers (messages). Raises BackendError if an instance is late or lost."""
        limit = self._connections.timeout_seconds if timeout_seconds is None else timeout_seconds
        if late := self._receive(limit):
            raise BackendError(f"{self._connections.names.of(late)} did not come within {limit:g} seconds")
        return [self._received[instance] for instance in self._instances]

    def peek(self) -> list[bytes] | None:
        """Return all instances' headers (messages) if all have come; None otherwise. Never waits, never raises."""
        with suppress(BackendError):
            if not self._receive(0.0):
                return [self._received[instance] for instance in self._instances]
        return None

    def _receive(self, timeout_seconds: float) -> list[int]:
        """Receive and keep headers (messages) that come in ``timeout_seconds``; return the missing instances."""
        late, deadline = [], time.monotonic() + timeout_seconds
        for instance, number in self._numbers.items():
            if instance not in self._received:
                seconds_left = max(deadline - time.monotonic(), 0.0)
                message = self._short_messages.receive(instance, number, seconds_left)
                if message is None:
                    late.append(instance)
                else:
                    self._received[instance] = message
        return late


_NO_DATA: Final = "the data of the other instances did not come"

_NO_ROOM: Final = -1

_SUBSET_MARK: Final = b"memory of a part"
_SUBSET_MESSAGE: Final = struct.Struct("<16sq")


class MemoryOfSubsets:
    """The shared memory of subsets of a job's instances; each subset makes its memory when it first sends data."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._made: dict[tuple[int, ...], HostCollectives | None] = {}
        self._failures: dict[tuple[int, ...], str] = {}

    def of(self, instances: tuple[int, ...]) -> HostCollectives | None:
        """Return shared-memory collectives for ``instances``, which all call this; None if memory is missing."""
        if instances in self._failures:
            raise BackendError(self._failures[instances])
        if instances not in self._made:
            try:
                self._made[instances] = self._make(instances)
            except BackendError as error:
                self._failures[instances] = str(error)
                raise
        return self._made[instances]

    def close(self) -> None:
        """Leave the shared memory of all subsets; the other instances detect that this instance has left."""
        for collectives in self._made.values():
            if collectives is not None:
                collectives.close()

    def _make(self, instances: tuple[int, ...]) -> HostCollectives | None:
        host, short_messages = self._connections.host, self._connections.short_messages
        if host is None or short_messages is None:
            return None
        page, part = _page_of(host.group), None
        offsets = self._exchange(short_messages, instances, _NO_ROOM if page is None else page.offset)
        if page is not None and _NO_ROOM not in offsets:
            with suppress(OSError, ValueError):
                part = host.group.part(instances, page, offsets)
        have_all = all(self._exchange(short_messages, instances, int(part is not None)))
        return _collectives_of(part) if part is not None and have_all else None

    def _exchange(self, short_messages: ShortMessages, instances: tuple[int, ...], number: int) -> list[int]:
        """Send ``number``, which describes this instance's shared memory, to ``instances``; return the numbers of
        all. Raise BackendError if an instance sends another message, such as a header.
        """
        message = _SUBSET_MESSAGE.pack(_SUBSET_MARK, number).ljust(self._connections.header_bytes, b"\0")
        received = MemoryHeaderExchange(self._connections, short_messages, instances, message).wait()
        unpacked = [_SUBSET_MESSAGE.unpack_from(data) for data in received]
        if any(mark != _SUBSET_MARK for mark, _ in unpacked):
            raise BackendError(f"{self._connections.names.of(instances)} do not share memory at the same time")
        return [other_number for _, other_number in unpacked]


def _page_of(group: HostGroup) -> Reservation | None:
    with suppress(BackendError):
        return group.reserve(PAGE_BYTES)
    return None


def _collectives_of(part: HostGroup) -> HostCollectives | None:
    """Return the collectives of ``part``, instances of one host; None on all instances if memory is too small."""
    try:
        return HostCollectives(part)
    except BackendError:
        part.barriers.raise_failure()
        return None


class TorchBackend:
    """The collectives of two or more instances of a job, over the job's connections (gloo, NCCL or memory)."""

    def __init__(
        self,
        connections: Connections,
        instances: tuple[int, ...],
        device_kinds: frozenset[str],  # kinds of devices whose tensors are accepted
        subsets: MemoryOfSubsets | None = None,  # of the whole job; given for a part of the job
    ) -> None:
        self.instances = instances
        self.instance_index = connections.instance_index
        self.device_kinds = device_kinds
        self._connections = connections
        self._subsets = MemoryOfSubsets(connections) if subsets is None else subsets
        self._by_messages: SeveralHosts | None = None

    @property
    def names(self) -> Names:
        """The names of the instances in messages to the user."""
        return self._connections.names

    @property
    def _is_whole_job(self) -> bool:
        return len(self.instances) == self._connections.num_instances

    @property
    def host_group(self) -> HostGroup | None:
        """The instances that share this host's memory, if they are the whole job; otherwise None."""
        is_used = self._is_whole_job and "cpu" in self.device_kinds
        return self._connections.host.group if is_used and self._connections.host is not None else None

    @property
    def local_collectives(self) -> HostCollectives | None:
        """The shared-memory collectives of this host's instances, if the job is on several hosts; else None."""
        return self._connections.local_collectives if self._is_whole_job and "cpu" in self.device_kinds else None

    def _collectives(self) -> HostCollectives | SeveralHosts:
        """Return the collectives on CPU tensors; a part of the job makes its shared memory at the first call."""
        if self._is_whole_job:
            return self._connections.collectives
        shared = self._subsets.of(self.instances)
        if shared is not None:
            return shared
        if self._by_messages is None:
            self._by_messages = self._connections.between_hosts().of_part(self.instances)
        return self._by_messages

    def channel(self, devices: Collection[torch.device]) -> Channel | None:
        """Return the channel, the thread that runs collectives on ``devices`` in the background; None if this
        backend is a part of the job, or does not accept tensors of ``devices``.
        """
        kinds = {"cpu" if device.type == "cpu" else "accelerator" for device in devices}
        is_possible = self._is_whole_job and self.device_kinds >= kinds
        return self._connections.channel(devices) if is_possible else None

    def _direct(self, tensor: Tensor) -> Any:
        """Return the backend (such as NCCL) for ``tensor``; None if ``tensor`` must go through CPU memory."""
        return self._connections.direct(tensor.device) if self._is_whole_job else None

    def start_exchange(self, header: bytes) -> GlooHeaderExchange | MemoryHeaderExchange:
        """Start sending ``header``, a message, to all other instances; return the exchange of all headers."""
        short_messages = self._connections.short_messages
        if short_messages is not None:
            return MemoryHeaderExchange(self._connections, short_messages, self.instances, header)
        return GlooHeaderExchange(self._connections, self.instances, header)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Combine the flat tensors of all instances by ``op``, in place."""
        if tensor.is_cpu:
            with as_backend_error(_NO_DATA):
                self._collectives().all_reduce(tensor, op)
        elif self._direct(tensor) is None:
            staged = tensor.cpu()
            self.all_reduce(staged, op)
            tensor.copy_(staged)
        else:
            nodes = [[Node(0, place)] for place in range(len(self.instances))]
            TwoLevelReduction(WaitingPeers(self), nodes, len(nodes)).all_reduce([tensor], op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ``tensor`` of every instance, stacked in instance order."""
        gathered = tensor.new_empty((len(self.instances), *tensor.shape))
        if not tensor.numel():
            return gathered
        if tensor.is_cpu:
            with as_backend_error(_NO_DATA):
                self._collectives().all_gather([as_bytes(row) for row in gathered], as_bytes(tensor))
        elif (direct := self._direct(tensor)) is None:
            gathered.copy_(self.all_gather(tensor.cpu()))
        else:
            with as_backend_error(_NO_DATA):
                gather_into(direct, as_bytes(gathered), as_bytes(tensor))
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send ``tensor[j]`` to the *j*-th instance; return a tensor whose row *i* is from the *i*-th instance."""
        received = torch.empty_like(tensor)
        if tensor.is_cpu:
            with as_backend_error(_NO_DATA):
                self._collectives().all_to_all([as_bytes(it) for it in received], [as_bytes(it) for it in tensor])
        elif (direct := self._direct(tensor)) is None:
            received.copy_(self.all_to_all(tensor.cpu()))
        else:
            with as_backend_error(_NO_DATA):
                direct.alltoall_base(as_bytes(received), as_bytes(tensor), [], []).wait()
        return received

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` on every instance with the tensor of instance ``root``."""
        if not tensor.numel():
            return
        if not tensor.is_cpu and (direct := self._direct(tensor)) is None:
            staged = tensor.cpu()
            self.broadcast(staged, root)
            tensor.copy_(staged)
            return
        with as_backend_error(f"the data of {self.names.of([root])} did not come"):
            if tensor.is_cpu:
                self._collectives().broadcast(as_bytes(tensor), self.instances.index(root))
            else:
                direct.broadcast(as_bytes(tensor), root).wait()

    def subgroup(self, instances: tuple[int, ...]) -> "TorchBackend | SerialBackend":
        """Return a backend for ``instances`` only, over the same connections."""
        if len(instances) == 1:
            return SerialBackend(self.instance_index, self.names, device_kinds=self.device_kinds)
        return TorchBackend(self._connections, instances, self.device_kinds, self._subsets)

    def stop_threads(self) -> None:
        """End the threads of this process. The connections for headers (messages) stay open until the process has
        ended, so that other instances blame no living process.
        """
        self._connections.stop_threads()

    def close(self) -> None:
        """Close the connections of the whole job, and leave the shared memory of all subsets of its instances."""
        self._subsets.close()
        self._connections.close()
