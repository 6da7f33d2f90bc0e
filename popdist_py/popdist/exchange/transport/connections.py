"""The connections between the instances of a job: gloo, NCCL or similar when needed, and a host's memory.

The process groups are made directly, never by ``init_process_group``, so that a program may have its own default
group, made before or after. Connections between accelerators are made later and need the store then; all other
connections work without the store, so that an instance that has finished may leave while other instances go on.
"""

import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.errors import BackendError, Names
from popdist.exchange.host_memory.forks import never_destroy_in_children
from popdist.exchange.host_memory.host_collectives import HostCollectives
from popdist.exchange.host_memory.host_group import ShortMessages
from popdist.exchange.transport.channel import Channel, as_backend_error
from popdist.exchange.transport.hosts import HostMessages, Member, RankPlace, SeveralHosts, connect
from popdist.ground import torch_private_groups
from popdist.ground.accelerators import BACKENDS, accelerator
from popdist.ground.accelerators.sharing import are_distinct

PROBE_TAG: Final = 1
"""The tag of messages that no instance sends: a receive with this tag shows whether a connection is closed."""

NICE: Final = 10
"""The nice value that is added for a channel's threads, so that computing threads run first; see sched(7)."""


def lower_priority() -> None:
    """Lower the priority of this thread and of threads that it starts, so that computing is not interrupted."""
    with suppress(OSError):  # otherwise each message would interrupt a matrix product and replace its caches
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19))


def check_available(backend: str | None) -> None:
    """Raise BackendError if ``backend`` (such as ``nccl``) needs accelerators that torch or this machine lacks."""
    needed = BACKENDS.get(backend or "")
    if needed is None:
        return
    asked = f"init(backend={backend!r}) sends tensors of {needed} devices alone"
    if accelerator.found_type() != needed or not accelerator.collectives_of(needed):
        raise BackendError(f"{asked}, and torch {torch.__version__} was built without {backend}")
    if not accelerator.num_devices():
        raise BackendError(f"{asked}, and torch sees none on this machine: leave backend= out")


