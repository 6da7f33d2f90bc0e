"""The connections between the instances of a job: gloo, NCCL when it is needed, and the memory of a host.

The process groups are made directly, never through ``init_process_group``, so a program may have a default group
of its own, made before or after. All connections are made at the start: afterwards only NCCL needs the store,
and an instance that has finished may leave while others go on.
"""

import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.errors import BackendError
from popdist.host_memory.barriers import Names
from popdist.host_memory.forks import never_destroy_in_children
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.short_messages import ShortMessages
from popdist.transport.channel import Channel, as_backend_error

PROBE_TAG: Final = 1
"""Tag of messages that nobody sends; headers and data have tag 0."""

NICE: Final = 10
"""How much of a core the threads of a channel leave to those that compute; see sched(7)."""


def step_back() -> None:
    """Have this thread, and those that it starts, not interrupt what computes on their core.

    Each arrival would else take the core from a product of matrices, and its caches with it; so messages are taken
    in fewer and larger parts. Where a core is free, or waits for messages, nothing changes.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19))


SEND_BYTES: Final = 208 << 10
"""What a connection of a channel holds of what it sends, and as much again for the kernel; see socket(7)."""

NEAR_SECONDS: Final = 200e-6
"""A way there and back in which 17 Gbit/s and more need no longer buffer than twice :data:`SEND_BYTES`."""

_MIN_RTT: Final = struct.Struct("148x I")
"""The shortest way there and back so far, in microseconds, in ``struct tcp_info`` of <linux/tcp.h>."""


@contextmanager
def short_buffers() -> Iterator[None]:
    """Have the connections of this process that are made in the block hold little of what they send.

    The kernel else lets such a buffer grow to megabytes. What goes through it leaves the caches before it goes
    out, and takes with it what the program computes with; both cost more than the waits of a shorter buffer do.
    Where the way to the other end is long it stays as it is: it has to hold all that is on the way.
    """
    others = _sockets()
    yield
    for descriptor in _sockets() - others:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if is_near(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def _sockets() -> set[int]:
    found = set[int]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself was one, and other threads close theirs
            if entry.is_socket():
                found.add(int(entry.name))
    return found


def is_near(information: bytes) -> bool:
    """Whether a connection of which the kernel says this has a short way; not where it does not say how short."""
    return len(information) == _MIN_RTT.size and 0 < _MIN_RTT.unpack(information)[0] < NEAR_SECONDS * 1e6


def check_available(device_types: frozenset[str]) -> None:
    """Refuse a choice of devices that this build of torch cannot connect.

    Raises:
        BackendError: If only CUDA tensors are to be sent and torch was built without NCCL.
    """
    if device_types == {"cuda"} and not dist.is_nccl_available():
        raise BackendError(f"backend 'nccl' was asked for, but torch {torch.__version__} was built without NCCL")


class Connections:
    """The connections of a whole job; rank and instance index are the same number.

    Args:
        store: Where the instances find each other; used by nobody else under its prefix.
        num_instances: Instances in the job. At least 2.
        instance_index: This instance.
        address: Address of this host at which the others reach it, of loopback when all share it; None lets gloo
            choose.
        num_local_instances: Instances that are said to share this host. If these are all, CPU tensors go through
            its memory; if each host has as many, those of a host add there. Mapping it proves that they share it.
        timeout_seconds: How long a lost or late instance is waited for.
        header_bytes: Length of a header.
    """

    def __init__(  # noqa: PLR0913 - facts of the job, by name
        self,
        store: Store,
        *,
        num_instances: int,
        instance_index: int,
        address: str | None,
        num_local_instances: int,
        timeout_seconds: float,
        header_bytes: int,
    ) -> None:
        self.header_bytes = header_bytes
        self.num_instances = num_instances
        self.instance_index = instance_index
        self.timeout_seconds = timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store = store
        self._address = address
        self._nccl: Any = None
        self._waiting: list[Thread] = []
        self._is_stopped = False
        self.control = self._connect("control")
        self.gloo = self._connect("gloo")
        is_one_host = num_local_instances == num_instances
        self.host = self._share_memory(num_instances) if is_one_host else None
        self.local_collectives = None if is_one_host else self._share_with_host(num_local_instances)
        self.short_messages = None if self.host is None else ShortMessages(self.host.group, header_bytes)
        self._channels: dict[str, Channel] = {}
        self._channel_host: HostCollectives | None = None
        if self.host is None:
            with short_buffers(), ThreadPoolExecutor(1, initializer=step_back) as creator:
                connected = creator.submit(self._connect, "channel").result()
            if self.local_collectives is not None:
                self._channel_host = self._share_with_host(num_local_instances, "channel/hosts")
            self._channels["cpu"] = self._channel_over(connected, self._close_connections, self._channel_host)

    def _connect(self, name: str) -> Any:  # noqa: ANN401 - torch's stubs lack the calls that take lists of tensors
        gloo: Any = dist.ProcessGroupGloo
        store = PrefixStore(name, self._store)
        with as_backend_error(f"instance {self.instance_index} could not be connected with the others"):
            if self._address is None:
                made = gloo(store, self.instance_index, self.num_instances, self._timeout)
                never_destroy_in_children(made)
                return made
            options = gloo._Options()  # noqa: SLF001 - torch offers no other way to choose the address
            options._devices = [gloo.create_device(hostname=self._address)]  # noqa: SLF001 - as above
            options._timeout = self._timeout  # noqa: SLF001 - as above
            made = gloo(store, self.instance_index, self.num_instances, options)
            never_destroy_in_children(made)
            return made

    def _share_memory(self, num_local: int, prefix: str = "hosts") -> HostCollectives | None:
        """Collectives in this host's memory, where each host has as many instances; None where they share none."""
        names = Names(members=tuple(range(self.num_instances)), noun="instance")
        store = PrefixStore(prefix, self._store)
        return HostCollectives.connect(
            store, self.instance_index, num_local, names=names, timeout_seconds=self.timeout_seconds
        )

    def _share_with_host(self, num_local: int, prefix: str = "hosts") -> HostCollectives | None:
        """Collectives in this host's memory; None on all instances unless each host has as many in a row."""
        if set(self._tell_all(num_local)) != {num_local} or num_local == 1:
            return None
        found = self._share_memory(num_local, prefix)
        if all(self._tell_all(found is not None)):
            return found
        if found is not None:
            found.close()
        return None

    def _tell_all(self, number: int) -> list[int]:
        """The number of every instance, in their order."""
        told = torch.empty(self.num_instances, 1, dtype=torch.int64)
        with as_backend_error(f"instance {self.instance_index} could not be connected with the others"):
            self.gloo.allgather([list(told.unbind())], [torch.tensor([int(number)], dtype=torch.int64)]).wait()
        return told.flatten().tolist()

    @property
    def nccl(self) -> Any:  # noqa: ANN401 - as above
        """The NCCL group, made at the first collective on CUDA tensors, in which all instances are together."""
        if self._nccl is None:
            self._nccl = self._start_nccl("nccl")
        return self._nccl

    def _start_nccl(self, name: str) -> Any:  # noqa: ANN401 - as above
        with as_backend_error(f"instance {self.instance_index} could not start NCCL"):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout  # noqa: SLF001 - the only way to set it
            store = PrefixStore(name, self._store)
            made = dist.ProcessGroupNCCL(store, self.instance_index, self.num_instances, options)
            never_destroy_in_children(made)
            return made

    def channel(self, devices: Collection[torch.device]) -> Channel | None:
        """The channel for tensors on ``devices``, all of one type.

        All instances are together in the first call for CUDA, and NCCL connects them then: later it might wait for
        what the program computes meanwhile.

        Returns:
            None where CPU tensors go through the memory of one host, and where the devices are of several types.
        """
        types = {device.type for device in devices}
        if types == {"cuda"} and "cuda" not in self._channels:
            made = self._channel_over(self._start_nccl("channel/nccl"), lambda nccl: nccl.abort())
            with as_backend_error(f"instance {self.instance_index} could not start NCCL"):
                for device in devices:
                    made.all_gather(torch.zeros(1, dtype=torch.float32, device=device))
            self._channels["cuda"] = made
        return self._channels.get(types.pop()) if len(types) == 1 else None

    def _channel_over(
        self,
        process_group: Any,  # noqa: ANN401 - as above
        break_off: Callable[[Any], None],
        local_collectives: HostCollectives | None = None,
    ) -> Channel:
        others = self.peers_among(range(self.num_instances))
        return Channel(
            process_group,
            self.num_instances,
            self.instance_index,
            break_off=break_off,
            find_lost=lambda: [other for other in others if self.is_lost(other)],
            local_collectives=local_collectives,
        )

    def peers_among(self, instances: Iterable[int]) -> list[int]:
        """All of ``instances`` but this one."""
        return [instance for instance in instances if instance != self.instance_index]

    def is_lost(self, peer: int) -> bool:
        """Whether the connection to ``peer`` is known to be closed: then nothing can be asked of it any more."""
        try:
            self.control.recv([torch.empty(1, dtype=torch.float32)], peer, PROBE_TAG)
        except RuntimeError:
            return True
        return False

    def check_open(self) -> None:
        """Raise BackendError if this instance has left or is leaving: a thread that starts then may never run."""
        if self._is_stopped:
            raise BackendError(f"instance {self.instance_index} has left the job")

    def in_background(self, wait: Callable[[], None]) -> Thread:
        """Run ``wait`` in a thread: gloo closes all connections when a wait of its own takes too long."""
        self.check_open()
        thread = Thread(target=wait, daemon=True)
        self._waiting = [other for other in self._waiting if other.is_alive()] + [thread]
        thread.start()
        return thread

    def stop_threads(self) -> None:
        """End all threads: one that lets go of a tensor when the interpreter is gone aborts the process."""
        self._is_stopped = True
        for channel in self._channels.values():
            channel.close()
        self._channels = {}
        self.gloo = self._nccl = None
        waiting = [thread for thread in self._waiting if thread.is_alive()]
        if waiting:
            self._close_connections(self.control)
        for thread in waiting:
            thread.join()

    def _close_connections(self, gloo: Any) -> None:  # noqa: ANN401 - as above
        """End all waits of a group of gloo's: a wait that takes too long closes its connections.

        One for a lost instance fails at once, and closes nothing.
        """
        for peer in self.peers_among(range(self.num_instances)):
            with suppress(RuntimeError):
                gloo.recv([torch.empty(1, dtype=torch.float32)], peer, PROBE_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Drop the connections."""
        self.stop_threads()
        self.control = None
        for shared in (self.host, self.local_collectives, self._channel_host):
            if shared is not None:
                shared.close()