class Connections:
    """Connections among all instances of a job; if instances hold parts of replicas, only among equal parts.

    All connections are made and closed together, from the same facts of the job, so the facts stay with them.
    """

    def __init__(  # noqa: PLR0913 - the facts of the job, by name
        self,
        store: Store,
        *,
        names: Names,  # names of all members
        instance_index: int,  # index of this instance among the members
        address: str | None,  # of this host, for the other instances; None lets gloo choose
        host: str,  # a text that is equal on all instances of a host
        timeout_seconds: float,
        header_bytes: int,
        warns_of_sharing: bool = True,  # whether to warn if instances share an accelerator
    ) -> None:
        self._warns_of_sharing = warns_of_sharing
        self.header_bytes = header_bytes
        self.names = names
        self.num_instances = len(names.members)
        self.instance_index = instance_index
        self.timeout_seconds = timeout_seconds
        self._store = store
        self._address = address
        self._host_name = host
        self._direct: dict[str, Any] = {}
        self._waiting: list[Thread] = []
        self._is_stopped = False
        self.control = self._connect(PrefixStore("control", store))
        member = Member(store=store, rank=instance_index, names=names, timeout_seconds=timeout_seconds)
        self.collectives = connect(member, host, self._connect)
        self.host = self.collectives if isinstance(self.collectives, HostCollectives) else None
        self.local_collectives = None if isinstance(self.collectives, HostCollectives) else self.collectives.local
        self.short_messages = None if self.host is None else ShortMessages(self.host.group, header_bytes)
        self._channels: dict[str, Channel] = {}
        self._channel_host: HostCollectives | None = None
        if self.host is None:
            with ThreadPoolExecutor(1, initializer=lower_priority) as creator:
                connected = creator.submit(self._connect, PrefixStore("channel", store)).result()
            if self.local_collectives is not None:
                self._channel_host = member.share_memory(self.local_collectives.size, "channel/hosts")
            self._channels["cpu"] = self._channel_over(connected, self._close_connections, self._channel_host)

    def _connect(self, store: Store) -> Any:
        with as_backend_error(f"{self.names.of([self.instance_index])} could not be connected with the others"):
            timeout = timedelta(seconds=self.timeout_seconds)
            gloo = torch_private_groups.connect_gloo(
                store, self.instance_index, self.num_instances, timeout, self._address
            )
        never_destroy_in_children(gloo)
        return gloo

    def between_hosts(self) -> SeveralHosts:
        """Return collectives by messages between hosts; in a job on one host, by messages between instances."""
        if isinstance(self.collectives, SeveralHosts):
            return self.collectives
        everybody = range(self.num_instances)
        store = PrefixStore("parts", self._store)
        messages = HostMessages(self.control, store, self.instance_index, self.names, self.timeout_seconds)
        return SeveralHosts(RankPlace(rank=self.instance_index, num_local=1, members=everybody), messages, None)

    def direct(self, device: torch.device) -> Any:
        """Return the backend that sends directly between accelerators; None if there is no such backend, or if two
        instances share an accelerator. All instances must make the first call together.
        """
        if device.type not in self._direct:
            with as_backend_error("the other instances did not tell of their accelerators"):
                place = self.num_instances, self.instance_index
                warns = self._warns_of_sharing
                is_distinct = are_distinct(self.collectives, *place, device, self._host_name, warns=warns)
            is_possible = is_distinct and accelerator.collectives_of(device.type)
            self._direct[device.type] = self._connect_direct(device.type, "direct") if is_possible else None
        return self._direct[device.type]

    def _connect_direct(self, device_type: str, name: str) -> Any:
        backend = accelerator.collectives_of(device_type)
        with as_backend_error(f"{self.names.of([self.instance_index])} could not start {backend}"):
            store, timeout = PrefixStore(f"{name}/{backend}", self._store), timedelta(seconds=self.timeout_seconds)
            direct = accelerator.connect(device_type, store, self.instance_index, self.num_instances, timeout)
            never_destroy_in_children(direct)
            return direct

    def channel(self, devices: Collection[torch.device]) -> Channel | None:
        """Return the channel, a thread for collectives on ``devices``. None for devices of several types, for CPUs
        of one host, and for accelerators without a backend that sends directly.
        """
        types = {device.type for device in devices}
        if len(types) > 1:
            return None
        (device_type,) = types
        if device_type != "cpu" and device_type not in self._channels and self.direct(next(iter(devices))):
            # all instances connect now, because a later connection might wait for the program's computations
            made = self._channel_over(self._connect_direct(device_type, "channel"), lambda direct: direct.abort())
            with as_backend_error(f"{self.names.of([self.instance_index])} could not connect its accelerators"):
                for device in devices:
                    made.all_gather(torch.zeros(1, dtype=torch.float32, device=device))
            self._channels[device_type] = made
        return self._channels.get(device_type)

    def _channel_over(
        self,
        process_group: Any,
        abort: Callable[[Any], None],
        local_collectives: HostCollectives | None = None,
    ) -> Channel:
        others = self.peers_among(range(self.num_instances))
        return Channel(
            process_group,
            self.num_instances,
            self.instance_index,
            abort=abort,
            name_lost=lambda: self._name([other for other in others if self.is_lost(other)]),
            local_collectives=local_collectives,
        )

    def _name(self, instances: list[int]) -> str:
        return self.names.of(instances) if instances else ""

    def peers_among(self, instances: Iterable[int]) -> list[int]:
        """Return all of ``instances`` except this instance."""
        return [instance for instance in instances if instance != self.instance_index]

    def is_lost(self, peer: int) -> bool:
        """Whether the connection to the instance ``peer`` is known to be closed."""
        try:
            self.control.recv([torch.empty(1, dtype=torch.float32, device="cpu")], peer, PROBE_TAG)
        except RuntimeError:
            return True
        return False

    def check_open(self) -> None:
        """Raise BackendError if this instance has ended its threads or left the job; then no thread may start."""
        if self._is_stopped:
            raise BackendError(f"{self.names.of([self.instance_index])} has left the job")

    def in_background(self, wait: Callable[[], None]) -> Thread:
        """Run ``wait`` in a new thread, and return the thread: a timeout of gloo's own would close connections."""
        self.check_open()
        thread = Thread(target=wait, daemon=True)
        self._waiting = [other for other in self._waiting if other.is_alive()] + [thread]
        thread.start()
        return thread

    def stop_threads(self) -> None:
        """End all threads, because a thread that frees a tensor after Python's end aborts the process."""
        self._is_stopped = True
        for channel in self._channels.values():
            channel.close()
        self._channels = {}
        self._direct = {}
        waiting = [thread for thread in self._waiting if thread.is_alive()]
        if waiting:
            self._close_connections(self.control)
        for thread in waiting:
            thread.join()

    def _close_connections(self, gloo: Any) -> None:
        """Close a gloo group's connections and so end its waits: a receive that times out closes a connection."""
        for peer in self.peers_among(range(self.num_instances)):
            with suppress(RuntimeError):
                gloo.recv([torch.empty(1, dtype=torch.float32, device="cpu")], peer, PROBE_TAG).wait(
                    timedelta(milliseconds=1)
                )

    def close(self) -> None:
        """Close all connections of this instance to other instances."""
        self.stop_threads()
        self.control = None
        self.collectives.close()
        if self._channel_host is not None:
            self._channel_host.close()
